"""Who a key is to a query: visible, a separator, far, one of its targets.

**Far** is beyond the largest distance that training showed, in the position scheme's own unit: columns for rotary 2D,
tokens for plain rotary and none. Separators are a class of their own.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from models.addition import Batch
from models.attention import Span
from models.positions import coordinates
from models.transformer import HookedAdder

BEYOND_ALL = 2**31 - 1  # the distance given to pooled keys: all are far


class Partition:
    """The classes of keys in one batch, for a block of queries and keys at a time (:class:`models.attention.Span`).

    All are bool ``[batch, query, key]``, over the keys of the span.
    """

    def __init__(self, model: HookedAdder, batch: Batch):
        vocab = model.task.vocabulary
        self.batch = batch
        self.scheme = model.scheme
        self.trained_distance = model.config.trained_distance
        self.at = coordinates(
            batch.tokens, batch.mask, (vocab.plus, vocab.equals), model.config.attention.separator_column
        )

    def visible(self, span: Span) -> Bool[Tensor, "batch query key"]:
        """Keys at or before the query, padding aside; a padded query sees none."""
        queries = torch.arange(span.query.start, span.query.stop)
        causal = span.positions <= queries[:, None]
        real = self.batch.mask[:, span.key]
        if span.pooled:
            real[:, 0] = True
        return causal & real[:, None] & self.batch.mask[:, span.query, None]

    def distance(self, span: Span) -> Int[Tensor, "batch query key"]:
        """How far each key is, in the scheme's unit."""
        distance = self.scheme.distance(self.at.at(span.query), self.at.at(span.key))
        if span.pooled:
            distance[..., 0] = BEYOND_ALL
        return distance

    def separator(self, span: Span) -> Bool[Tensor, "batch 1 key"]:
        """Keys that are a ``+`` or ``=``, whatever the query."""
        separator = self.at.separator[:, None, span.key]
        return separator & (span.positions >= 0)

    def far(self, span: Span) -> Bool[Tensor, "batch query key"]:
        """Visible keys beyond the trained distance, separators aside."""
        beyond = self.distance(span) > self.trained_distance
        return self.visible(span) & beyond & ~self.separator(span)

    def targets(self, span: Span) -> Bool[Tensor, "batch query key"]:
        """Keys that some lookup of the query is after."""
        return self._marked([lookup.targets for lookup in self.batch.lookups.values()], span)

    def target_set(self, lookup: str, span: Span) -> Bool[Tensor, "batch query key"]:
        """Keys that this lookup of the query is after."""
        return self._marked([self.batch.lookups[lookup].targets], span)

    @staticmethod
    def _marked(sets: list[Tensor], span: Span) -> Bool[Tensor, "batch query key"]:
        targets = torch.cat([s[:, span.query] for s in sets], dim=-1)
        at = key_index(span, targets)
        hit = torch.zeros(*at.shape[:2], len(span.positions) + 1, dtype=torch.bool)
        return hit.scatter_(2, torch.where(at < 0, len(span.positions), at), True)[..., :-1]


def key_index(span: Span, positions: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Where each position stands on the span's key axis; -1 where it does not, or where the position is -1."""
    if isinstance(span.key, slice):
        return torch.where(positions < span.key.stop, positions, -1)
    at = torch.searchsorted(span.key, positions.contiguous()).clamp(max=len(span.key) - 1)
    return torch.where((span.key[at] == positions) & (positions >= 0), at, -1)
