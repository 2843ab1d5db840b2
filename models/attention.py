"""Attention with a sink, as a block of hooks.

Hook names and shapes are HookedTransformer's. Scores are masked before ``hook_attn_scores`` and, when something is
hooked there, again after it: no edit can open the future or the padding.

``hook.ctx["query"]`` names the slice of queries that a score, sink or pattern hook is looking at, the whole sequence
unless the model runs blockwise. The key axis then ends with the block's last query: no later key can matter to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from models.config import AdderConfig
from models.normalizers import softmax
from models.positions import SCHEMES, Coordinates, PositionScheme, rotate


@dataclass
class KeyValueCache:
    """Keys (rotated) and values of the tokens already read, per layer, for generation."""

    capacity: int
    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values, and return all up to here, ``[batch, pos, head, d_head]``."""
        if layer == len(self.keys):
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            self.keys.append(k.new_zeros(shape))
            self.values.append(v.new_zeros(shape))
        stop = self.length + k.shape[1]
        if stop > self.capacity:
            raise ValueError(f"the key-value cache holds {self.capacity} tokens, got {stop}")
        self.keys[layer][:, self.length : stop] = k
        self.values[layer][:, self.length : stop] = v
        return self.keys[layer][:, :stop], self.values[layer][:, :stop]


class Geometry:
    """What the layers of one forward pass share: coordinates, angles, and per block of queries the mask and decay."""

    def __init__(
        self,
        scheme: PositionScheme,
        at: Coordinates,
        mask: Bool[Tensor, "batch pos"],
        start: int,
        dtype: torch.dtype,
        query_block: int | None,
    ):
        self.scheme = scheme
        self.at = at
        self.mask = mask
        self.start = start
        self.stop = mask.shape[1]
        self.dtype = dtype
        self.step = query_block or max(1, self.stop - start)
        self._last: tuple[slice, Tensor, Tensor | None] | None = None
        if scheme.rotates:
            angles = scheme.angles(at.at(slice(start, None)))[:, :, None, :].to(dtype)
            self.cos, self.sin = angles.cos(), angles.sin()

    def blocks(self) -> Iterator[tuple[slice, Bool[Tensor, "batch 1 query key"], Tensor | None]]:
        """Per block of queries: its slice, which keys up to its last query are hidden, and the factor on its scores.

        A padded query sees nothing, so that what stands at the padding changes no score and no sum.
        """
        for first in range(self.start, self.stop, self.step):
            queries = slice(first, min(first + self.step, self.stop))
            if self._last is None or self._last[0] != queries:
                keys = slice(0, queries.stop)
                causal = torch.arange(queries.stop) <= torch.arange(queries.start, queries.stop)[:, None]
                allowed = causal & self.mask[:, None, keys] & self.mask[:, queries, None]
                factor = self.scheme.factor(self.at.at(queries), self.at.at(keys))
                self._last = (
                    queries,
                    ~allowed[:, None],
                    None if factor is None else factor[:, None].to(self.dtype),
                )
            yield self._last


class Attention(nn.Module):
    """Multi-head attention. Per head with query q, keys k_j and sink score s:

    ``score_j = (R_i q . R_j k_j) / sqrt(d_head) * factor_ij`` and
    ``pattern_j = exp(score_j) / (exp(s) + sum_k exp(score_k))``.

    Weights are HookedTransformer's: ``W_Q``, ``W_K``, ``W_V`` ``[head, d_model, d_head]``, ``W_O``
    ``[head, d_head, d_model]``; ``sink`` is ``[head]``. There are no biases.
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
            self.sink = nn.Parameter(torch.zeros(heads))
            self.hook_sink_scores = HookPoint()
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
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        q = rearrange(q, "batch pos head d_head -> batch head pos d_head") * (1 / math.sqrt(self.config.d_head))
        k = rearrange(k, "batch pos head d_head -> batch head d_head pos")
        v = rearrange(v, "batch pos head d_head -> batch head pos d_head")

        parts = []
        for queries, hidden, factor in geometry.blocks():
            here = slice(queries.start - geometry.start, queries.stop - geometry.start)
            scores = q[:, :, here] @ k[..., : queries.stop]
            if factor is not None:
                scores = scores * factor
            scores = self._hooked_scores(scores.masked_fill_(hidden, -torch.inf), hidden, queries)
            sink = self._sink_scores(scores, sink_boost, queries)
            self.hook_pattern.ctx["query"] = queries
            pattern = self.hook_pattern(softmax(scores, sink))
            parts.append(pattern.to(v.dtype) @ v[:, :, : queries.stop])
        z = self.hook_z(rearrange(torch.cat(parts, dim=2), "batch head pos d_head -> batch pos head d_head"))

        if self.use_attn_result or self.hook_result._forward_hooks:
            result = einsum(z, self.W_O, "batch pos head d_head, head d_head d_model -> batch pos head d_model")
            return self.hook_result(result).sum(dim=2)
        return rearrange(z, "batch pos head d_head -> batch pos (head d_head)") @ rearrange(
            self.W_O, "head d_head d_model -> (head d_head) d_model"
        )

    def _hooked_scores(self, scores: Tensor, hidden: Tensor, queries: slice) -> Tensor:
        point = self.hook_attn_scores
        point.ctx["query"] = queries
        scores = point(scores)
        return _bounded(scores, point).masked_fill(hidden, -torch.inf) if point._forward_hooks else scores

    def _sink_scores(self, scores: Tensor, boost: Tensor | float, queries: slice) -> Tensor | None:
        if not self.config.attention.sink:
            return None
        sink = self.sink.to(scores.dtype)[None, :, None].expand(scores.shape[:3])
        if isinstance(boost, Tensor):
            sink = sink + boost.to(scores.dtype)[:, None, None]
        elif boost:
            sink = sink + boost
        point = self.hook_sink_scores
        point.ctx["query"] = queries
        if not point._forward_hooks:
            return sink
        return _bounded(point(sink.clone()), point)  # a copy: an edit in place must not reach the parameter


def _bounded(scores: Tensor, point: HookPoint) -> Tensor:
    """Scores that a hook may have edited: +inf made finite (infinity over infinity is no weight), NaN refused."""
    if torch.isnan(scores).any():
        raise ValueError(f"a hook at {point.name} returned NaN scores; use -inf to remove a key")
    return scores.clamp(max=torch.finfo(scores.dtype).max / 4)
