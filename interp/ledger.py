"""The ledger: one pass that keeps, per layer, head, query and class of key, what every share, gap and leak comes from.

Kept for each class of key: the log-mass ``log sum exp(s)``, the log of the second moment ``log sum exp(2 s)``, and the
maximum. The classes partition the keys that a query sees: **self**, **separator**, **near**, **far**
(:mod:`interp.partition`); padding is seen by nobody. A query may perform several lookups, so the few keys that are
somebody's target are kept one by one, and each lookup then sorts them into its target and the classes: no mass is ever
subtracted from another, and a leak of 1e-12 keeps its digits. The sink is kept by itself.

``source="scores"`` reads what enters the softmax. ``source="pattern"`` reads the logarithm of the weights, for
normalizers that are not exponentials: there the share p is read off, and ``(1 - p) / p`` is the leak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Edit
from interp.leak import effective_number, leak_from_masses, log_slope, share_from_leak
from interp.memory import require
from interp.partition import Partition, key_index
from interp.passes import Progress, run_problems
from models.addition import LOOKUPS, STATES, Batch, Problem
from models.attention import Span, joined
from models.positions import within
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

CLASSES = ("self", "separator", "near", "far")
Source = Literal["scores", "pattern"]
_KEPT_BYTES = 3 * 12 * 8  # a lookup's floats per query and head; thrice, while parts are joined and sorted


@dataclass(frozen=True)
class LookupLedger:
    """One lookup, present or with nothing to find, in every head. Arrays are ``[layer, head, query]``.

    ``target``: log-mass of the target set (of the sink where there is nothing to find). ``rest``: log-mass of all other
    keys, the sink aside; ``rest_second`` and ``rest_max``: their second moment and maximum. ``classes``: log-mass per
    class, ``[layer, head, query, class]``, the target aside. ``far_max``: the highest score of a far key. ``sink``: the
    sink's score. ``beside``: log-mass of the keys one column to either side of the target. ``column``, ``state``,
    ``problem``, ``keys``, ``far_keys`` (how many of them are far): per query ``[query]``.
    """

    name: str
    present: bool
    target: np.ndarray
    rest: np.ndarray
    rest_second: np.ndarray
    rest_max: np.ndarray
    classes: np.ndarray
    far_max: np.ndarray
    sink: np.ndarray
    beside: np.ndarray
    column: np.ndarray
    state: np.ndarray
    problem: np.ndarray
    query: np.ndarray
    keys: np.ndarray
    far_keys: np.ndarray

    @property
    def leak(self) -> np.ndarray:
        """Sum of ``exp(-gap)`` over everything but the target, sink included."""
        rest = np.logaddexp(self.rest, self.sink) if self.present else self.rest
        return leak_from_masses(self.target, rest)

    @property
    def share(self) -> np.ndarray:
        """The target's share of the attention: ``1 / (1 + leak)``."""
        return share_from_leak(self.leak)

    @property
    def gap(self) -> np.ndarray:
        """The target's score less that of the best other key: the smallest gap."""
        return self.target - self.rest_max

    @property
    def n_eff(self) -> np.ndarray:
        """How many keys compete in effect, the sink left out."""
        return effective_number(self.rest, self.rest_second)

    @property
    def total(self) -> np.ndarray:
        """Log-mass of everything: the softmax's denominator."""
        return np.logaddexp(np.logaddexp(self.rest, self.sink), self.target if self.present else -np.inf)

    @property
    def sink_share(self) -> np.ndarray:
        return np.exp(self.sink - self.total)

    @property
    def class_shares(self) -> np.ndarray:
        """``[layer, head, query, class]``, in the order of :data:`CLASSES`, the target left out of its class."""
        return np.exp(self.classes - self.total[..., None])

    @property
    def far_max_share(self) -> np.ndarray:
        """Share of the far key that has the most."""
        return np.exp(self.far_max - self.total)

    @property
    def beside_share(self) -> np.ndarray:
        """Share of the keys one column to either side of the target (they are part of ``near`` or ``far`` too)."""
        return np.exp(self.beside - self.total)


