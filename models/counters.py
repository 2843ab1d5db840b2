"""Counters: attention that makes its own coordinates, from content alone.

Each head keeps two counters, ``c_t = (1 - reset_t) c_(t-1) + gate_t``, whose gate and reset are sigmoids of the token's
residual (after the norm). A score adds a learned kernel of the difference of counts, one per counter. The gates are
those of contextual position encoding (CoPE, Golovneva et al. 2405.18719, eq. 3), which sums them from the key to the
query; here a counter can start again, as at the beginning of a number.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from models.config import AdderConfig

RARE, FALL = -2.0, 0.0  # at first a reset of 12% a token, a fall of .7 a count
REACH = 8  # a kernel is free up to this difference of counts, either way


class Counters(nn.Module):
    """The counters of one layer, ``n_counters`` a head, and their kernels.

    ``gate_weight``, ``reset_weight``: ``[head, counter, d_model]``; ``gate_bias``, ``reset_bias``: ``[head, counter]``.
    ``kernel``: ``[head, counter, 17]``, what a difference of -8 .. 8 (query's count less key's) adds to the score;
    between whole differences it is interpolated linearly, and beyond them it goes on as the configuration's
    ``kernel_beyond`` says. ``fall``: ``[head, counter]``, the slope of a linear fall is its softplus.
    """

    def __init__(self, config: AdderConfig):
        super().__init__()
        shape = (config.n_heads, config.attention.n_counters)
        self.config = config.attention
        self.exact = config.attention.exact_counters  # training may put it off
        self.gate_weight, self.gate_bias = _zeros(*shape, config.d_model), _zeros(*shape)
        self.reset_weight, self.reset_bias = _zeros(*shape, config.d_model), _zeros(*shape)
        self.kernel = _zeros(*shape, 2 * REACH + 1)
        if config.attention.kernel_beyond == "linear":
            self.fall = _zeros(*shape)

    def initialise(self, rng: torch.Generator) -> None:
        """Gates near one half, resets rare, kernels flat but for their fall."""
        for weight in (self.gate_weight, self.reset_weight):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=rng)
        nn.init.constant_(self.reset_bias, RARE)
        if self.config.kernel_beyond == "linear":
            nn.init.constant_(self.fall, FALL)

    def rates(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch pos head counter"], Float[Tensor, "batch pos head counter"]]:
        """Gate and reset of every token, in [0, 1]; those of the first ``exact_counters`` are rounded to 0 or 1, with
        the gradient of what they were (straight-through, Bengio et al. 1308.3432)."""
        weights = torch.cat([self.gate_weight, self.reset_weight]).flatten(0, 1)
        biases = torch.cat([self.gate_bias, self.reset_bias]).flatten()
        logits = (x @ weights.T).to(biases.dtype) + biases
        rates = torch.sigmoid(logits).unflatten(-1, (2, *self.gate_bias.shape))
        if self.exact:
            rates = torch.cat([_Rounded.apply(rates[..., : self.exact]), rates[..., self.exact :]], dim=-1)
        return rates[:, :, 0], rates[:, :, 1]

    def added(
        self, query: Float[Tensor, "batch query head counter"], key: Float[Tensor, "batch key head counter"]
    ) -> Float[Tensor, "batch head query key"]:
        """What the kernels add to the scores, given the counts of the queries and of the keys."""
        queries, keys = (count.permute(0, 2, 3, 1) for count in (query, key))
        return self.kernels(queries[..., :, None] - keys[..., None, :]).sum(2)

    def kernels(
        self, apart: Float[Tensor, "batch head counter query key"]
    ) -> Float[Tensor, "batch head counter query key"]:
        """Each kernel at a difference of counts."""
        inside = apart.clamp(-REACH, REACH)
        low = inside.detach().floor().clamp(max=REACH - 1)
        index = (low + REACH).long().flatten(3)
        table = self.kernel.expand(len(apart), -1, -1, -1)
        at, step = (values.gather(3, index).view_as(apart) for values in (table[..., :-1], table.diff(dim=-1)))
        value = at + (inside - low) * step
        if self.config.kernel_beyond == "constant":
            return value
        if self.config.kernel_beyond == "floor":
            return torch.where(apart.abs() > REACH, self.config.kernel_floor, value)
        beyond = (apart.abs() - REACH).clamp(min=0)
        return value - nn.functional.softplus(self.fall)[..., None, None] * beyond


def count(
    gate: Float[Tensor, "batch pos head counter"],
    reset: Float[Tensor, "batch pos head counter"],
    mask: Bool[Tensor, "batch pos"],
    before: Float[Tensor, "batch head counter"] | None = None,
) -> Float[Tensor, "batch pos head counter"]:
    """The counts ``c_t = (1 - reset_t) c_(t-1) + gate_t``, from ``before`` (0) on; padding leaves them as they are.

    A parallel scan in ``log2(pos)`` steps (Hillis and Steele 1986): the maps ``c -> keep c + add`` compose. No product
    of ``keep`` is ever divided by another, so that a reset loses nothing: every count is as exact as adding in order.
    """
    real = mask[:, :, None, None]
    keep, add = torch.where(real, 1 - reset, 1.0), torch.where(real, gate, 0.0)
    if before is not None:
        add = torch.cat([add[:, :1] + keep[:, :1] * before[:, None], add[:, 1:]], dim=1)
    stride = 1
    while stride < add.shape[1]:
        add = torch.cat([add[:, :stride], add[:, stride:] + keep[:, stride:] * add[:, :-stride]], dim=1)
        keep = torch.cat([keep[:, :stride], keep[:, stride:] * keep[:, :-stride]], dim=1)
        stride *= 2
    return add


class _Rounded(torch.autograd.Function):
    """Rounds exactly forward, and passes gradients on as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))
