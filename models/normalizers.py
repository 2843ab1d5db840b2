"""From scores to weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def softmax(
    scores: Float[Tensor, "*batch key"],
    sink: Float[Tensor, "*batch"] | None = None,
    part: int | None = None,
) -> Float[Tensor, "*batch key"]:
    """Softmax over the keys and, if given, a sink that takes part in the sum and writes nothing.

    The sink's column is dropped, so a row adds to 1 minus the sink's share (the gpt-oss convention). A row in which
    everything is ``-inf`` has no weights at all: zeros, not NaN.

    Args:
        part: sum the denominator over so many keys at a time, in order, so that a part in which every score is ``-inf``
            changes no bit, whether it is there or left out.
    """
    if part is not None and part < scores.shape[-1]:
        return _in_parts(scores, sink, part)
    if sink is None:
        logits = scores
    else:
        logits = torch.cat([scores, sink[..., None]], dim=-1)
        if torch.isfinite(sink).all():  # the sink keeps every row alive
            return torch.softmax(logits, dim=-1)[..., :-1]
    dead = logits.amax(dim=-1, keepdim=True) == -torch.inf
    weights = torch.softmax(logits.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    return weights if sink is None else weights[..., :-1]


def _in_parts(scores: Tensor, sink: Tensor | None, part: int) -> Tensor:
    top = scores.amax(dim=-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink[..., None])
    top = torch.where(torch.isneginf(top), 0.0, top)
    weights = (scores - top).exp_()
    whole = scores.shape[-1] // part * part
    sums = weights[..., :whole].unflatten(-1, (-1, part)).sum(-1)
    total = sums.cumsum(-1)[..., -1:] + weights[..., whole:].sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink[..., None] - top).exp()
    return weights / total.clamp(min=torch.finfo(scores.dtype).tiny)  # a dead row's total is 0


def weighted_sum(
    weights: Float[Tensor, "*batch query key"], values: Float[Tensor, "*batch key d"], part: int | None = None
) -> Float[Tensor, "*batch query d"]:
    """``weights @ values``; with ``part``, over so many keys at a time, in order, as :func:`softmax` sums."""
    if part is None or part >= weights.shape[-1]:
        return weights @ values
    whole = weights.shape[-1] // part * part
    products = weights[..., :whole].unflatten(-1, (-1, part)).transpose(-2, -3) @ values[..., :whole, :].unflatten(
        -2, (-1, part)
    )
    z = products.cumsum(-3)[..., -1, :, :]
    return z if whole == weights.shape[-1] else z + weights[..., whole:] @ values[..., whole:, :]
