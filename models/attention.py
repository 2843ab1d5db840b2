"""Attention with a sink, as a block of hooks.

Hook names and shapes are HookedTransformer's. Scores are masked before ``hook_attn_scores`` and, when something is
hooked there, again after it: no edit can open the future or the padding.

A score, sink or pattern hook is told what it is looking at by ``hook.ctx["query"]`` and ``hook.ctx["key"]``
(:class:`Span`): the whole sequence unless the model runs blockwise. The key axis then ends with the block's last query,
since no later key can matter to it, and in long sequences blocks of keys may be left out or pooled (:class:`Blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from models.config import AdderConfig
from models.counters import Counters, count
from models.normalizers import NORMALIZERS, scalable, softmax, weighted_sum
from models.positions import SCHEMES, Coordinates, PositionScheme, rotate, within

_POOL_STEP = 8  # distances are rounded up to it, so that layers mostly see the same keys


@dataclass
class KeyValueCache:
    """What the tokens already read left for later ones, for generation: keys (rotated) and values, and counts where
    heads count. By name and layer, ``[batch, pos, ...]``."""

    capacity: int
    length: int = 0
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def append(self, name: str, layer: int, new: Float[Tensor, "batch pos *rest"]) -> Float[Tensor, "batch all *rest"]:
        """Store what this step's tokens leave, and return that of all up to here."""
        stop = self.length + new.shape[1]
        if stop > self.capacity:
            raise ValueError(f"the key-value cache holds {self.capacity} tokens, got {stop}")
        if (name, layer) not in self.kept:
            self.kept[name, layer] = new.new_zeros(new.shape[0], self.capacity, *new.shape[2:])
        kept = self.kept[name, layer]
        kept[:, self.length : stop] = new
        return kept[:, :stop]

    def last(self, name: str, layer: int) -> Float[Tensor, "batch *rest"] | None:
        """What the last token before this step left; None at the first."""
        return self.kept[name, layer][:, self.length - 1] if self.length else None


class Span(NamedTuple):
    """The queries and keys of one block: positions in the sequence.

    ``key`` is the slice up to the last query, or, where blocks of keys were left out, the positions of the others in
    order. A first key of ``-1`` is the pool: all far keys whose scores the scheme takes to 0, as one key that has the
    logarithm of their number as its score and the mean of their values as its value.
    """

    query: slice
    key: slice | Int[Tensor, "key"]

    @classmethod
    def of(cls, hook: HookPoint) -> Span:
        """What a hook is looking at."""
        return cls(hook.ctx["query"], hook.ctx["key"])

    @property
    def pooled(self) -> bool:
        return isinstance(self.key, Tensor) and bool(self.key[0] < 0)

    @property
    def positions(self) -> Int[Tensor, "key"]:
        """Of the keys, ``-1`` for the pool."""
        return torch.arange(self.key.stop) if isinstance(self.key, slice) else self.key


@dataclass(frozen=True)
class Blocks:
    """How a forward pass is cut up, so that nothing of size length x length is held.

    ``query``: queries a block; ``key``: keys a block. Three things may be done about the keys far from a block:

    - nothing: every key up to the block's last query is there;
    - ``skip_beyond=D``: blocks of keys that are wholly further than D from every query of the block are left out, as
      they may be when their scores are ``-inf``. The result is the same to the last bit;
    - ``pool=True``: where the scheme takes scores to 0 with distance, blocks of keys that it takes to 0 within
      rounding, beyond the trained distance, are pooled (:class:`Span`): a pass then costs length x window. Schemes
      that do not are run with every key.

    Blocks with a separator are always there. Sums over keys are taken block by block, in order.
    """

    query: int
    key: int = 64
    skip_beyond: int | None = None
    pool: bool = False

    def __post_init__(self) -> None:
        if self.query < 1:
            raise ValueError(f"a block must hold at least 1 query, got {self.query}")
        if self.key < 1:
            raise ValueError(f"a block must hold at least 1 key, got {self.key}")
        if self.skip_beyond is not None and self.skip_beyond < 0:
            raise ValueError(f"skip_beyond must be a distance from 0 up, got {self.skip_beyond}")


