"""Who a key is to a query: visible, a separator, far, one of its targets.

**Far** is beyond the largest distance that training showed, in the position scheme's own unit: columns for rotary 2D,
tokens for plain rotary and none. Separators are a class of their own.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from models.addition import Batch
from models.positions import coordinates
from models.transformer import HookedAdder


class Partition:
    """The classes of keys in one batch, for a block of queries at a time.

    All are bool ``[batch, query, key]``; the key axis ends with the block's last query, as in the model's hooks.
    """

    def __init__(self, model: HookedAdder, batch: Batch):
        vocab = model.task.vocabulary
        self.batch = batch
        self.scheme = model.scheme
        self.trained_distance = model.config.trained_distance
        self.at = coordinates(
            batch.tokens, batch.mask, (vocab.plus, vocab.equals), model.config.attention.separator_column
        )
        self.separator: Bool[Tensor, "batch key"] = (batch.tokens == vocab.plus) | (batch.tokens == vocab.equals)

    def visible(self, queries: slice) -> Bool[Tensor, "batch query key"]:
        """Keys at or before the query, padding aside; a padded query sees none."""
        causal = torch.arange(queries.stop) <= torch.arange(queries.start, queries.stop)[:, None]
        return causal & self.batch.mask[:, None, : queries.stop] & self.batch.mask[:, queries, None]

    def distance(self, queries: slice) -> Int[Tensor, "batch query key"]:
        """How far each key is, in the scheme's unit."""
        return self.scheme.distance(self.at.at(queries), self.at.at(slice(0, queries.stop)))

    def far(self, queries: slice) -> Bool[Tensor, "batch query key"]:
        """Visible keys beyond the trained distance, separators aside."""
        beyond = self.distance(queries) > self.trained_distance
        return self.visible(queries) & beyond & ~self.separator[:, None, : queries.stop]

    def targets(self, queries: slice) -> Bool[Tensor, "batch query key"]:
        """Keys that some lookup of the query is after."""
        return self._marked([lookup.targets for lookup in self.batch.lookups.values()], queries)

    def target_set(self, lookup: str, queries: slice) -> Bool[Tensor, "batch query key"]:
        """Keys that this lookup of the query is after."""
        return self._marked([self.batch.lookups[lookup].targets], queries)

    @staticmethod
    def _marked(sets: list[Tensor], queries: slice) -> Bool[Tensor, "batch query key"]:
        keys = torch.cat([s[:, queries] for s in sets], dim=-1)
        hit = torch.zeros(*keys.shape[:2], queries.stop + 1, dtype=torch.bool)
        return hit.scatter_(2, torch.where(keys < 0, queries.stop, keys), True)[..., :-1]
