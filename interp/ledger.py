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
from interp.partition import Partition
from interp.passes import Progress, run_problems
from models.addition import LOOKUPS, STATES, Batch, Problem
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

CLASSES = ("self", "separator", "near", "far")
Source = Literal["scores", "pattern"]


@dataclass(frozen=True)
class LookupLedger:
    """One lookup, present or with nothing to find, in every head. Arrays are ``[layer, head, query]``.

    ``target``: log-mass of the target set (of the sink where there is nothing to find). ``rest``: log-mass of all other
    keys, the sink aside; ``rest_second`` and ``rest_max``: their second moment and maximum. ``classes``: log-mass per
    class, ``[layer, head, query, class]``, the target aside. ``sink``: the sink's score. ``beside``: log-mass of the
    keys one column to either side of the target. ``column``, ``state``, ``problem``, ``keys``: per query ``[query]``.
    """

    name: str
    present: bool
    target: np.ndarray
    rest: np.ndarray
    rest_second: np.ndarray
    rest_max: np.ndarray
    classes: np.ndarray
    sink: np.ndarray
    beside: np.ndarray
    column: np.ndarray
    state: np.ndarray
    problem: np.ndarray
    query: np.ndarray
    keys: np.ndarray

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
    def beside_share(self) -> np.ndarray:
        """Share of the keys one column to either side of the target (they are part of ``near`` or ``far`` too)."""
        return np.exp(self.beside - self.total)


@dataclass(frozen=True)
class Ledger:
    """All lookups of all problems in all heads, and what keys score at each distance.

    ``lookups``: by ``(name, present)``, those that occur. ``distance_count``: ``[lookup, layer, head, distance]``, how
    many query-key pairs stand at a distance in the scheme's unit (targets, separators and self aside), for queries with
    something to find. ``distance_gap``: the same shape, their mean gap to the target; NaN where there is none.
    ``distance_max``: ``[layer, head, distance]``, the highest score of such a key; -inf where there is none.
    """

    lookups: dict[tuple[str, bool], LookupLedger]
    unit: str
    trained_distance: int
    distance_count: np.ndarray
    distance_gap: np.ndarray
    distance_max: np.ndarray

    def slopes(self) -> dict[str, np.ndarray]:
        """Per lookup ``[layer, head]``: slope of the mean gap against ln(distance) beyond the trained distance.

        The leak of a crowd stays bounded if this exceeds 1. NaN where no key is that far.
        """
        distance = np.arange(self.distance_gap.shape[-1])
        far = distance > self.trained_distance
        found = {}
        for i, name in enumerate(LOOKUPS):
            layers, heads = self.distance_gap.shape[1:3]
            found[name] = np.full((layers, heads), np.nan)
            for layer, head in np.ndindex(layers, heads):
                gap, count = self.distance_gap[i, layer, head][far], self.distance_count[i, layer, head][far]
                found[name][layer, head] = log_slope(distance[far], gap, count)
        return found

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
    source: Source = "scores",
    progress: Progress = lambda done: None,
) -> Ledger:
    """Run the problems once and keep the ledger of every query that performs a lookup.

    Args:
        interventions: applied first, so the ledger sees the edited scores.
        source: ``"scores"``, or ``"pattern"`` for normalizers whose weights are not exponentials of scores.
    """
    open_books: list[_Book] = []

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        open_books.append(_Book(model, batch, source))
        return open_books[-1].hooks()

    entries: list[_Entry] = []
    for step in run_problems(model, problems, interventions, extra_hooks=watch, progress=progress):
        entries.append(open_books.pop().close(np.array(step.indices)))
    count, total = (_over_distances(x, np.add, 0) for x in ([e.count for e in entries], [e.gap_sum for e in entries]))
    top = _over_distances([e.top for e in entries], np.maximum, -np.inf)
    with np.errstate(invalid="ignore"):
        gap = total / count
    found = {}
    for i, name in enumerate(LOOKUPS):
        for present in (True, False):
            view = _lookup(entries, i, name, present)
            if len(view.column):
                found[name, present] = view
    return Ledger(found, model.config.attention.unit, model.config.trained_distance, count, gap, top)


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
    count: np.ndarray  # [lookup, layer, head, distance]
    gap_sum: np.ndarray  # [lookup, layer, head, distance]
    top: np.ndarray  # [layer, head, distance]