@dataclass(frozen=True)
class Block:
    """One block of queries and the keys it sees.

    ``runs``: its keys, the pool aside, as slices in order. ``part``: where sums over keys are taken part by part, how
    many keys that is. ``hidden`` is about the last so many keys, those before are seen by every query; ``factor`` is
    about all but the pool. ``pooled``: which blocks of keys are in the pool.
    """

    span: Span
    runs: list[slice]
    part: int | None
    hidden: Bool[Tensor, "batch 1 query tail"]
    factor: Float[Tensor, "batch 1 query key"] | None
    pooled: Bool[Tensor, "block"] | None


class Geometry:
    """What the layers of one forward pass share: coordinates, angles, and per block of queries the mask and decay."""

    def __init__(
        self,
        scheme: PositionScheme,
        at: Coordinates,
        mask: Bool[Tensor, "batch pos"],
        start: int,
        dtype: torch.dtype,
        blocks: Blocks | None,
        trained_distance: int,
        poolable: bool = True,
    ):
        self.poolable = poolable  # many keys of score 0 are one of score ln n: true of softmax, of unscaled scores
        self.scheme, self.at, self.mask, self.start, self.dtype = scheme, at, mask, start, dtype
        self.trained_distance = trained_distance
        self.stop = mask.shape[1]
        self.cut = blocks or Blocks(max(1, self.stop), max(1, self.stop))
        if scheme.every_key:
            self.cut = replace(self.cut, skip_beyond=None)
        self._blocks: dict[tuple[int, int | None], Block] = {}
        self._found: tuple[int, Tensor] | None = None
        if scheme.rotates:
            angles = scheme.angles(at.at(slice(start, None)))[:, :, None, :].to(dtype)
            self.cos, self.sin = angles.cos(), angles.sin()

    def pool_beyond(self, q: Float[Tensor, "batch pos head d_head"], k: Tensor) -> int | None:
        """From where scores of these queries and (scaled) keys are 0 within rounding; None if they are not pooled."""
        if not self.cut.pool or self.cut.skip_beyond is not None or not self.poolable:
            return None
        bound = float(q.detach().norm(dim=-1).max() * k.detach().norm(dim=-1).max())
        vanishing = self.scheme.vanishes_beyond(bound, torch.finfo(torch.float32).eps / 2)
        if vanishing is None:
            return None
        return -(-max(vanishing, self.trained_distance) // _POOL_STEP) * _POOL_STEP

    def blocks(self, pool_beyond: int | None = None) -> Iterator[Block]:
        """The blocks of queries, in order."""
        distance = self.cut.skip_beyond if pool_beyond is None else pool_beyond
        near = None if distance is None else self._near(distance)
        starts = range(self.start, self.stop, self.cut.query)
        for i, first in enumerate(starts):
            found = self._blocks.get((first, distance))
            if found is None:
                queries = slice(first, min(first + self.cut.query, self.stop))
                found = self._block(queries, None if near is None else near[i], pool_beyond is not None)
                if near is not None or len(starts) == 1:  # small, or the only one; the same in every layer
                    self._blocks[first, distance] = found
            yield found

    def _block(self, queries: slice, near: Tensor | None, pool: bool) -> Block:
        size, stop = self.cut.key, queries.stop
        live = list(range(-(-stop // size)))
        key: slice | Tensor = slice(0, stop)
        shown, runs, pooled = key, [slice(0, stop)], None
        if near is not None and not near[: len(live)].all():
            near = near[: len(live)]
            live = near.nonzero()[:, 0].tolist()
            runs = _runs(live, size, stop)
            shown = key = torch.cat([torch.arange(run.start, run.stop) for run in runs])
            if pool:
                shown, pooled = nn.functional.pad(key, (1, 0), value=-1), ~near
        seen = self.at.at(key)
        factor = self.scheme.factor(self.at.at(queries), seen)
        real = self.mask[:, key]
        padded = not (bool(real.all()) and bool(self.mask[:, queries].all()))
        tail = key if padded else slice(min(queries.start, live[-1] * size), stop)
        positions = tail if isinstance(tail, Tensor) else torch.arange(tail.start, stop)
        causal = positions <= torch.arange(queries.start, stop)[:, None]
        # a padded query sees nothing, so that what stands at the padding changes no score and no sum
        allowed = causal & self.mask[:, None, tail] & self.mask[:, queries, None]
        return Block(
            span=Span(queries, shown),
            runs=runs,
            part=size if pooled is None else None,
            hidden=~allowed[:, None],
            factor=None if factor is None else factor[:, None].to(self.dtype),
            pooled=pooled,
        )

    def _near(self, distance: int) -> Bool[Tensor, "query_block key_block"]:
        """Which blocks of keys come within a distance of which blocks of queries, or hold a separator."""
        if self._found is not None and self._found[0] == distance:
            return self._found[1]
        axis = self.scheme.axis(self.at)
        rows = []
        for first in range(self.start, self.stop, self.cut.query):
            block = slice(first, first + self.cut.query)
            near = self.mask & (within(distance, block, axis, self.mask) | self.at.separator)
            near[:, block] = True
            any_key = nn.functional.pad(near.any(0), (0, -self.stop % self.cut.key))
            rows.append(any_key.unflatten(0, (-1, self.cut.key)).any(1))
        self._found = (distance, torch.stack(rows))
        return self._found[1]


class Attention(nn.Module):
    """Multi-head attention. Per head with query q, keys k_j and sink score s:

    ``score_j = (R_i q . R_j k_j) / sqrt(d_head) * factor_ij`` and
    ``pattern_j = exp(score_j) / (exp(s) + sum_k exp(score_k))``.

    With counters a score is ``q . k_j / sqrt(d_head)`` and what the kernels add, with ALiBi, FIRE and CoPE what their
    ``bias`` adds (``hook_bias``, ``[batch, head, query, key]``). With a null key n, s is ``q . n / sqrt(d_head)``.

    Weights are HookedTransformer's: ``W_Q``, ``W_K``, ``W_V`` ``[head, d_model, d_head]``, ``W_O``
    ``[head, d_head, d_model]``; ``sink`` is ``[head]``, or ``null_key`` ``[head, d_head]``. There are no biases.
    """

    def __init__(self, config: AdderConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        heads, d_model, d_head = config.n_heads, config.d_model, config.d_head
        self.W_Q = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(heads, d_head, d_model))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if SCHEMES[config.attention.scheme].rotates:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        if config.attention.sink:
            if config.attention.null_key:
                self.null_key = nn.Parameter(torch.zeros(heads, d_head))
            else:
                self.sink = nn.Parameter(torch.zeros(heads))
            self.hook_sink_scores = HookPoint()
        if config.attention.scalable:  # as if not there, at the longest training length
            self.scale = nn.Parameter(torch.full((heads,), 1 / math.log(config.task.max_keys)))
        if config.attention.scheme == "counters":
            self.counters = Counters(config)
            self.hook_gate, self.hook_reset, self.hook_count = HookPoint(), HookPoint(), HookPoint()
        bias = SCHEMES[config.attention.scheme].bias
        self.bias = None if bias is None else bias(config)
        if bias is not None:
            self.hook_bias = HookPoint()
        self.hook_z, self.hook_result = HookPoint(), HookPoint()
        self.use_attn_result = False

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        geometry: Geometry,
        sink_boost: Float[Tensor, "batch"] | float,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        weights = torch.cat([self.W_Q, self.W_K, self.W_V])
        qkv = x @ rearrange(weights, "head d_model d_head -> d_model (head d_head)")
        qkv = rearrange(
            qkv, "batch pos (three head d_head) -> three batch pos head d_head", three=3, head=self.config.n_heads
        )
        # indexed, not unpacked: unpacking gives views that autograd forbids a hook to edit in place
        q, k, v = self.hook_q(qkv[0]), self.hook_k(qkv[1]), self.hook_v(qkv[2])
        if geometry.scheme.rotates:
            q = self.hook_rot_q(rotate(q, geometry.cos, geometry.sin))
            k = self.hook_rot_k(rotate(k, geometry.cos, geometry.sin))
        counts = None
        if self.config.attention.scheme == "counters":
            counts = self._count(x, geometry, cache)
        if cache is not None:
            k, v = cache.append("key", self.layer, k), cache.append("value", self.layer, v)
        q = rearrange(q, "batch pos head d_head -> batch head pos d_head") * (1 / math.sqrt(self.config.d_head))
        k = rearrange(k, "batch pos head d_head -> batch head d_head pos")
        v = rearrange(v, "batch pos head d_head -> batch head pos d_head")

        beyond = geometry.pool_beyond(q, k.transpose(2, 3))
        pool = None if beyond is None else _Pool(v, geometry)
        done = [self._attend(block, q, k, v, counts, geometry, sink_boost, pool) for block in geometry.blocks(beyond)]
        z = self.hook_z(rearrange(torch.cat(done, dim=2), "batch head pos d_head -> batch pos head d_head"))

        if self.use_attn_result or self.hook_result._forward_hooks:
            result = einsum(z, self.W_O, "batch pos head d_head, head d_head d_model -> batch pos head d_model")
            return self.hook_result(result).sum(dim=2)
        return rearrange(z, "batch pos head d_head -> batch pos (head d_head)") @ rearrange(
            self.W_O, "head d_head d_model -> (head d_head) d_model"
        )

    def _count(
        self, x: Float[Tensor, "batch pos d_model"], geometry: Geometry, cache: KeyValueCache | None
    ) -> Float[Tensor, "batch pos head counter"]:
        """Every token's counts, those of earlier tokens in the cache included."""
        gate, reset = self.counters.rates(x)
        gate, reset = self.hook_gate(gate), self.hook_reset(reset)
        before = None if cache is None else cache.last("count", self.layer)
        counts: Tensor = self.hook_count(count(gate, reset, geometry.mask[:, geometry.start :], before))
        return counts if cache is None else cache.append("count", self.layer, counts)

    def _attend(
        self,
        block: Block,
        q: Float[Tensor, "batch head pos d_head"],
        k: Float[Tensor, "batch head d_head pos"],
        v: Float[Tensor, "batch head pos d_head"],
        counts: Float[Tensor, "batch pos head counter"] | None,
        geometry: Geometry,
        sink_boost: Tensor | float,
        pool: _Pool | None,
    ) -> Float[Tensor, "batch head query d_head"]:
        """The output of one block of queries."""
        span = block.span
        here = slice(span.query.start - geometry.start, span.query.stop - geometry.start)
        scores = q[:, :, here] @ joined([k[..., run] for run in block.runs], dim=3)
        if block.factor is not None:
            scores = scores.mul_(block.factor)
        if counts is not None:
            keys = joined([counts[:, run] for run in block.runs], dim=1)
            scores = scores + self.counters.added(counts[:, span.query], keys).to(scores.dtype)
        if self.bias is not None:
            self.hook_bias.ctx.update(query=span.query, key=span.key)
            where = geometry.at.at(span.query), geometry.at.at(span.key)
            scores = scores + self.hook_bias(self.bias(scores, q[:, :, here], *where, block.hidden).expand_as(scores))
        scale = self._scale(geometry, span)
        if scale is not None:
            scores = scores * scale[..., None]
        tail = scores[..., scores.shape[-1] - block.hidden.shape[-1] :]
        tail.masked_fill_(block.hidden, -torch.inf)
        mean = None
        if block.pooled is not None and pool is not None:
            number, mean = pool.of(block.pooled)
            column = number.log()[:, None, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([column.to(scores.dtype), scores], dim=-1)
        scores = self._hooked_scores(scores, block.hidden, span)
        sink = self._sink_scores(scores, q[:, :, here], geometry.mask[:, span.query], scale, sink_boost, span)
        self.hook_pattern.ctx.update(query=span.query, key=span.key)
        weights = self.hook_pattern(self._normalized(scores, sink, block.part)).to(v.dtype)
        own = weights if mean is None else weights[..., 1:]
        z = weighted_sum(own, joined([v[:, :, run] for run in block.runs], dim=2), block.part)
        return z if mean is None else z + weights[..., :1] * mean

    def _hooked_scores(self, scores: Tensor, hidden: Tensor, span: Span) -> Tensor:
        point = self.hook_attn_scores
        point.ctx.update(query=span.query, key=span.key)
        scores = point(scores)
        if not point._forward_hooks:
            return scores
        scores = _bounded(scores, point)
        before = scores.shape[-1] - hidden.shape[-1]
        tail = scores[..., before:]
        if (tail.masked_fill(~hidden, -torch.inf) == -torch.inf).all():
            return scores
        return torch.cat([scores[..., :before], tail.masked_fill(hidden, -torch.inf)], dim=-1)

    def _scale(self, geometry: Geometry, span: Span) -> Float[Tensor, "batch head query"] | None:
        if not self.config.attention.scalable:
            return None
        return scalable(geometry.mask.cumsum(1)[:, None, span.query], self.scale[:, None])

    def _normalized(self, scores: Tensor, sink: Tensor | None, part: int | None) -> Tensor:
        name = self.config.attention.normalizer
        return softmax(scores, sink, part) if name == "softmax" else NORMALIZERS[name](scores, sink)

    def _sink_scores(
        self, scores: Tensor, q: Tensor, real: Tensor, scale: Tensor | None, boost: Tensor | float, span: Span
    ) -> Tensor | None:
        if not self.config.attention.sink:
            return None
        if self.config.attention.null_key:
            q = q * real[:, None, :, None]  # what stands at the padding asks nothing
            sink = einsum(q, self.null_key, "batch head query d_head, head d_head -> batch head query").to(scores.dtype)
        else:
            sink = self.sink.to(scores.dtype)[None, :, None].expand(scores.shape[:3])
        if scale is not None:
            sink = sink * scale
        if isinstance(boost, Tensor):
            sink = sink + boost.to(scores.dtype)[:, None, None]
        elif boost:
            sink = sink + boost
        point = self.hook_sink_scores
        point.ctx.update(query=span.query, key=span.key)
        if not point._forward_hooks:
            return sink
        return _bounded(point(sink.clone()), point)  # a copy: an edit in place must not reach the parameter


def _runs(blocks: list[int], size: int, stop: int) -> list[slice]:
    """Blocks of this size, by index in order, as the fewest slices."""
    runs: list[slice] = []
    for j in blocks:
        first, last = j * size, min((j + 1) * size, stop)
        if runs and runs[-1].stop == first:
            runs[-1] = slice(runs[-1].start, last)
        else:
            runs.append(slice(first, last))
    return runs


def joined(pieces: list[Tensor], dim: int) -> Tensor:
    """Pieces along a dimension as one tensor, without a copy where there is one piece."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def _bounded(scores: Tensor, point: HookPoint) -> Tensor:
    """Scores that a hook may have edited: +inf made finite (infinity over infinity is no weight), NaN refused."""
    most = torch.finfo(scores.dtype).max / 4
    if not scores.numel() or (scores.detach().amax(-1) <= most).all():  # false of NaN too
        return scores
    if torch.isnan(scores).any():
        raise ValueError(f"a hook at {point.name} returned NaN scores; use -inf to remove a key")
    return scores.clamp(max=most)


class _Pool:
    """Per block of keys: how many real keys it holds, and the sum of their values."""

    def __init__(self, v: Float[Tensor, "batch head pos d_head"], geometry: Geometry):
        size = geometry.cut.key
        real = geometry.mask[:, None, :, None]
        self.values = torch.stack([part.sum(2) for part in (v * real).split(size, dim=2)], dim=2)
        self.number = torch.stack([part.sum(1) for part in geometry.mask.split(size, dim=1)], dim=1).to(v.dtype)

    def of(self, pooled: Bool[Tensor, "block"]) -> tuple[Float[Tensor, "batch"], Tensor]:
        """Number of keys in these blocks, and their mean value ``[batch, head, 1, d_head]``."""
        which = pooled.nonzero()[:, 0]
        number = self.number[:, which].sum(1)
        total = self.values[:, :, which].sum(2, keepdim=True)
        return number, total / number.clamp(min=1)[:, None, None, None]