@dataclass(frozen=True)
class DistanceLedger:
    """What keys score at each distance in the scheme's unit: targets, separators and the query itself aside.

    ``count``: ``[lookup, layer, head, distance]``, how many query-key pairs stand at a distance, for queries with
    something to find. ``gap``: the same shape, their mean gap to the target; NaN where there is none. ``maximum``:
    ``[layer, head, distance]``, the highest score of such a key; -inf where there is none.
    """

    trained_distance: int
    count: np.ndarray
    gap: np.ndarray
    maximum: np.ndarray

    def slopes(self) -> dict[str, np.ndarray]:
        """Per lookup ``[layer, head]``: slope of the mean gap against ln(distance) beyond the trained distance.

        The leak of a crowd stays bounded if this exceeds 1. NaN where no key is that far.
        """
        distance = np.arange(self.gap.shape[-1])
        far = distance > self.trained_distance
        found = {}
        for i, name in enumerate(LOOKUPS):
            layers, heads = self.gap.shape[1:3]
            found[name] = np.full((layers, heads), np.nan)
            for layer, head in np.ndindex(layers, heads):
                gap, count = self.gap[i, layer, head][far], self.count[i, layer, head][far]
                found[name][layer, head] = log_slope(distance[far], gap, count)
        return found


@dataclass(frozen=True)
class Ledger:
    """All lookups of all problems in all heads.

    ``lookups``: by ``(name, present)``, those that occur. ``distances``: scores at each distance, if asked for.
    """

    lookups: dict[tuple[str, bool], LookupLedger]
    distances: DistanceLedger | None = None

    def to_frame(self) -> pd.DataFrame:
        """One row a (lookup, present, layer, head, query): column, state, share, leak, gap, n_eff, class shares."""
        import pandas as pd

        frames = []
        for (name, present), found in self.lookups.items():
            layers, heads, queries = found.target.shape
            layer, head, _ = np.indices((layers, heads, queries))
            per_query = (found.problem, found.query, found.column, found.keys)
            problem, query, column, keys = (np.broadcast_to(x, layer.shape).ravel() for x in per_query)
            shares = found.class_shares
            frames.append(
                pd.DataFrame(
                    {
                        "lookup": name,
                        "present": present,
                        "layer": layer.ravel(),
                        "head": head.ravel(),
                        "problem": problem,
                        "query": query,
                        "column": column,
                        "state": np.broadcast_to(np.array([*STATES, ""])[found.state], layer.shape).ravel(),
                        "keys": keys,
                        "share": found.share.ravel(),
                        "leak": found.leak.ravel(),
                        "gap": found.gap.ravel(),
                        "n_eff": found.n_eff.ravel(),
                        "sink": found.sink_share.ravel(),
                        **{name: shares[..., i].ravel() for i, name in enumerate(CLASSES)},
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)


def build_ledger(
    model: HookedAdder,
    problems: Sequence[Problem],
    interventions: Sequence[Edit] = (),
    *,
    source: Source | None = None,
    distances: bool = False,
    progress: Progress = lambda done: None,
) -> Ledger:
    """Run the problems once and keep the ledger of every query that performs a lookup.

    Args:
        interventions: applied first, so the ledger sees the edited scores.
        source: ``"scores"``, or ``"pattern"`` where weights are not exponentials of scores; by default what the model's
            normalizer and the interventions ask for.
        distances: keep what keys score at each distance too, which needs every key by itself: time grows with the
            square of the length.
    """
    open_books: list[_Book] = []
    if source is None:
        sparse = model.config.attention.normalizer != "softmax" or any(e.rewrites_weights for e in interventions)
        source = "pattern" if sparse else "scores"

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        open_books.append(_Book(model, batch, source, distances))
        return open_books[-1].hooks()

    columns = len(LOOKUPS) * sum(max(n.bit_length() for n in problem) * 3 // 10 + 2 for problem in problems)
    kept = columns * model.cfg.n_layers * model.cfg.n_heads * _KEPT_BYTES
    require(kept, f"the ledger of {len(problems)} problems", "take fewer problems or fewer digits")
    found: dict[tuple[str, bool], list[dict[str, np.ndarray]]] = {}
    at_distance = []
    every_key = distances or source == "pattern"
    for step in run_problems(model, problems, interventions, watch, every_key=every_key, progress=progress):
        entry = open_books.pop().close(np.array(step.indices))
        for i, name in enumerate(LOOKUPS):
            for present in (True, False):
                if (entry.performs[:, i] & (entry.present[:, i] == present)).any():
                    found.setdefault((name, present), []).append(_part(entry, i, present))
        if entry.distances is not None:
            at_distance.append(entry.distances)
    keys = [(name, present) for name in LOOKUPS for present in (True, False) if (name, present) in found]
    lookups = {key: _lookup(*key, found.pop(key)) for key in keys}
    return Ledger(lookups, _at_distance(at_distance, model.config.trained_distance) if distances else None)


@dataclass(frozen=True)
class _Entry:
    """The ledger of one batch: ``[layer, head, query, ...]``, or ``[query, ...]`` where heads do not matter."""

    mass: np.ndarray  # [..., class]: targets of any lookup aside
    second: np.ndarray  # [..., class]
    maximum: np.ndarray  # [..., class]
    slots: np.ndarray  # [..., slot]: score of each target of any lookup, -inf where there is none
    beside: np.ndarray  # [..., lookup]
    sink: np.ndarray  # [layer, head, query]
    slot_class: np.ndarray  # [query, slot]
    member: np.ndarray  # [query, slot, lookup]: is the slot's key a target of the lookup
    performs: np.ndarray  # [query, lookup]
    present: np.ndarray  # [query, lookup]
    about: dict[str, np.ndarray]  # [query]
    distances: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # count, sum of gaps, highest score


class _Book:
    """Collects one batch through hooks, block by block."""

    def __init__(self, model: HookedAdder, batch: Batch, source: Source, distances: bool):
        self.model, self.batch, self.source = model, batch, source
        self.partition = Partition(model, batch)
        self.lookups = [batch.lookups[name] for name in LOOKUPS]
        sets = [x.targets for x in self.lookups]
        slots = torch.cat(sets, dim=-1)
        same = (slots[..., :, None] == slots[..., None, :]) & (slots >= 0)[..., None]
        self.slots: Int[Tensor, "batch pos slot"] = torch.where(torch.tril(same, diagonal=-1).any(-1), -1, slots)
        self.member: Bool[Tensor, "batch pos slot lookup"] = torch.stack(
            [(self.slots[..., None] == s[..., None, :]).any(-1) & (self.slots >= 0) for s in sets], dim=-1
        )
        self.performs: Bool[Tensor, "batch pos lookup"] = torch.stack([x.queries for x in self.lookups], dim=-1)
        self.present: Bool[Tensor, "batch pos lookup"] = torch.stack([x.present for x in self.lookups], dim=-1)
        layers = range(model.cfg.n_layers)
        self.kept: list[list[tuple[Tensor, ...]]] = [[] for _ in layers]
        self.sinks: list[list[Tensor]] = [[] for _ in layers]
        self.where: list[tuple[Tensor, ...]] = []
        self.distances = _Distances(self) if distances else None
        self._rows: dict[int, _Rows] = {}  # by block; small, and mostly the same in every layer

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        point = "hook_attn_scores" if self.source == "scores" else "hook_pattern"
        hooks: list[tuple[str, Callable[..., Any]]] = []
        for layer in range(self.model.cfg.n_layers):
            hooks.append((f"blocks.{layer}.attn.{point}", self._keep))
            if self.model.config.attention.sink and self.source == "scores":
                hooks.append((f"blocks.{layer}.attn.hook_sink_scores", self._keep_sink))
        return hooks

    def _rows_of(self, span: Span) -> _Rows:
        rows = self._rows.get(span.query.start)
        if rows is None or not rows.same(span):
            rows = self._rows[span.query.start] = _Rows(self, span)
        return rows

    def _keep_sink(self, sink: Tensor, hook: HookPoint) -> None:
        rows = self._rows_of(Span.of(hook))
        self.sinks[hook.layer()].append(sink.detach()[rows.batch, :, rows.within])

    def _keep(self, values: Tensor, hook: HookPoint) -> None:
        rows, layer = self._rows_of(Span.of(hook)), hook.layer()
        scores = values.detach()
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        if self.source == "pattern":
            weights = scores[rows.batch, :, rows.within]
            self.sinks[layer].append((1 - weights.sum(-1)).clamp(min=0).log())
            scores = scores.log()
        if not len(rows.query):  # no query of this block looks anything up
            return
        if layer == 0:
            self.where.append((rows.batch, rows.query, rows.slot_class, rows.far_keys))
        self.kept[layer].append(rows.summarise(scores))
        if self.distances is not None:
            self.distances.add(scores, rows, layer)

    def close(self, indices: np.ndarray) -> _Entry:
        parts = [[torch.cat(part) for part in zip(*blocks, strict=True)] for blocks in self.kept]
        mass, second, maximum, slots, beside = (
            torch.stack(part).transpose(1, 2).double().numpy() for part in zip(*parts, strict=True)
        )
        if self.sinks[0]:
            sink = torch.stack([torch.cat(blocks) for blocks in self.sinks]).transpose(1, 2).double().numpy()
        else:
            sink = np.full(mass.shape[:3], -np.inf)
        at, query, slot_class, far_keys = (torch.cat(part) for part in zip(*self.where, strict=True))
        here, batch = (at, query), self.batch
        column = torch.where(batch.decisions, batch.decision_column, batch.column)
        return _Entry(
            mass=mass,
            second=second,
            maximum=maximum,
            slots=slots,
            beside=beside,
            sink=sink,
            slot_class=slot_class.numpy(),
            member=self.member[here].numpy(),
            performs=self.performs[here].numpy(),
            present=self.present[here].numpy(),
            about={
                "problem": indices[at.numpy()],
                "query": query.numpy(),
                "column": column[here].numpy(),
                "state": batch.state[here].numpy(),
                "keys": batch.mask.cumsum(1)[here].numpy(),
                "far_keys": far_keys.numpy(),
            },
            distances=None if self.distances is None else self.distances.totals(),
        )


class _Rows:
    """The queries of one block that perform a lookup, and the classes of their keys.

    Most keys of a long sequence are far from every query of the block (``others``), and what class a key is need only
    be worked out for those that may not be (``close``): keys within the trained distance of some query, targets,
    separators, those of the block itself, and padding. Both are slices of the span's keys, the pool aside.
    """

    def __init__(self, book: _Book, span: Span):
        self.book, self.span = book, span
        partition, queries, batch = book.partition, span.query, book.batch
        self.batch, self.within = torch.nonzero(book.performs[:, queries].any(-1), as_tuple=True)
        self.query = self.within + queries.start
        if not len(self.query):
            return
        self.pooled = int(span.pooled)
        positions = span.positions[self.pooled :]
        reach = partition.trained_distance
        close = within(reach, queries, partition.scheme.axis(partition.at), batch.mask)
        close = (close | partition.at.separator | ~batch.mask)[:, positions]
        close = close.any(0) | (positions >= queries.start)
        slots = book.slots[:, queries]
        self.slots = key_index(span, slots)
        close[self.slots[self.slots >= 0] - self.pooled] = True
        self.close, self.others = (_runs(torch.nonzero(which)[:, 0]) for which in (close, ~close))
        near_by = Span(queries, positions[close])
        itself = torch.arange(queries.start, queries.stop).expand(len(slots), -1)[..., None]
        separators = self._separators()
        known = torch.cat([slots, itself, separators], dim=-1)
        alone = torch.zeros(*known.shape[:2], len(near_by.positions) + 1, dtype=torch.bool)
        at = key_index(near_by, known)
        alone.scatter_(2, torch.where(at < 0, len(near_by.positions), at), True)
        apart = partition.visible(near_by) & ~alone[..., :-1]
        far = partition.distance(near_by) > reach
        self.near, self.far = (apart & ~far)[:, None], (apart & far)[:, None]

        # keys that are not close are far, and so are those that are not here: pooled, or left out
        not_far = partition.visible(near_by) & ~partition.far(near_by)
        self.far_keys = (batch.mask.cumsum(1)[:, queries] - not_far.sum(-1))[self.batch, self.within]

        self.itself = key_index(span, torch.where(_among(itself, slots), -1, itself))
        seen = (separators < itself) & ~_among(separators, slots)
        self.separators = key_index(span, torch.where(seen, separators, -1))
        self.beside = torch.cat([key_index(span, x) for x in self._beside()], dim=-1)
        self.slot_class = self._slot_class(slots, itself)[self.batch, self.within]

    def same(self, span: Span) -> bool:
        """Whether this is about the same queries and keys."""
        if self.span.query != span.query:
            return False
        if isinstance(span.key, slice) or isinstance(self.span.key, slice):
            return isinstance(span.key, slice) and isinstance(self.span.key, slice)
        return span.key is self.span.key or torch.equal(span.key, self.span.key)

    def _separators(self) -> Int[Tensor, "batch query separator"]:
        """Positions of the separators, the same for every query."""
        at = self.book.partition.at.separator
        most = int(at.sum(1).max())
        first = torch.where(at, torch.arange(at.shape[1]), at.shape[1]).sort(1).values[:, :most]
        places = torch.where(first < at.shape[1], first, -1)
        return places[:, None].expand(-1, self.span.query.stop - self.span.query.start, -1)

    def _slot_class(self, slots: Tensor, itself: Tensor) -> Int[Tensor, "batch query slot"]:
        """The class each target would be in, were it not a target."""
        partition, queries = self.book.partition, self.span.query
        index = slots.clamp(min=0).flatten(1)
        axis = partition.scheme.axis(partition.at)
        distance = (axis.gather(1, index).view_as(slots) - axis[:, queries, None]).abs()
        label = torch.where(distance > partition.trained_distance, CLASSES.index("far"), CLASSES.index("near"))
        separator = partition.at.separator.gather(1, index).view_as(slots)
        label = torch.where(separator, CLASSES.index("separator"), label)
        return torch.where(slots == itself, CLASSES.index("self"), label)

    def _beside(self) -> list[Int[Tensor, "batch query two"]]:
        """The keys one column to either side of each lookup's first target, -1 where that is another number's."""
        batch, queries = self.book.batch, self.span.query
        row, column = batch.row, batch.column
        sides = []
        for lookup in self.book.lookups:
            target = lookup.targets[:, queries, :1]
            key = target + torch.tensor([-1, 1])
            at = key.clamp(0, row.shape[1] - 1).flatten(1)
            own = row.gather(1, target.clamp(min=0).flatten(1)).view_as(target)
            same = row.gather(1, at).view_as(key) == own
            causal = key <= torch.arange(queries.start, queries.stop)[:, None]
            valid = (target >= 0) & (key >= 0) & causal & same & (column.gather(1, at).view_as(key) >= 0)
            sides.append(torch.where(valid, key, -1))
        return sides

    def summarise(self, scores: Float[Tensor, "batch head query key"]) -> tuple[Tensor, ...]:
        """Per class: log-mass, log second moment, maximum ``[row, head, class]``; slot scores; mass beside targets."""
        keys = scores[..., self.pooled :]
        close = joined([keys[..., run] for run in self.close], dim=-1)
        near = _moments(close, self.near)
        far = self._far(scores, keys, close)
        itself, separator = (_moments(_gathered(scores, keys)) for keys in (self.itself, self.separators))
        moments = [torch.stack(parts, dim=-1) for parts in zip(itself, separator, near, far, strict=True)]
        mass, second, maximum = (self._rows(x) for x in moments)
        beside = _gathered(scores, self.beside).unflatten(-1, (len(LOOKUPS), 2)).logsumexp(-1)
        return mass, second, maximum, self._rows(_gathered(scores, self.slots)), self._rows(beside)

    def _far(self, scores: Tensor, keys: Tensor, close: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        far = close.masked_fill(~self.far, -torch.inf)
        mass, second, maximum = _moments(joined([far, *(keys[..., run] for run in self.others)], dim=-1))
        if self.pooled:  # n keys of score 0: their mass is n, and so is their second moment
            pool = scores[..., 0]
            mass, second = torch.logaddexp(mass, pool), torch.logaddexp(second, pool)
            maximum = torch.maximum(maximum, torch.where(torch.isneginf(pool), pool, 0.0))
        return mass, second, maximum

    def _rows(self, x: Float[Tensor, "batch head query *rest"]) -> Float[Tensor, "row head *rest"]:
        return x[self.batch, :, self.within]


def _runs(index: Int[Tensor, "key"]) -> list[slice]:
    """Ascending indices as the fewest slices: slices copy much faster."""
    if not len(index):
        return []
    ends = torch.nonzero(index[1:] != index[:-1] + 1)[:, 0]
    first = [int(index[0]), *index[ends + 1].tolist()]
    last = [*index[ends].tolist(), int(index[-1])]
    return [slice(a, b + 1) for a, b in zip(first, last, strict=True)]


def _among(keys: Int[Tensor, "*shape key"], slots: Int[Tensor, "*shape slot"]) -> Bool[Tensor, "*shape key"]:
    return (keys[..., None] == slots[..., None, :]).any(-1)


def _moments(scores: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-mass, log second moment and maximum over the last axis, all measured from the maximum of these keys alone."""
    hidden = scores if among is None else scores.masked_fill(~among, -torch.inf)
    if not hidden.shape[-1]:
        empty = torch.full(hidden.shape[:-1], -torch.inf, dtype=hidden.dtype)
        return empty, empty, empty
    maximum = hidden.amax(-1)
    floor = torch.where(torch.isneginf(maximum), 0.0, maximum)
    weights = (hidden - floor[..., None]).exp_()
    mass = weights.sum(-1).log() + floor
    return mass, weights.square_().sum(-1).log() + 2 * floor, maximum


class _Distances:
    """What stands at each distance, of one batch: targets, separators and the query itself aside."""

    def __init__(self, book: _Book):
        self.book = book
        model, partition = book.model, book.partition
        self.reach = int(partition.scheme.axis(partition.at).max())  # the largest distance there can be
        shape = (len(LOOKUPS), model.cfg.n_layers, model.cfg.n_heads, self.reach + 1)
        self.count, self.gap_sum = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self.top = torch.full(shape[1:], -torch.inf, dtype=torch.float64)

    def add(self, values: Float[Tensor, "batch head query key"], rows: _Rows, layer: int) -> None:
        book, partition, span = self.book, self.book.partition, rows.span
        own = span.positions == torch.arange(span.query.start, span.query.stop)[:, None]
        use = partition.visible(span) & ~partition.separator(span) & ~own & ~partition.targets(span)
        distance = torch.where(use, partition.distance(span), self.reach + 1)[rows.batch, rows.within]
        scores = values[rows.batch, :, rows.within]  # [row, head, key]
        bins = distance[:, None, :].expand(scores.shape)
        finite = torch.isfinite(scores)
        empty = torch.zeros(*scores.shape[:2], self.reach + 2, dtype=scores.dtype)
        number = empty.scatter_add(2, bins, finite.to(scores.dtype))[..., :-1]
        total = empty.scatter_add(2, bins, torch.where(finite, scores, 0.0))[..., :-1]
        slots = _gathered(values, rows.slots)[rows.batch, :, rows.within]
        member = book.member[rows.batch, rows.query]
        for i in range(len(LOOKUPS)):
            target = slots.masked_fill(~member[:, None, :, i], -torch.inf).logsumexp(-1)  # [row, head]
            has = book.present[rows.batch, rows.query, i, None] & torch.isfinite(target)
            target = torch.where(has, target, 0.0)
            here = has.to(scores.dtype)[..., None]
            self.count[i, layer] += (here * number).sum(0)
            self.gap_sum[i, layer] += (target[..., None] * number - here * total).sum(0)
        top = (empty - torch.inf).scatter_reduce(2, bins, scores, "amax")[..., :-1]
        self.top[layer] = torch.maximum(self.top[layer], top.amax(0))

    def totals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.count.numpy(), self.gap_sum.numpy(), self.top.numpy()


def _gathered(
    scores: Float[Tensor, "batch head query key"], keys: Int[Tensor, "batch query slot"]
) -> Float[Tensor, "batch head query slot"]:
    """The scores at these keys, -inf where the key is -1."""
    index = keys[:, None].expand(-1, scores.shape[1], -1, -1)
    return scores.gather(3, index.clamp(min=0)).masked_fill(index < 0, -torch.inf)


def _at_distance(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], trained_distance: int) -> DistanceLedger:
    counts, totals, tops = zip(*parts, strict=True)
    count, total = (_over_distances(list(x), np.add, 0) for x in (counts, totals))
    with np.errstate(invalid="ignore"):
        gap = total / count
    return DistanceLedger(trained_distance, count, gap, _over_distances(list(tops), np.maximum, -np.inf))


def _over_distances(parts: list[np.ndarray], combine: np.ufunc, empty: float) -> np.ndarray:
    """Combine arrays whose last axis, distance, differs in length."""
    out = np.full((*parts[0].shape[:-1], max(part.shape[-1] for part in parts)), empty, dtype=float)
    for part in parts:
        reach = out[..., : part.shape[-1]]
        combine(reach, part, out=reach)
    return out


_PER_HEAD = {"target", "rest", "rest_second", "rest_max", "classes", "far_max", "sink", "beside"}


def _part(entry: _Entry, i: int, present: bool) -> dict[str, np.ndarray]:
    """Sort what every query kept by one lookup: its targets into ``target``, all other keys into the rest."""
    rows = entry.performs[:, i] & (entry.present[:, i] == present)
    slots, member = entry.slots[:, :, rows], entry.member[rows, :, i]
    own = np.where(member, slots, -np.inf)
    other = np.where(member, -np.inf, slots)
    label = entry.slot_class[rows]
    by_class = np.where((label[..., None] == np.arange(len(CLASSES))), other[..., None], -np.inf)
    classes = np.logaddexp(entry.mass[:, :, rows], _logsumexp(by_class, -2))
    sink, far = entry.sink[:, :, rows], CLASSES.index("far")
    return {
        "target": _logsumexp(own, -1) if present else sink,
        "rest": _logsumexp(classes, -1),
        "rest_second": np.logaddexp(_logsumexp(entry.second[:, :, rows], -1), _logsumexp(2 * other, -1)),
        "rest_max": np.maximum(entry.maximum[:, :, rows].max(-1), other.max(-1)),
        "classes": classes,
        "far_max": np.maximum(entry.maximum[:, :, rows, far], by_class[..., far].max(-1)),
        "sink": sink,
        "beside": entry.beside[:, :, rows, i],
        **{key: value[rows] for key, value in entry.about.items()},
    }


def _lookup(name: str, present: bool, parts: list[dict[str, np.ndarray]]) -> LookupLedger:
    """One lookup over all batches, in the order of the problems."""
    joined = {k: np.concatenate([p[k] for p in parts], axis=2 if k in _PER_HEAD else 0) for k in parts[0]}
    order = np.lexsort((joined["query"], joined["problem"]))
    sorted_ = {k: v[:, :, order] if k in _PER_HEAD else v[order] for k, v in joined.items()}
    return LookupLedger(name=name, present=present, **sorted_)


def _logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - top).sum(axis=axis)) + np.squeeze(top, axis=axis)
