"""Edits of a forward pass that test an explanation: named, composable sets of hooks on a saved checkpoint.

=================  ==================================================================================================
name               what it does, in the heads in scope
=================  ==================================================================================================
far                removes every far key (:mod:`interp.partition`): its score becomes -inf, the rest renormalises
window=W           removes every key further than W, in the scheme's unit, separators included
first-and-window   =K,W removes every key but the first K tokens and the last W, the query's own among them, as
                   streaming attention does (Xiao et al. 2309.17453): tokens whatever the scheme's unit
keep-near          removes far keys as ``far`` does, and separators too
sink-boost=X       adds X to the sink's score; ``log``: log(n / n_train), ``2log``: twice that, n being the keys that
                   the query can see and n_train the most that a query saw in training; never below 0
far-zero           zeroes the weights of far keys after the softmax, without renormalising: what the crowd wrote is
                   gone, the share it took is not given back
drop-best-far=K    removes the K far keys with the highest scores, per head and query (1 if no K is given)
normalizer=NAME    weights as ``sparsemax`` or ``entmax15`` would give them, sink included
ssmax=S            Scalable-Softmax: multiplies scores and sink by S ln n, n being the keys that the query can see
temperature=X      divides scores and sink by X; ``yarn``: multiplies scores, the sink's aside, by YaRN's factor at the
                   keys seen over the most seen in training; ``adaptive``: scales the logarithms of all weights by
                   adaptive temperature's polynomial of their entropy (:mod:`models.normalizers`)
mass-control       removes random keys per query and head until they had as much attention as the far keys had,
                   targets of any lookup spared
round-gates=WHICH  rounds gates of counters to 0 or 1: ``column``, those of the column counters
                   (:mod:`interp.counters`); ``all``, those of every counter, and its resets
jitter-gates=WHICH moves the same gates by as much, each up or down at random: the control for rounding
random-control     removes as many random keys per query as ``far`` would, targets of any lookup spared; with ``=K``,
                   at most K
=================  ==================================================================================================
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.partition import Partition
from models.addition import LOOKUPS, Batch, generator
from models.attention import Span
from models.config import InputError
from models.normalizers import (
    NORMALIZERS,
    adaptive_temperature,
    entropy,
    renormalized,
    scalable,
    softmax,
    yarn_temperature,
)
from models.positions import Coordinates, rotate
from models.transformer import HookedAdder

_MEMO_BYTES = 2**26  # of masks kept between layers
_LEAST_FACTOR = 1e-6  # by which scores are multiplied or divided
_MOST_BOOST = 1e6  # more than any score; float32 adds it without overflow

Hook = tuple[str, Callable[..., Any]]
Head = tuple[int, int]


class InterventionError(InputError):
    """An intervention that does not exist or does not apply to this model; says what to do."""


@dataclass(frozen=True)
class Scope:
    """The heads an intervention acts in: ``only`` these (all when empty), less ``without``."""

    only: frozenset[Head] = frozenset()
    without: frozenset[Head] = frozenset()

    def mask(self, model: HookedAdder) -> Bool[Tensor, "layer head"]:
        """True in scope.

        Raises:
            InterventionError: a head that the model does not have.
        """
        layers, heads = model.cfg.n_layers, model.cfg.n_heads
        for layer, head in self.only | self.without:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise InterventionError(f"head {layer}.{head} does not exist: {layers} layers of {heads} heads")
        mask = torch.full((layers, heads), not self.only)
        for layer, head in self.only:
            mask[layer, head] = True
        for layer, head in self.without:
            mask[layer, head] = False
        return mask


class Edit:
    """Anything with a name that makes hooks: an :class:`Intervention`, or an edit built from measurements.

    ``every_key``: whether the hooks need every key by itself, so that none may be pooled or left out
    (:class:`models.attention.Blocks`).
    """

    every_key = True
    rewrites_weights = False  # after the softmax, so that scores no longer say what the weights are

    @property
    def name(self) -> str:
        raise NotImplementedError

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        raise NotImplementedError

    def keeps_within(self, model: HookedAdder) -> int | None:
        """The distance beyond which no head gives any weight to a key under this edit, separators aside; or None."""
        return None


@dataclass(frozen=True)
class Intervention(Edit):
    """One named edit. ``kind`` and ``value`` are the two sides of its name (``window=4``)."""

    kind: str
    value: str | None = None
    scope: Scope = field(default=Scope())
    seed: int = 0

    @property
    def name(self) -> str:
        return self.kind if self.value is None else f"{self.kind}={self.value}"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        """Raises InterventionError if it does not apply to this model."""
        return _KINDS[self.kind].hooks(model, partition, self)

    @property
    def every_key(self) -> bool:  # type: ignore[override]
        return _KINDS[self.kind].every_key

    @property
    def rewrites_weights(self) -> bool:  # type: ignore[override]
        return self.kind == "normalizer" or (self.kind, self.value) == ("temperature", "adaptive")

    def keeps_within(self, model: HookedAdder) -> int | None:
        within = _KINDS[self.kind].within
        return within(model, self) if within is not None and bool(self.scope.mask(model).all()) else None


def parse_head(text: str) -> Head:
    """``"1.3"`` as layer 1, head 3.

    Raises:
        InterventionError: it is written otherwise.
    """
    layer, dot, head = text.partition(".")
    if not dot or not all(part.isascii() and part.isdigit() and len(part) < 4 for part in (layer, head)):
        raise InterventionError(f"a head is written LAYER.HEAD, as in 1.3, got {text[:60]!r}")
    return int(layer), int(head)


def head_words(heads: Sequence[Head] | None) -> str:
    """`` in 1.2, 1.3``; nothing for None, which is all heads."""
    return "" if heads is None else f" in {', '.join(f'{layer}.{head}' for layer, head in heads)}"


def parse_intervention(name: str, scope: Scope | None = None, seed: int = 0) -> Intervention:
    """``"far"``, ``"window=4"``, ``"sink-boost=log"`` ... as an :class:`Intervention`.

    Raises:
        InterventionError: unknown name, missing or bad value.
    """
    kind, _, text = name.partition("=")
    if kind not in _KINDS:
        raise InterventionError(f"no intervention is called {kind[:60]!r}; there are {', '.join(sorted(_KINDS))}")
    value = text if "=" in name else None
    _KINDS[kind].check(kind, value)
    return Intervention(kind, value, scope or Scope(), seed)


def hooks_for(model: HookedAdder, batch: Batch, interventions: Sequence[Edit]) -> list[Hook]:
    """The hooks of these interventions on one batch, in order.

    Raises:
        InterventionError: one does not apply to this model.
    """
    partition = Partition(model, batch)
    return [hook for intervention in interventions for hook in intervention.hooks(model, partition)]


@dataclass(frozen=True)
class _Kind:
    """How a kind of intervention checks its value and makes its hooks; ``every_key`` and ``within``: see Edit."""

    check: Callable[[str, str | None], object]
    hooks: Callable[[HookedAdder, Partition, Intervention], list[Hook]]
    every_key: bool = False
    within: Callable[[HookedAdder, Intervention], int] | None = None


def _removal(removed: Callable[[Partition, Any, Span], Bool[Tensor, "batch query key"]]) -> Any:
    """Hooks that set the scores of the keys that ``removed`` names to -inf, before the softmax."""

    def hooks(model: HookedAdder, partition: Partition, intervention: Any) -> list[Hook]:
        scope = intervention.scope.mask(model)
        memo: dict[tuple[int, int], Tensor] = {}  # the same for all layers, unless they see other keys

        def remove(scores: Tensor, hook: HookPoint) -> Tensor:
            span = Span.of(hook)
            key = (span.query.start, span.query.stop)
            if not isinstance(span.key, slice):
                gone = removed(partition, intervention, span)
            elif key in memo:
                gone = memo[key]
            else:
                if sum(mask.numel() for mask in memo.values()) > _MEMO_BYTES:
                    memo.clear()
                gone = memo[key] = removed(partition, intervention, span)
            return scores.masked_fill(gone[:, None] & scope[hook.layer()][None, :, None, None], -torch.inf)

        return [(f"blocks.{layer}.attn.hook_attn_scores", remove) for layer in _layers(scope)]

    return hooks


def _far(partition: Partition, _: Intervention, span: Span) -> Tensor:
    return partition.far(span)


def _outside_window(partition: Partition, intervention: Intervention, span: Span) -> Tensor:
    return partition.distance(span) > _window(intervention.kind, intervention.value)


def _outside_stream(partition: Partition, intervention: Intervention, span: Span) -> Tensor:
    first, last = _pair(intervention.kind, intervention.value)
    query, key = (partition.at.position[:, at] for at in (span.query, span.key))
    return (key >= first)[:, None] & (query[:, :, None] - key[:, None] >= last)


def _not_near(partition: Partition, _: Intervention, span: Span) -> Tensor:
    itself = span.positions == torch.arange(span.query.start, span.query.stop)[:, None]
    return (partition.far(span) | partition.separator(span)) & ~itself


def _draws(partition: Partition, seed: int, span: Span) -> tuple[Tensor, Tensor]:
    """Which keys a control may remove, and a random number for each of them, infinity for the others."""
    free = partition.visible(span) & ~partition.targets(span)
    asked = partition.far(span).any(-1)
    draws = np.ones(free.shape)
    for i, tokens in enumerate(partition.batch.tokens):
        own = tokens[partition.batch.mask[i]].numpy()
        stream = f"random-control {zlib.crc32(own.tobytes())}"
        for j in torch.nonzero(asked[i]).flatten().tolist():
            query = span.query.start + j
            draws[i, j, : query + 1] = generator(seed, stream, query).random(query + 1)
    return free, torch.from_numpy(draws).masked_fill(~free, torch.inf)


def _mass_control(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    scope = intervention.scope.mask(model)
    memo: dict[int, tuple[Tensor, Tensor]] = {}  # of a block of queries: the order of its keys, and which are free

    def remove(scores: Tensor, hook: HookPoint) -> Tensor:
        span = Span.of(hook)
        if span.query.start not in memo:
            if sum(order.numel() for order, _ in memo.values()) * 8 > _MEMO_BYTES:
                memo.clear()
            free, draws = _draws(partition, intervention.seed, span)
            memo[span.query.start] = draws.argsort(-1), free
        order, free = (x[:, None].expand(scores.shape) for x in memo[span.query.start])
        top = scores.amax(-1, keepdim=True)
        mass = (scores - torch.where(torch.isneginf(top), 0.0, top)).double().exp()
        wanted = (mass * partition.far(span)[:, None]).sum(-1, keepdim=True)
        taken = (mass * free).gather(3, order)
        before = taken.cumsum(-1) - taken  # what the keys drawn earlier had
        lacking = before < wanted * (1 - 1e-9)  # not for rounding alone
        gone = torch.zeros_like(free).scatter(3, order, lacking) & free
        return scores.masked_fill(gone & scope[hook.layer()][None, :, None, None], -torch.inf)

    return [(f"blocks.{layer}.attn.hook_attn_scores", remove) for layer in _layers(scope)]


def _random_control(partition: Partition, intervention: Intervention, span: Span) -> Tensor:
    free, drawn = _draws(partition, intervention.seed, span)
    wanted = partition.far(span).sum(-1, keepdim=True)
    if intervention.value is not None:
        wanted = wanted.clamp(max=_count(intervention.kind, intervention.value))
    last = drawn.sort(-1).values.gather(-1, (wanted - 1).clamp(min=0))
    return free & (wanted > 0) & (drawn <= last)


def _drop_best_far(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    scope = intervention.scope.mask(model)
    number = _count(intervention.kind, intervention.value)

    def drop(scores: Tensor, hook: HookPoint) -> Tensor:
        far = partition.far(Span.of(hook))[:, None] & scope[hook.layer()][None, :, None, None]
        rival = scores.masked_fill(~far, -torch.inf)
        best = rival.topk(min(number, rival.shape[-1]), dim=-1)
        keys = torch.where(torch.isneginf(best.values), rival.shape[-1], best.indices)
        gone = torch.zeros(*rival.shape[:-1], rival.shape[-1] + 1, dtype=torch.bool).scatter_(-1, keys, True)
        return scores.masked_fill(gone[..., :-1], -torch.inf)

    return [(f"blocks.{layer}.attn.hook_attn_scores", drop) for layer in _layers(scope)]


def _far_zero(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    scope = intervention.scope.mask(model)

    def zero(pattern: Tensor, hook: HookPoint) -> Tensor:
        here = scope[hook.layer()][None, :, None, None]
        return pattern.masked_fill(partition.far(Span.of(hook))[:, None] & here, 0.0)

    return [(f"blocks.{layer}.attn.hook_pattern", zero) for layer in _layers(scope)]


@dataclass(frozen=True)
class RestoreFar(Edit):
    """Lowers far keys' scores to ``ceiling`` ``[layer, head]``, measured in training, where they exceed it."""

    ceiling: Float[Tensor, "layer head"]
    scope: Scope = field(default=Scope())
    name: str = "restore-far"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        scope = self.scope.mask(model)

        def restore(scores: Tensor, hook: HookPoint) -> Tensor:
            layer = hook.layer()
            ceiling = torch.where(scope[layer], self.ceiling[layer], torch.inf).to(scores.dtype)
            bounded = scores.minimum(ceiling[None, :, None, None])
            return torch.where(partition.far(Span.of(hook))[:, None], bounded, scores)

        return [(f"blocks.{layer}.attn.hook_attn_scores", restore) for layer in _layers(scope)]