class _Book:
    """Collects one batch through hooks, block by block."""

    def __init__(self, model: HookedAdder, batch: Batch, source: Source):
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
        at = self.partition.at  # the largest distance there can be, in the scheme's unit
        self.reach = int((at.column if model.config.attention.unit == "columns" else at.position).max())
        layers = range(model.cfg.n_layers)
        self.kept: list[list[tuple[Tensor, ...]]] = [[] for _ in layers]
        self.sinks: list[list[Tensor]] = [[] for _ in layers]
        self.where: list[tuple[Tensor, Tensor, Tensor]] = []
        shape = (len(LOOKUPS), model.cfg.n_layers, model.cfg.n_heads, self.reach + 1)
        self.count, self.gap_sum = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self.top = torch.full(shape[1:], -torch.inf, dtype=torch.float64)
        self._rows: _Rows | None = None

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        point = "hook_attn_scores" if self.source == "scores" else "hook_pattern"
        hooks: list[tuple[str, Callable[..., Any]]] = []
        for layer in range(self.model.cfg.n_layers):
            hooks.append((f"blocks.{layer}.attn.{point}", self._keep))
            if self.model.config.attention.sink and self.source == "scores":
                hooks.append((f"blocks.{layer}.attn.hook_sink_scores", self._keep_sink))
        return hooks

    def _rows_of(self, queries: slice) -> _Rows:
        if self._rows is None or self._rows.queries != queries:  # one block at a time is held
            self._rows = _Rows(self, queries)
        return self._rows

    def _keep_sink(self, sink: Tensor, hook: HookPoint) -> None:
        rows = self._rows_of(hook.ctx["query"])
        self.sinks[hook.layer()].append(sink.detach()[rows.batch, :, rows.query - rows.queries.start])

    def _keep(self, values: Tensor, hook: HookPoint) -> None:
        rows, layer = self._rows_of(hook.ctx["query"]), hook.layer()
        scores = values.detach()[rows.batch, :, rows.query - rows.queries.start]  # [row, head, key]
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        if self.source == "pattern":
            self.sinks[layer].append((1 - scores.sum(-1)).clamp(min=0).log())
            scores = scores.log()
        if not len(rows.query):  # no query of this block looks anything up
            return
        if layer == 0:
            self.where.append((rows.batch, rows.query, rows.slot_class))
        self.kept[layer].append(rows.summarise(scores))
        rows.add_distances(scores, layer)

    def close(self, indices: np.ndarray) -> _Entry:
        parts = [[torch.cat(part) for part in zip(*blocks, strict=True)] for blocks in self.kept]
        mass, second, maximum, slots, beside = (
            torch.stack(part).transpose(1, 2).double().numpy() for part in zip(*parts, strict=True)
        )
        if self.sinks[0]:
            sink = torch.stack([torch.cat(blocks) for blocks in self.sinks]).transpose(1, 2).double().numpy()
        else:
            sink = np.full(mass.shape[:3], -np.inf)
        at, query, slot_class = (torch.cat(part) for part in zip(*self.where, strict=True))
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
            },
            count=self.count.numpy(),
            gap_sum=self.gap_sum.numpy(),
            top=self.top.numpy(),
        )


class _Rows:
    """The queries of one block that perform a lookup, flattened over the batch, and the classes of their keys."""

    def __init__(self, book: _Book, queries: slice):
        self.queries, self.book = queries, book
        partition = book.partition
        self.batch, within = torch.nonzero(book.performs[:, queries].any(-1), as_tuple=True)
        self.query = within + queries.start
        distance = partition.distance(queries)[self.batch, within]
        label = torch.where(distance > partition.trained_distance, CLASSES.index("far"), CLASSES.index("near"))
        separator = partition.separator[self.batch, : queries.stop]
        label = torch.where(separator, CLASSES.index("separator"), label)
        label = torch.where(torch.arange(queries.stop) == self.query[:, None], CLASSES.index("self"), label)
        self.slots = book.slots[self.batch, self.query]
        self.slot_class = label.gather(1, self.slots.clamp(min=0))
        target = torch.zeros(len(self.query), queries.stop + 1, dtype=torch.bool)
        target.scatter_(1, torch.where(self.slots < 0, queries.stop, self.slots), True)
        counted = partition.visible(queries)[self.batch, within] & ~target[:, :-1]
        self.label = torch.where(counted, label, len(CLASSES))
        self.bin = torch.where(counted & (label >= CLASSES.index("near")), distance, book.reach + 1)
        self.beside = self._beside()

    def _beside(self) -> Int[Tensor, "row lookup two"]:
        """The keys one column to either side of each lookup's first target, -1 where that is another number's."""
        batch = self.book.batch
        row, column = batch.row[self.batch], batch.column[self.batch]
        sides = []
        for lookup in self.book.lookups:
            target = lookup.targets[self.batch, self.query, :1]
            key = target + torch.tensor([-1, 1])
            at = key.clamp(0, row.shape[1] - 1)
            same = row.gather(1, at) == row.gather(1, target.clamp(min=0))
            valid = (target >= 0) & (key >= 0) & (key <= self.query[:, None]) & same & (column.gather(1, at) >= 0)
            sides.append(torch.where(valid, key, -1))
        return torch.stack(sides, dim=1)

    def summarise(self, scores: Float[Tensor, "row head key"]) -> tuple[Tensor, ...]:
        """Per class: log-mass, log second moment, maximum ``[row, head, class]``; slot scores; mass beside targets."""
        label = self.label[:, None, :]
        hidden = torch.full((), -torch.inf, dtype=scores.dtype)
        maximum = torch.stack([torch.where(label == c, scores, hidden).amax(-1) for c in range(len(CLASSES))], dim=-1)
        # each key is measured from the maximum of its own class: no class underflows beside another
        floor = torch.where(torch.isfinite(maximum), maximum, torch.zeros((), dtype=scores.dtype))
        padded = torch.cat([floor, torch.zeros_like(floor[..., :1])], dim=-1)
        exponent = scores - padded.gather(2, label.expand(scores.shape))
        weights = torch.where(label == len(CLASSES), hidden, exponent).exp()
        onehot = torch.nn.functional.one_hot(self.label, len(CLASSES) + 1)[..., :-1].to(scores.dtype)
        mass = (weights @ onehot).log() + floor
        second = ((weights * weights) @ onehot).log() + 2 * floor
        beside = [_gathered(scores, self.beside[:, i]).logsumexp(-1) for i in range(len(LOOKUPS))]
        return mass, second, maximum, _gathered(scores, self.slots), torch.stack(beside, dim=-1)

    def add_distances(self, scores: Float[Tensor, "row head key"], layer: int) -> None:
        """Add what stands at each distance to the book."""
        book = self.book
        rows, heads, _ = scores.shape
        bins = self.bin[:, None, :].expand(scores.shape)
        finite = torch.isfinite(scores)
        empty = torch.zeros(rows, heads, book.reach + 2, dtype=scores.dtype)
        number = empty.scatter_add(2, bins, finite.to(scores.dtype))[..., :-1]
        total = empty.scatter_add(2, bins, torch.where(finite, scores, 0.0))[..., :-1]
        slots, member = _gathered(scores, self.slots), book.member[self.batch, self.query]
        for i in range(len(LOOKUPS)):
            target = slots.masked_fill(~member[:, None, :, i], -torch.inf).logsumexp(-1)  # [row, head]
            use = book.present[self.batch, self.query, i, None] & torch.isfinite(target)
            target = torch.where(use, target, 0.0)
            here = use.to(scores.dtype)[..., None]
            book.count[i, layer] += (here * number).sum(0)
            book.gap_sum[i, layer] += (target[..., None] * number - here * total).sum(0)
        top = (empty - torch.inf).scatter_reduce(2, bins, scores, "amax")[..., :-1]
        book.top[layer] = torch.maximum(book.top[layer], top.amax(0))


