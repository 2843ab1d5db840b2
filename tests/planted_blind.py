"""Failures planted by someone who had not read the rules of the diagnosis, from the definitions of the causes alone.

Written before any verdict on them was seen. On that first run 7 of 10 verdicts were right: periodic aliasing was called
drift (six keys alias, and four were dropped at most), a crowd that lies partly at trained distances was unexplained,
and so were targets that shrink by a factor. The rules then learned of more than four aliasing keys, of near crowds, and
to name a cause without calling it proved; from there on these are plants like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from planted import Plant, ScoreEdit, View, every, sink_lower
from torch import Tensor

SinkEdit = Callable[[Tensor, View], Tensor]


def _best(scores: Tensor) -> Tensor:
    """The query's highest score, the sink's usual 10 at least."""
    best = scores.amax(-1, keepdim=True)
    return torch.where(torch.isfinite(best), best, 0.0).clamp(min=10.0)


def _raised(where: Tensor, scores: Tensor, value: Tensor) -> Tensor:
    """Visible scores below ``value`` become ``value``."""
    return torch.where(where & torch.isfinite(scores), scores.maximum(value.to(scores.dtype)), scores)


def constant_gap(gap: float, beyond: int = 3) -> ScoreEdit:
    """Every key over so many columns away trails the query's best by a gap, at any distance."""
    return lambda scores, view: _raised(
        (view.gap > beyond) & ~view.separator & ~view.target, scores, _best(scores) - gap
    )


def noisy_crowd(mean: float, spread: float, beyond: int = 2) -> ScoreEdit:
    """Scores of mean +- spread by a fixed hash of the two places: the same at every distance, no key special."""

    def edit(scores: Tensor, view: View) -> Tensor:
        places = 12.9898 * view.query_column + 78.233 * view.column + 37.7 * view.row + 4.1 * view.query_row
        noise = (torch.sin(places) * 43758.5453) % 1
        where = (view.gap > beyond) & ~view.separator & ~view.target
        return _raised(where, scores, mean + spread * (2 * noise - 1))

    return edit


def periodic(period: int, above: float) -> ScoreEdit:
    """A rotation that comes round: bumps at multiples of a period past the trained distances, either way."""

    def edit(scores: Tensor, view: View) -> Tensor:
        bump = -100 * (1 - torch.cos(2 * math.pi * view.gap / period))
        return _raised(view.far & ~view.target, scores, _best(scores) + above + bump)

    return edit


def ahead(distance: int, row: int, above: float) -> ScoreEdit:
    """One key, so many columns ahead of the query, in one row."""

    def edit(scores: Tensor, view: View) -> Tensor:
        where = view.far & (view.column - view.query_column == distance) & (view.row == row)
        return _raised(where, scores, _best(scores) + above)

    return edit


def hump(height: float, width: int = 40) -> ScoreEdit:
    """Far scores follow one slow wave: 0 at 10 columns, highest at 10 + width / 2."""

    def edit(scores: Tensor, view: View) -> Tensor:
        over = (view.gap - 10).clamp(min=0, max=width)
        return _raised(view.far & ~view.target, scores, height * torch.sin(math.pi * over / width) ** 2)

    return edit


def shrink(scale: float) -> ScoreEdit:
    """Targets' positive scores shrink as 1 / (1 + (column - 10) / scale) past the trained columns."""

    def edit(scores: Tensor, view: View) -> Tensor:
        over = (view.query_column - 10).clamp(min=0)
        return torch.where(torch.isfinite(scores) & view.target & (scores > 0), scores / (1 + over / scale), scores)

    return edit


def log_rise(rate: float, row: int) -> ScoreEdit:
    """Far keys of one row rise as rate * ln(distance / 10)."""

    def edit(scores: Tensor, view: View) -> Tensor:
        value = rate * (view.gap.clamp(min=10) / 10).log()
        return _raised(view.far & (view.row == row) & ~view.target, scores, value)

    return edit


def weaker(by: float) -> ScoreEdit:
    """Targets' scores are lower at every length."""
    return lambda scores, view: torch.where(view.target & torch.isfinite(scores), scores - by, scores)


def sink_by_column(rate: float) -> SinkEdit:
    return lambda sink, view: sink + rate * (view.query_column - 10).clamp(min=0).sqrt()


def sink_by_keys(rate: float) -> SinkEdit:
    return lambda sink, view: sink + rate * (view.seen / 33).log().clamp(min=0)


AHEAD = ((1, 1), (1, 3), (2, 0), (2, 1))
BLIND = (
    Plant("sink 9 lower at every length, all heads", "dilution", 60, every(), sink=sink_lower(9), seed=0),
    Plant("a crowd at a constant gap, layers 0 and 1", "dilution", 50, every((0, 1)), constant_gap(4.5), seed=2),
    Plant("a noisy crowd, layers 1 and 2", "dilution", 40, every((1, 2)), noisy_crowd(6.7, 1.5)),
    Plant("bumps every 19 columns, layer 0", "aliasing", 50, every((0,)), periodic(19, 3), seed=0),
    Plant("b's key 16 columns ahead, four heads", "aliasing", 30, AHEAD, ahead(16, 1, 4), seed=2),
    Plant("far scores on a slow wave, layer 1", "drift", 45, every((1,)), hump(26), seed=0),
    Plant("targets shrink hyperbolically, layers 1 and 2", "drift", 35, every((1, 2)), shrink(20), seed=2),
    Plant("a's far keys rise 12 ln(d/10), layers 0 and 2", "drift", 55, every((0, 2)), log_rise(12, 0)),
    Plant("sink rises 5 sqrt(column - 10), layer 0", "starvation", 35, every((0,)), sink=sink_by_column(5), seed=2),
    Plant(
        "targets 1 lower, sink rises 4 ln(n/33)", "starvation", 50, every((1, 2)), weaker(1), sink_by_keys(4), seed=0
    ),
)