@dataclass(frozen=True)
class RestoreTargets(Edit):
    """Raises each lookup's targets' scores by ``lift`` ``[layer, head, lookup, column]``; the column is the query's."""

    lift: Float[Tensor, "layer head lookup column"]
    scope: Scope = field(default=Scope())
    name: str = "restore-targets"
    every_key = False

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        scope, batch = self.scope.mask(model), partition.batch
        column = torch.where(batch.decisions, batch.decision_column, batch.column).clamp(0, self.lift.shape[-1] - 1)

        def restore(scores: Tensor, hook: HookPoint) -> Tensor:
            span, layer = Span.of(hook), hook.layer()
            for i, name in enumerate(LOOKUPS):
                lift = (self.lift[layer, :, i] * scope[layer, :, None])[:, column[:, span.query]].to(scores.dtype)
                if lift.any():
                    raised = scores + lift.transpose(0, 1)[..., None]
                    scores = torch.where(partition.target_set(name, span)[:, None], raised, scores)
            return scores

        return [(f"blocks.{layer}.attn.hook_attn_scores", restore) for layer in _layers(scope)]


@dataclass(frozen=True)
class RestoreSink(Edit):
    """Lowers sinks' scores to ``ceiling`` ``[layer, head]``, measured in training, where they exceed it."""

    ceiling: Float[Tensor, "layer head"]
    scope: Scope = field(default=Scope())
    name: str = "restore-sink"
    every_key = False

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        scope = self.scope.mask(model)

        def restore(sink: Tensor, hook: HookPoint) -> Tensor:
            layer = hook.layer()
            ceiling = torch.where(scope[layer], self.ceiling[layer], torch.inf).to(sink.dtype)
            return sink.minimum(ceiling[None, :, None])

        return [(f"blocks.{layer}.attn.hook_sink_scores", restore) for layer in _layers(scope)]


