"""Counter probes: what each counter counts, how exactly, and where two rows' counts come apart.

A lookup by counts compares the query's count with the key's, so what matters of a counter is not that it grows but that
it reads the same in the same column of every number. Most sequences that only grow correlate with the position in the
number; a **column counter** is one that follows it closely, and more closely than it follows the position in the
sequence, on numbers of different lengths.

Where the numbers' rates differ by e a digit, their counts in the same column are half a column apart after
``1 / (2 e)`` digits more than at the start, and from there on a kernel that peaks at 0 prefers the neighbouring digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Edit
from interp.passes import run_problems
from models.addition import Batch, Problem, generator
from models.attention import Span
from models.config import InputError
from models.counters import REACH
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

FOLLOWS = 0.9  # correlation with the position in its own number from which a counter is a column counter (the study's)
ONE_A_DIGIT = 0.05  # how far from one count a digit a counter may be and count one a digit: what 10 digits ask for, C14
HALF = 0.5  # of a column, the difference of two rows' counts from which the neighbouring digit is as near
NULL_HEAD = 0.3  # mean share on the null key from which a head rests there (C11)
PROBE_PROBLEMS = 64  # of the longest training length, by which column counters are told
ROWS = ("first", "second", "sum")
PAIRS = {"sum-first": (2, 0), "sum-second": (2, 1), "second-first": (1, 0)}  # the rows whose counts lookups compare


@dataclass(frozen=True)
class CounterProbe:
    """One counter, over the digits of all numbers.

    Correlations (Pearson, 0 for a counter that never changes) with the column in the token's own number, the row, the
    position in the sequence, and the columns left to the number's other end; ``shuffled`` is with columns drawn from
    other tokens. ``per_digit``: mean count a digit, per row. ``apart``: per pair of rows, the mean difference of their
    counts in the same column, by column. ``kernel_peak``: the difference of counts that the kernel favours most;
    ``kernel_height``: its value there less the mean of the rest; ``kernel_width``: whole differences over which it
    stays above half its height. ``saturation``: the count at which the mean gate and reset inside numbers would settle;
    infinity without resets.
    """

    layer: int
    head: int
    counter: int
    column: float
    row: float
    position: float
    from_end: float
    shuffled: float
    per_digit: tuple[float, ...]
    apart: dict[str, np.ndarray]
    kernel_peak: int
    kernel_height: float
    kernel_width: int
    saturation: float

    @property
    def counts_columns(self) -> bool:
        return self.column >= FOLLOWS and self.column > self.position

    @property
    def one_a_digit(self) -> bool:
        return self.counts_columns and all(abs(rate - 1) <= ONE_A_DIGIT for rate in self.per_digit)

    def half_column(self, pair: str) -> int | None:
        """The first column by which the two rows' counts have come half a column further apart, or nearer, than in
        column 0; None if they never do. A difference that is there from the start is one that kernels can learn.
        """
        far = np.flatnonzero(np.abs(self.apart[pair] - self.apart[pair][:1]) >= HALF * self.pace)
        return int(far[0]) if len(far) else None

    def predicted_half_column(self, pair: str) -> float:
        """``1 / (2 e)``, from the rates: e is the two rows' difference a digit, in columns. Infinity if it is none."""
        first, second = (self.per_digit[row] for row in PAIRS[pair])
        apart = abs(first - second) / self.pace
        return HALF / apart if apart else math.inf

    @property
    def pace(self) -> float:
        """Mean counts a digit over the rows: what a column is worth."""
        return float(np.mean(self.per_digit)) or 1.0

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"per_digit": dict(zip(ROWS, self.per_digit, strict=True))}
        found["apart"] = {pair: values.tolist() for pair, values in self.apart.items()}
        found["half_column"] = {pair: self.half_column(pair) for pair in PAIRS}
        found["predicted_half_column"] = {pair: self.predicted_half_column(pair) for pair in PAIRS}
        return {**found, "counts_columns": self.counts_columns, "one_a_digit": self.one_a_digit}


@dataclass(frozen=True)
class NullKey:
    """One head's mean share on its sink (the null key) over all queries, and on the sequence's first token, at the
    longest training length and at the longer one."""

    layer: int
    head: int
    share_trained: float
    share: float
    first_token_trained: float
    first_token: float

    @property
    def rests_there(self) -> bool:
        return self.share_trained >= NULL_HEAD

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rests_there": self.rests_there}


