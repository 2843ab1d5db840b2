"""From scores to weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def softmax(
    scores: Float[Tensor, "*batch key"],
    sink: Float[Tensor, "*batch"] | None = None,
    parts: Sequence[int] = (),
) -> Float[Tensor, "*batch key"]:
    """Softmax over the keys and, if given, a sink that takes part in the sum and writes nothing.

    The sink's column is dropped, so a row adds to 1 minus the sink's share (the gpt-oss convention). A row in which
    everything is ``-inf`` has no weights at all: zeros, not NaN.

    Args:
        parts: widths of consecutive parts of the keys. The denominator is then summed part by part, in order, so that
            a part in which every score is ``-inf`` changes no bit, whether it is there or left out.
    """
    if len(parts) > 1:
        return _in_parts(scores, sink, parts)
    if sink is None:
        logits = scores
    else:
        logits = torch.cat([scores, sink[..., None]], dim=-1)
        if torch.isfinite(sink).all():  # the sink keeps every row alive
            return torch.softmax(logits, dim=-1)[..., :-1]
    dead = logits.amax(dim=-1, keepdim=True) == -torch.inf
    weights = torch.softmax(logits.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    return weights if sink is None else weights[..., :-1]


def _in_parts(scores: Tensor, sink: Tensor | None, parts: Sequence[int]) -> Tensor:
    top = scores.amax(dim=-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink[..., None])
    top = torch.where(torch.isneginf(top), 0.0, top)
    weights = (scores - top).exp_()
    total = torch.zeros_like(top) if sink is None else (sink[..., None] - top).exp()
    for part in weights.split(list(parts), dim=-1):
        total = total + part.sum(dim=-1, keepdim=True)
    return weights / total.clamp(min=torch.finfo(scores.dtype).tiny)  # a dead row's total is 0