def _gathered(scores: Tensor, keys: Int[Tensor, "row slot"]) -> Float[Tensor, "row head slot"]:
    """The scores at these keys, -inf where the key is -1."""
    index = keys[:, None, :].expand(-1, scores.shape[1], -1)
    return scores.gather(2, index.clamp(min=0)).masked_fill(index < 0, -torch.inf)


def _over_distances(parts: list[np.ndarray], combine: np.ufunc, empty: float) -> np.ndarray:
    """Combine arrays whose last axis, distance, differs in length."""
    out = np.full((*parts[0].shape[:-1], max(part.shape[-1] for part in parts)), empty, dtype=float)
    for part in parts:
        reach = out[..., : part.shape[-1]]
        combine(reach, part, out=reach)
    return out


def _lookup(entries: list[_Entry], i: int, name: str, present: bool) -> LookupLedger:
    """Sort what every query kept by one lookup: its targets into ``target``, all other keys into the rest."""
    parts: list[dict[str, np.ndarray]] = []
    for entry in entries:
        rows = entry.performs[:, i] & (entry.present[:, i] == present)
        slots, member = entry.slots[:, :, rows], entry.member[rows, :, i]
        own = np.where(member, slots, -np.inf)
        other = np.where(member, -np.inf, slots)
        label = entry.slot_class[rows]
        by_class = np.where((label[..., None] == np.arange(len(CLASSES))), other[..., None], -np.inf)
        classes = np.logaddexp(entry.mass[:, :, rows], _logsumexp(by_class, -2))
        sink = entry.sink[:, :, rows]
        second = np.logaddexp(_logsumexp(entry.second[:, :, rows], -1), _logsumexp(2 * other, -1))
        parts.append(
            {
                "target": _logsumexp(own, -1) if present else sink,
                "rest": _logsumexp(classes, -1),
                "rest_second": second,
                "rest_max": np.maximum(entry.maximum[:, :, rows].max(-1), other.max(-1)),
                "classes": classes,
                "sink": sink,
                "beside": entry.beside[:, :, rows, i],
                **{key: value[rows] for key, value in entry.about.items()},
            }
        )
    per_head = {"target", "rest", "rest_second", "rest_max", "classes", "sink", "beside"}
    joined = {k: np.concatenate([p[k] for p in parts], axis=2 if k in per_head else 0) for k in parts[0]}
    order = np.lexsort((joined["query"], joined["problem"]))
    sorted_ = {k: v[:, :, order] if k in per_head else v[order] for k, v in joined.items()}
    return LookupLedger(name=name, present=present, **sorted_)


def _logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - top).sum(axis=axis)) + np.squeeze(top, axis=axis)
