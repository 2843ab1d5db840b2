"""From scores to weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def softmax(
    scores: Float[Tensor, "*batch key"],
    sink: Float[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch key"]:
    """Softmax over the keys and, if given, a sink that takes part in the sum and writes nothing.

    The sink's column is dropped, so a row adds to 1 minus the sink's share (the gpt-oss convention). A row in which
    everything is ``-inf`` has no weights at all: zeros, not NaN.
    """
    if sink is None:
        logits = scores
    else:
        logits = torch.cat([scores, sink[..., None]], dim=-1)
        if torch.isfinite(sink).all():  # the sink keeps every row alive
            return torch.softmax(logits, dim=-1)[..., :-1]
    dead = logits.amax(dim=-1, keepdim=True) == -torch.inf
    weights = torch.softmax(logits.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    return weights if sink is None else weights[..., :-1]