@dataclass(frozen=True)
class RestoreNumber(Edit):
    """As many keys as in training: every query keeps its ``most`` nearest ones (and those as near as the last of them),
    separators and its own among what is always kept. A crowd is a matter of number, and part of it may be near: at
    length a query has trained distances on both sides, where training showed as many keys in all.
    """

    most: int
    scope: Scope = field(default=Scope())
    name: str = "restore-number"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        return _removal(self._removed)(model, partition, self)

    def _removed(self, partition: Partition, _: Edit, span: Span) -> Tensor:
        beyond = torch.iinfo(torch.int64).max
        counted = partition.visible(span) & ~partition.separator(span)
        distance = torch.where(counted, partition.distance(span), beyond)
        last = distance.kthvalue(min(self.most, distance.shape[-1]), dim=-1, keepdim=True).values
        return counted & (distance > last)


@dataclass(frozen=True)
class RestoreDistances(Edit):
    """Token distances as in training: every number is counted as if it had at most as many tokens as training showed.

    Keys in columns that training never had would then stand where other keys stand, and are removed; so for queries in
    the other columns every distance is one that training showed. ``count=False`` removes the same keys and leaves the
    distances as they are: what is then still wrong is wrong because of distances, not of keys. Only for schemes that
    rotate by token position.

    Raises InterventionError for other schemes.
    """

    count: bool = True
    scope: Scope = field(default=Scope())

    @property
    def name(self) -> str:
        return "restore-distances" if self.count else "same-keys-removed"

    @staticmethod
    def columns(model: HookedAdder) -> int:
        """How many columns training had, the final carry's aside."""
        return -(-model.config.task.max_digits // model.config.task.chunk)

    @staticmethod
    def applies(model: HookedAdder) -> bool:
        return bool(model.scheme.rotates) and model.config.attention.unit == "tokens"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        if not self.applies(model):
            raise InterventionError(f"{self.name} needs rotation by token position, and this model has none")
        scope, at = self.scope.mask(model), partition.at
        angles = model.scheme.angles(at._replace(position=self._positions(model, partition)))[:, :, None, :]
        beyond = (at.column >= self._trained(model, at)) & ~at.separator
        before: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: HookPoint) -> None:
            before[str(hook.name)] = x

        def turn(x: Tensor, hook: HookPoint) -> Tensor:
            unturned = before[str(hook.name).replace("hook_rot_", "hook_")]
            turned = rotate(unturned, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
            return torch.where(scope[hook.layer()][None, None, :, None], turned, x)

        def remove(scores: Tensor, hook: HookPoint) -> Tensor:
            gone = beyond[:, Span.of(hook).key]
            return scores.masked_fill(gone[:, None, None] & scope[hook.layer()][None, :, None, None], -torch.inf)

        hooks: list[Hook] = []
        for layer in _layers(scope):
            prefix = f"blocks.{layer}.attn.hook_"
            if self.count:
                hooks += [
                    (prefix + "q", keep),
                    (prefix + "k", keep),
                    (prefix + "rot_q", turn),
                    (prefix + "rot_k", turn),
                ]
            hooks.append((prefix + "attn_scores", remove))
        return hooks

    def _trained(self, model: HookedAdder, at: Coordinates) -> Int[Tensor, "batch pos"]:
        """How many columns training had of each token's number: the sum's final carry is one more."""
        return self.columns(model) + (at.row == 2)

    def _positions(self, model: HookedAdder, partition: Partition) -> Int[Tensor, "batch pos"]:
        """Where each token would stand if no number were longer than in training."""
        at, most = partition.at, self.columns(model)
        own = (partition.batch.mask & ~at.separator).long()
        lengths = torch.zeros(len(own), int(at.row.max()) + 1, dtype=torch.long).scatter_add_(1, at.row, own)
        before = torch.nn.functional.pad((lengths.clamp(max=most) + 1).cumsum(1)[:, :-1], (1, 0))
        start = before.gather(1, at.row)  # of each token's number; a separator stands just before its number
        return torch.where(at.separator, start - 1, start + at.column.minimum(self._trained(model, at)))


def _sink_boost(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    if not model.config.attention.sink:
        raise InterventionError("sink-boost needs a model with a sink, and this one has none; try window or far")
    scope = intervention.scope.mask(model)
    n_train = model.config.task.max_keys
    seen = partition.batch.mask.cumsum(1)

    def boost(sink: Tensor, hook: HookPoint) -> Tensor:
        here = scope[hook.layer()][None, :, None]
        return sink + here * _boost(intervention, seen[:, hook.ctx["query"]], n_train)[:, None, :].to(sink.dtype)

    return [(f"blocks.{layer}.attn.hook_sink_scores", boost) for layer in _layers(scope)]


def _boost(intervention: Intervention, seen: Tensor, n_train: int) -> Float[Tensor, "batch query"]:
    value = intervention.value
    if value in ("log", "2log"):
        return (2 if value == "2log" else 1) * (seen / n_train).log().clamp(min=0)
    return torch.full(seen.shape, _number(intervention.kind, value))


def _on_gates(change: Callable[[Tensor, Callable[[], Tensor]], Tensor]) -> Any:
    """Hooks that change rates ``[batch, pos, head, counter]``, given what draws a random sign for each."""

    def hooks(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
        from interp.counters import column_counters, has_counters  # which runs models under interventions

        if not has_counters(model):
            raise InterventionError(f"{intervention.kind} needs a model with counters, and this one has none")
        every = intervention.value == "all"
        shape = (model.cfg.n_layers, model.cfg.n_heads, model.config.attention.n_counters)
        which = torch.ones(shape, dtype=torch.bool) if every else column_counters(model)
        which = which & intervention.scope.mask(model)[:, :, None]

        def edit(rates: Tensor, hook: HookPoint) -> Tensor:
            layer = hook.layer()

            def signs() -> Tensor:
                stream = f"{intervention.kind} {hook.name}"
                return _signs(partition.batch, stream, rates.shape[2:], intervention.seed).to(rates.dtype)

            return torch.where(which[layer], change(rates, signs), rates)

        kinds = ("gate", "reset") if every else ("gate",)
        layers = _layers(which.any(-1))
        return [(f"blocks.{layer}.attn.hook_{kind}", edit) for layer in layers for kind in kinds]

    return hooks


def _signs(batch: Batch, stream: str, shape: Sequence[int], seed: int) -> Float[Tensor, "batch pos *shape"]:
    """1 or -1 at random, a function of the sequence alone and not of its batch."""
    signs = torch.ones(*batch.tokens.shape, *shape)
    for i, tokens in enumerate(batch.tokens):
        own = tokens[batch.mask[i]].numpy()
        rng = generator(seed, f"{stream} {zlib.crc32(own.tobytes())}", 0)
        signs[i, : len(own)] = torch.from_numpy(rng.choice([-1.0, 1.0], size=(len(own), *shape))).float()
    return signs


def _rounded(rates: Tensor, signs: Callable[[], Tensor]) -> Tensor:
    return rates.round()


def _jittered(rates: Tensor, signs: Callable[[], Tensor]) -> Tensor:
    return (rates + signs() * (rates.round() - rates).abs()).clamp(0, 1)


def _normalizer(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    normalizer, sink = NORMALIZERS[str(intervention.value)], model.config.attention.sink
    return _on_pattern(model, intervention, lambda pattern: renormalized(pattern, normalizer, sink))


def _adaptive(model: HookedAdder, intervention: Intervention) -> list[Hook]:
    sink = model.config.attention.sink

    def change(pattern: Tensor) -> Tensor:
        factor = adaptive_temperature(entropy(pattern, sink))[..., None]

        def scaled(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
            return softmax(logits * factor, None if sink_logits is None else sink_logits * factor[..., 0])

        return renormalized(pattern, scaled, sink)

    return _on_pattern(model, intervention, change)


def _on_pattern(model: HookedAdder, intervention: Intervention, change: Callable[[Tensor], Tensor]) -> list[Hook]:
    if model.config.attention.normalizer != "softmax":
        raise InterventionError(
            f"{intervention.name} reads scores off softmax's weights, and this model's are of "
            f"{model.config.attention.normalizer}; take a checkpoint with softmax"
        )
    scope = intervention.scope.mask(model)

    def edit(pattern: Tensor, hook: HookPoint) -> Tensor:
        return torch.where(scope[hook.layer()][None, :, None, None], change(pattern), pattern)

    return [(f"blocks.{layer}.attn.hook_pattern", edit) for layer in _layers(scope)]


def _ssmax(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    factor = scalable(partition.batch.mask.cumsum(1), _factor(intervention.kind, intervention.value))
    return _scaled(model, intervention, factor, sink=True)


def _temperature(model: HookedAdder, partition: Partition, intervention: Intervention) -> list[Hook]:
    if intervention.value == "adaptive":
        return _adaptive(model, intervention)
    seen = partition.batch.mask.cumsum(1)
    if intervention.value == "yarn":
        return _scaled(model, intervention, yarn_temperature(seen / model.config.task.max_keys), sink=False)
    factor = torch.full(seen.shape, 1 / _factor(intervention.kind, intervention.value))
    return _scaled(model, intervention, factor, sink=True)


def _scaled(
    model: HookedAdder, intervention: Intervention, factor: Float[Tensor, "batch pos"], sink: bool
) -> list[Hook]:
    """Hooks that multiply the scores of each query, and with ``sink`` its sink's."""
    scope = intervention.scope.mask(model)

    def at(hook: HookPoint, dtype: torch.dtype) -> Float[Tensor, "batch head query"]:
        here = factor[:, None, hook.ctx["query"]].to(dtype)
        return torch.where(scope[hook.layer()][None, :, None], here, 1.0)

    def scores(x: Tensor, hook: HookPoint) -> Tensor:
        return torch.where(torch.isneginf(x), x, x * at(hook, x.dtype)[..., None])

    hooks: list[Hook] = [(f"blocks.{layer}.attn.hook_attn_scores", scores) for layer in _layers(scope)]
    if sink and model.config.attention.sink:
        hooks += [
            (f"blocks.{layer}.attn.hook_sink_scores", lambda x, hook: x * at(hook, x.dtype)) for layer in _layers(scope)
        ]
    return hooks


def _layers(scope: Bool[Tensor, "layer head"]) -> Iterable[int]:
    return torch.nonzero(scope.any(1)).flatten().tolist()


def _no_value(kind: str, value: str | None) -> None:
    if value is not None:
        raise InterventionError(f"{kind} takes no value, got {value[:60]!r}")


def _which_normalizer(kind: str, value: str | None) -> None:
    if value not in ("sparsemax", "entmax15"):
        raise InterventionError(f"{kind} must be 'sparsemax' or 'entmax15', got {_shown(value)}")


def _temperature_value(kind: str, value: str | None) -> None:
    if value not in ("yarn", "adaptive"):
        _factor(kind, value, " or 'yarn' or 'adaptive'")


def _factor(kind: str, value: str | None, also: str = "") -> float:
    number = _number(kind, value, f"a number above 0{also}")
    if number < _LEAST_FACTOR:
        raise InterventionError(f"{kind} must be at least {_LEAST_FACTOR:g}{also}, got {_shown(value)}")
    return number


def _which_counters(kind: str, value: str | None) -> None:
    if value not in ("column", "all"):
        raise InterventionError(f"{kind} must be 'column' or 'all', got {_shown(value)}")


def _window(kind: str, value: str | None) -> int:
    return _whole(kind, value, "must be at least 1, a whole number of columns or tokens")


def _count(kind: str, value: str | None) -> int:
    return 1 if value is None else _whole(kind, value, "takes a number of keys from 1 up")


def _pair(kind: str, value: str | None) -> tuple[int, int]:
    takes = "takes two whole numbers of tokens, K,W: the first K and the last W, W at least 1"
    first, comma, last = (value or "").partition(",")
    if not comma or re.fullmatch("[0-9]{1,9}", first) is None:
        raise InterventionError(f"{kind} {takes}, got {_shown(value)}")
    return int(first), _whole(kind, last, takes)


def _whole(kind: str, value: str | None, takes: str) -> int:
    if value is None or re.fullmatch(r"0*[1-9][0-9]*", value) is None:
        raise InterventionError(f"{kind} {takes}, got {_shown(value)}")
    digits = value.lstrip("0")
    return int(digits) if len(digits) < 10 else 10**9  # no sequence is longer


def _number(kind: str, value: str | None, takes: str = "") -> float:
    decimal = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", value or "")
    if decimal is None or abs(float(decimal[0])) > _MOST_BOOST:
        takes = takes or f"a finite number within {_MOST_BOOST:g} of 0, 'log' or '2log'"
        raise InterventionError(f"{kind} must be {takes}, got {_shown(value)}")
    return float(decimal[0])


def _boost_value(kind: str, value: str | None) -> None:
    if value not in ("log", "2log"):
        _number(kind, value)


def _shown(value: str | None) -> str:
    return "nothing" if value is None else repr(value[:60])


_KINDS: dict[str, _Kind] = {
    "far": _Kind(_no_value, _removal(_far), within=lambda model, _: model.config.trained_distance),
    "window": _Kind(
        _window, _removal(_outside_window), every_key=True, within=lambda _, edit: _window(edit.kind, edit.value)
    ),
    "first-and-window": _Kind(_pair, _removal(_outside_stream), every_key=True),
    "keep-near": _Kind(_no_value, _removal(_not_near), within=lambda model, _: model.config.trained_distance),
    "sink-boost": _Kind(_boost_value, _sink_boost),
    "far-zero": _Kind(_no_value, _far_zero),
    "drop-best-far": _Kind(_count, _drop_best_far, every_key=True),
    "normalizer": _Kind(_which_normalizer, _normalizer, every_key=True),
    "ssmax": _Kind(_factor, _ssmax, every_key=True),
    "temperature": _Kind(_temperature_value, _temperature, every_key=True),
    "mass-control": _Kind(_no_value, _mass_control, every_key=True),
    "round-gates": _Kind(_which_counters, _on_gates(_rounded)),
    "jitter-gates": _Kind(_which_counters, _on_gates(_jittered)),
    "random-control": _Kind(_count, _removal(_random_control), every_key=True),
}
NAMES = tuple(_KINDS)
