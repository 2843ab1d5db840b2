"""From scores to weights.

A normalizer turns the scores of the keys, and of the sink, into weights. Softmax gives every key some weight, however
many there are; sparsemax (Martins and Astudillo 1602.02068, eq. 2) and 1.5-entmax (Peters, Niculae and Martins
1905.05702, eq. 10) give none to keys that score 1, or 2, below the best, in whatever number.

Three other ways leave softmax and scale its scores instead, so that gaps grow with the number of keys:

==========================  ========================================================  ===========================
scale                       scores are multiplied by                                  the sink's score
==========================  ========================================================  ===========================
Scalable-Softmax            ``s ln n``, n the keys that the query sees                scaled: it is one more term
(Nakanishi 2501.19399)                                                                of the same softmax
YaRN's temperature          ``(0.1 ln r + 1)**2``, r how many times the trained       not scaled: the factor is on
(Peng et al. 2309.00071,    number of keys the query sees, at least 1; query and      queries and keys, and the
eq. 22)                     key are each multiplied by the root                       sink has neither
adaptive temperature        a polynomial of the weights' entropy, at least 1, where   scaled: entropy is of all
(Velickovic et al.          the entropy is above .5 nats                              weights
2410.01104, fig. 8)
==========================  ========================================================  ===========================

Subtracting ``s ln n`` from every score instead would change nothing: softmax does not see what all scores share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

ENTROPY_FIT = (-0.037, 0.481, -2.3, 4.917, -1.791)  # of the adaptive temperature, highest power first
ENTROPY_FROM = 0.5  # nats, below which adaptive temperature leaves the scores as they are
_NO_WEIGHT = -16.0  # below the best score, where neither sparsemax nor 1.5-entmax gives any weight


def softmax(
    scores: Float[Tensor, "*batch key"],
    sink: Float[Tensor, "*batch"] | None = None,
    part: int | None = None,
) -> Float[Tensor, "*batch key"]:
    """Softmax over the keys and, if given, a sink that takes part in the sum and writes nothing.

    The sink's column is dropped, so a row adds to 1 minus the sink's share (the gpt-oss convention). A row in which
    everything is ``-inf`` has no weights at all: zeros, not NaN.

    >>> softmax(torch.tensor([-2.0, 0.0, 0.5])).numpy().round(4)
    array([0.0486, 0.3592, 0.5922], dtype=float32)
    >>> softmax(torch.tensor([0.0, 0.0]), sink=torch.tensor(0.0)).sum().item()  # a third is the sink's
    0.6666666865348816

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
    if dead.any():
        weights = torch.softmax(logits.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    else:
        weights = torch.softmax(logits, dim=-1)
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


def _sparse(of: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A normalizer of the package ``entmax``, with a sink, and zeros where every score is ``-inf``."""

    def weights(scores: Tensor, sink: Tensor | None = None) -> Tensor:
        import entmax  # only where it is asked for

        logits = scores if sink is None else torch.cat([scores, sink[..., None]], dim=-1)
        top = logits.amax(dim=-1, keepdim=True)
        dead = top == -torch.inf
        below = torch.where(dead, 0.0, logits - torch.where(dead, 0.0, top)).clamp(min=_NO_WEIGHT)
        found: Tensor = getattr(entmax, of)(below, dim=-1).masked_fill(dead | (logits == -torch.inf), 0.0)
        return found if sink is None else found[..., :-1]

    weights.__name__ = of
    return weights


sparsemax = _sparse("sparsemax")
entmax15 = _sparse("entmax15")
NORMALIZERS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "softmax": softmax,
    "sparsemax": sparsemax,
    "entmax15": entmax15,
}


def scalable(keys: Int[Tensor, "*query"], s: float | Tensor) -> Float[Tensor, "*query"]:
    """Scalable-Softmax's factor on scores: ``s ln n``.

    >>> scalable(torch.tensor([10, 1000]), 0.43).numpy().round(3)
    array([0.99, 2.97], dtype=float32)
    """
    return s * keys.clamp(min=1).log()


def yarn_temperature(ratio: Float[Tensor, "*query"]) -> Float[Tensor, "*query"]:
    """YaRN's factor on scores at ``ratio`` times the trained length, 1 up to it.

    >>> round(yarn_temperature(torch.tensor(64.0)).item(), 5)
    2.00474
    """
    return (0.1 * ratio.clamp(min=1).log() + 1).square()


def adaptive_temperature(entropy: Float[Tensor, "*query"]) -> Float[Tensor, "*query"]:
    """Adaptive temperature's factor on scores, given the entropy of the weights in nats."""
    fitted = torch.zeros_like(entropy)
    for coefficient in ENTROPY_FIT:
        fitted = fitted * entropy + coefficient
    return torch.where(entropy > ENTROPY_FROM, fitted.clamp(min=1.0), 1.0)


def renormalized(
    pattern: Float[Tensor, "*query key"], normalizer: Callable[[Tensor, Tensor | None], Tensor], sink: bool
) -> Float[Tensor, "*query key"]:
    """The weights that another normalizer would have given, from softmax's weights alone.

    Their logarithms are the scores but for a number that all of a query share, which no normalizer sees. With ``sink``
    what is missing to 1 is the sink's. Weights that softmax rounded to 0 stay 0.
    """
    weights = pattern.double()
    left = (1 - weights.sum(-1)).clamp(min=0).log() if sink else None
    alive = weights.sum(-1, keepdim=True) > 0
    found = normalizer(weights.log(), left)
    return torch.where(alive, found, 0.0).to(pattern.dtype)


def entropy(pattern: Float[Tensor, "*query key"], sink: bool) -> Float[Tensor, "*query"]:
    """Of a query's weights, in nats; with ``sink``, of what is missing to 1 too."""
    weights = pattern.double()
    if sink:
        weights = torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
    return -torch.special.xlogy(weights, weights).sum(-1)