@dataclass(frozen=True)
class Counting:
    """All counters of a model on problems of one length."""

    digits: int
    problems: int
    counters: tuple[CounterProbe, ...]
    null_keys: tuple[NullKey, ...]

    def to_json(self) -> dict[str, Any]:
        """The keys of ``leaksum counters``, less the checkpoint and the run; infinities as they are."""
        return {
            "digits": self.digits,
            "problems": self.problems,
            "column_counters": sum(probe.counts_columns for probe in self.counters),
            "counters": [probe.to_json() for probe in self.counters],
            "null_keys": [null.to_json() for null in self.null_keys],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row a counter, without what changes by column."""
        import pandas as pd

        return pd.DataFrame(
            [{k: v for k, v in probe.to_json().items() if not isinstance(v, dict)} for probe in self.counters]
        )


def probe_counters(
    model: HookedAdder,
    digits: int,
    problems: int = 50,
    *,
    seed: int = 0,
    interventions: Sequence[Edit] = (),
) -> Counting:
    """What every counter does at one length, and how the null keys' shares changed since training.

    Raises:
        InputError: the model has no counters. ProblemError: ``digits`` or ``problems`` below 1.
    """
    require_counters(model)
    drawn = model.task.evaluation_problems(digits, problems, seed)
    trained = model.task.evaluation_problems(model.config.task.max_digits, problems, seed)
    tokens = _tokens(model, drawn, interventions)
    rng = generator(seed, "counter probes", digits)
    probes = []
    for layer, head, counter in np.ndindex(*tokens.count.shape[1:]):
        probes.append(_probe(model, tokens, rng, layer, head, counter))
    then, now = (_null_shares(model, p, interventions) for p in (trained, drawn))
    nulls = [
        NullKey(layer, head, *(float(x[layer, head]) for x in (then[0], now[0], then[1], now[1])))
        for layer, head in np.ndindex(*then[0].shape)
    ]
    return Counting(digits, problems, tuple(probes), tuple(nulls))


def require_counters(model: HookedAdder) -> None:
    """Raises InputError where a model has no counters."""
    if not has_counters(model):
        scheme = model.config.attention.scheme
        raise InputError(f"this model has no counters (its scheme is {scheme!r}); take a checkpoint that counts")


def has_counters(model: HookedAdder) -> bool:
    return "blocks.0.attn.hook_gate" in model.hook_dict


def column_counters(model: HookedAdder) -> Bool[Tensor, "layer head counter"]:
    """Which counters follow the column, told at the longest training length."""
    tokens = _tokens(model, model.task.evaluation_problems(model.config.task.max_digits, PROBE_PROBLEMS), ())
    column, position = (_correlations(tokens.count, axis) for axis in (tokens.column, tokens.position))
    return torch.from_numpy((column >= FOLLOWS) & (column > position))


@dataclass(frozen=True)
class _Tokens:
    """The digits of all problems: ``count``, ``gate``, ``reset`` ``[token, layer, head, counter]``, and where they are
    ``[token]``."""

    count: np.ndarray
    gate: np.ndarray
    reset: np.ndarray
    column: np.ndarray
    row: np.ndarray
    position: np.ndarray
    from_end: np.ndarray


def _tokens(model: HookedAdder, problems: Sequence[Problem], interventions: Sequence[Edit]) -> _Tokens:
    kinds = ("count", "gate", "reset")
    kept: dict[str, list[Tensor]] = {}

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        kept.clear()
        return [
            (f"blocks.{layer}.attn.hook_{kind}", lambda x, hook, kind=kind: kept.setdefault(kind, []).append(x))
            for kind in kinds
            for layer in range(model.cfg.n_layers)
        ]

    parts: list[list[np.ndarray]] = []
    for step in run_problems(model, problems, interventions, watch):
        batch = step.batch
        digit = batch.mask & (batch.column >= 0)
        length = batch.lengths.gather(1, batch.row.clamp(min=0))
        where = (batch.column, batch.row, batch.mask.cumsum(1) - 1, length - 1 - batch.column)
        seen = [torch.stack(kept[kind], dim=2)[digit].double() for kind in kinds]
        parts.append([x.numpy() for x in (*seen, *(x[digit] for x in where))])
    return _Tokens(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _probe(
    model: HookedAdder, tokens: _Tokens, rng: np.random.Generator, layer: int, head: int, counter: int
) -> CounterProbe:
    at = (slice(None), layer, head, counter)
    count, gate, reset = tokens.count[at], tokens.gate[at], tokens.reset[at]
    by_row = [_by_column(count[tokens.row == row], tokens.column[tokens.row == row]) for row in range(len(ROWS))]
    rates = [_slope(count[tokens.row == row], tokens.column[tokens.row == row]) for row in range(len(ROWS))]
    apart = {}
    for pair, (one, other) in PAIRS.items():
        most = min(len(by_row[one]), len(by_row[other]))
        apart[pair] = by_row[one][:most] - by_row[other][:most]
    kernel = model.blocks[layer].attn.counters.kernel[head, counter].detach().double().numpy()
    peak = int(kernel.argmax())
    height = float(kernel[peak] - np.delete(kernel, peak).mean())
    inside = kernel >= kernel[peak] - height / 2
    width = 1 + _run(inside[peak + 1 :]) + _run(inside[:peak][::-1])
    within = tokens.column > 0  # at a number's first digit a reset is what starts it
    mean_reset = float(reset[within].mean()) if within.any() else 0.0
    return CounterProbe(
        layer,
        head,
        counter,
        column=float(_correlations(count, tokens.column)),
        row=float(_correlations(count, tokens.row)),
        position=float(_correlations(count, tokens.position)),
        from_end=float(_correlations(count, tokens.from_end)),
        shuffled=float(_correlations(count, rng.permutation(tokens.column))),
        per_digit=tuple(rates),
        apart=apart,
        kernel_peak=peak - REACH,
        kernel_height=height,
        kernel_width=width,
        saturation=float(gate[within].mean()) / mean_reset if mean_reset else math.inf,
    )


def _correlations(values: Float[np.ndarray, "token *rest"], axis: np.ndarray) -> np.ndarray:
    """Pearson's correlation over tokens, 0 where either never changes."""
    x = axis.astype(float) - axis.mean()
    y = values - values.mean(0)
    top = np.tensordot(x, y, axes=(0, 0))
    bottom = np.sqrt((x**2).sum() * (y**2).sum(0))
    steady = bottom <= 1e-9 * max(1.0, float(np.abs(values).max(initial=0)))
    found: np.ndarray = np.where(steady, 0.0, top / np.where(steady, 1.0, bottom))
    return found


def _by_column(count: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Mean count in each column."""
    number = np.bincount(column)
    return np.asarray(np.bincount(column, weights=count) / np.maximum(number, 1))


def _slope(count: np.ndarray, column: np.ndarray) -> float:
    """Counts a digit: the slope of the count against the column; 0 where there is one column alone."""
    x = column - column.mean()
    spread = float((x**2).sum())
    return float((x * count).sum() / spread) if spread else 0.0


def _run(inside: np.ndarray) -> int:
    """How many in a row are true from the start."""
    return int(np.argmin(inside)) if len(inside) and not inside.all() else len(inside)


def _null_shares(
    model: HookedAdder, problems: Sequence[Problem], interventions: Sequence[Edit]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean share on the sink and on the first token, ``[layer, head]``, over all queries."""
    totals = torch.zeros(2, model.cfg.n_layers, model.cfg.n_heads, dtype=torch.float64)
    queries = 0

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        def add(pattern: Tensor, hook: HookPoint) -> None:
            real = batch.mask[:, None, Span.of(hook).query]
            sink, first = (1 - pattern.sum(-1)).clamp(min=0), pattern[..., 0]
            for total, share in zip(totals, (sink, first), strict=True):
                total[hook.layer()] += (share * real).double().sum((0, 2))

        return [(f"blocks.{layer}.attn.hook_pattern", add) for layer in range(model.cfg.n_layers)]

    for step in run_problems(model, problems, interventions, watch, every_key=True):
        queries += int(step.batch.mask.sum())
    sink, first = (totals / queries).numpy()
    return sink if model.config.attention.sink else np.zeros_like(sink), first
