"""Per-decision scoring: one teacher-forced pass says which decisions are right, given the correct answer so far.

**Reach** at N digits is the share of problems with an N-digit operand whose every decision is right. Under greedy
decoding that is the same as exact match: a greedy answer leaves the correct one at its first wrong decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from interp.interventions import Edit, InterventionError
from interp.location import batches, decide
from interp.passes import Progress, after, describe_run, plan_for, run_problems
from models.addition import STATES, ProblemError
from models.location import Machine
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


def wilson_interval(right: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a share (Wilson 1927; Brown, Cai and DasGupta 2001, eq. 4).

    Raises:
        ValueError: unless ``0 <= right <= n`` and ``n >= 1``.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"a share needs 0 <= right <= n and n >= 1, got {right} of {n}")
    p, s = right / n, z * z / n
    centre, half = (p + s / 2) / (1 + s), z / (1 + s) * (p * (1 - p) / n + s / (4 * n)) ** 0.5
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # rounding must not leave p outside


@dataclass(frozen=True)
class Score:
    """Every decision of some problems. Arrays are ``[decision]``, sorted by problem and column.

    ``problem``: index into the problems. ``column``: of the predicted token, 0 the least significant.
    ``state``: index into ``models.addition.STATES``. ``eos``: predicts the end of the sum. ``wrong``: the largest logit
    is not the right token's. ``margin``: logit of the right token minus the best other.
    """

    problem: np.ndarray
    column: np.ndarray
    state: np.ndarray
    eos: np.ndarray
    wrong: np.ndarray
    margin: np.ndarray
    interventions: tuple[str, ...]
    run: dict[str, Any]

    @property
    def decisions(self) -> int:
        return len(self.wrong)

    @property
    def n_wrong(self) -> int:
        return int(self.wrong.sum())

    @cached_property
    def problem_exact(self) -> np.ndarray:
        """Bool ``[problem]``: every decision right."""
        return np.bincount(self.problem, weights=self.wrong) == 0

    @property
    def problems(self) -> int:
        return len(self.problem_exact)

    @property
    def exact(self) -> float:
        """Share of problems whose every decision is right."""
        return float(self.problem_exact.mean())

    @property
    def exact_interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of :attr:`exact`, over problems."""
        return wilson_interval(int(self.problem_exact.sum()), self.problems)

    @property
    def first_wrong_column(self) -> int | None:
        return int(self.column[self.wrong].min()) if self.wrong.any() else None

    def wrong_interval(self, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """95% interval of the share of wrong decisions: percentile bootstrap over problems.

        Whole problems are drawn, since the decisions of one problem are not independent.
        """
        per_problem = np.bincount(self.problem, weights=self.wrong)
        sizes = np.bincount(self.problem)
        draws = np.random.default_rng(seed).integers(0, self.problems, size=(resamples, self.problems))
        shares = per_problem[draws].sum(1) / sizes[draws].sum(1)
        low, high = np.quantile(shares, [0.025, 0.975])
        return float(low), float(high)

    def count(self, where: np.ndarray) -> dict[str, int]:
        return {"decisions": int(where.sum()), "wrong": int(self.wrong[where].sum())}

    def to_frame(self) -> pd.DataFrame:
        """One row a decision: problem, column, state, eos, wrong, margin."""
        import pandas as pd

        return pd.DataFrame(
            {
                "problem": self.problem,
                "column": self.column,
                "state": np.array(STATES)[self.state],
                "eos": self.eos,
                "wrong": self.wrong,
                "margin": self.margin,
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The keys of ``leaksum score``, less the checkpoint and digits."""
        low, high = self.exact_interval
        counts, wrong, margin = (np.bincount(self.column, weights=w) for w in (None, self.wrong, self.margin))
        by_column = [
            {"column": c, "decisions": int(counts[c]), "wrong": int(wrong[c]), "margin": margin[c] / counts[c]}
            for c in np.flatnonzero(counts).tolist()
        ]
        return {
            "problems": self.problems,
            "decisions": self.decisions,
            "wrong": self.n_wrong,
            "exact": self.exact,
            "exact_low": low,
            "exact_high": high,
            "first_wrong_column": self.first_wrong_column,
            "by_state": {name: self.count(self.state == i) for i, name in enumerate(STATES)},
            "eos": self.count(self.eos),
            "by_column": by_column,
            "run": self.run,
        }

    def plot(self) -> go.Figure:
        """Wrong decisions by column and state (:func:`interp.plots.mistakes_figure`)."""
        from interp.plots import mistakes_figure

        return mistakes_figure(self)


def score(
    model: HookedAdder | Machine,
    problems: Sequence[Any],
    interventions: Sequence[Edit] = (),
    *,
    seed: int | None = None,
    progress: Progress = lambda done: None,
) -> Score:
    """Score every decision of these problems, under some interventions.

    What a decision is of a machine that is not autoregressive, :mod:`interp.location` says.

    >>> from models.checkpoint import load_checkpoint
    >>> model = load_checkpoint("fixtures/1digit-rotary2d-pressure-seed0")
    >>> score(model, [(999, 1), (7, 8)]).n_wrong
    0

    Args:
        seed: of the problems, to be recorded; it changes nothing.

    Raises:
        ProblemError: no problems. InterventionError: an intervention that does not apply to this model.
    """
    if not isinstance(model, HookedAdder):
        return _score_machine(model, problems, interventions, seed, progress)
    parts: list[tuple[np.ndarray, ...]] = []
    for step in run_problems(model, problems, interventions, progress=progress):
        batch, asked = step.batch, step.batch.decisions
        logits = step.logits[asked].double()
        right = batch.targets[asked][:, None]
        own = logits.gather(1, right)
        lead = (own - logits.scatter(1, right, -float("inf")).amax(1, keepdim=True))[:, 0]
        missed = logits.argmax(1) != right[:, 0]
        which = np.repeat(np.array(step.indices), asked.sum(1).numpy())
        kept = (batch.decision_column, batch.state, batch.eos)
        parts.append((which, *(t[asked].numpy() for t in kept), missed.numpy(), lead.numpy()))
    return _sorted(parts, interventions, describe_run(model, problems, seed, interventions))


def _score_machine(
    model: Machine, problems: Sequence[Any], interventions: Sequence[Edit], seed: int | None, progress: Progress
) -> Score:
    if not problems:
        raise ProblemError("there is no problem to run; give at least one")
    if interventions:
        raise InterventionError(f"{interventions[0].name} edits attention, and this machine has none")
    parts, done, largest = [], 0, 0
    for indices, batch in batches(model, problems):
        which, *rest = decide(model, batch)
        parts.append((np.array(indices)[which], *rest))
        done, largest = done + len(indices), max(largest, len(indices))
        progress(done)
    run = {"seed": seed, "batch": largest, "threads": torch.get_num_threads(), "torch": torch.__version__}
    return _sorted(parts, (), run)


def _sorted(parts: Sequence[tuple[np.ndarray, ...]], interventions: Sequence[Edit], run: dict[str, Any]) -> Score:
    """Decisions of several batches as one score, by problem and column."""
    arrays = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((arrays[1], arrays[0]))
    problem, column, state, eos, wrong, margin = (array[order] for array in arrays)
    return Score(
        problem=problem,
        column=column,
        state=state,
        eos=eos,
        wrong=wrong,
        margin=margin,
        interventions=tuple(intervention.name for intervention in interventions),
        run=run,
    )


@dataclass(frozen=True)
class Reach:
    """Exact match against length: a :class:`Score` per number of digits."""

    scores: dict[int, Score]

    def to_frame(self) -> pd.DataFrame:
        """One row a length: digits, problems, exact, low, high, decisions, wrong."""
        import pandas as pd

        return pd.DataFrame(self.to_json())

    def to_json(self) -> list[dict[str, Any]]:
        """The rows of ``leaksum reach``."""
        rows = []
        for digits, found in self.scores.items():
            low, high = found.exact_interval
            rows.append(
                {
                    "digits": digits,
                    "problems": found.problems,
                    "exact": found.exact,
                    "low": low,
                    "high": high,
                    "decisions": found.decisions,
                    "wrong": found.n_wrong,
                }
            )
        return rows

    def plot(self, name: str = "", trained_digits: int | None = None) -> go.Figure:
        """Problems exact against length (:func:`interp.plots.reach_figure`)."""
        from interp.plots import reach_figure

        return reach_figure({name: self}, trained_digits)


def reach(
    model: HookedAdder | Machine,
    digits: Sequence[int],
    problems: int = 50,
    interventions: Sequence[Edit] = (),
    *,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Reach:
    """Exact match at each length, on ``problems`` problems drawn by ``seed`` (see ``models.addition``).

    >>> from models.checkpoint import load_checkpoint
    >>> found = reach(load_checkpoint("fixtures/1digit-rotary-seed0"), [10, 40], problems=4)
    >>> {digits: each.exact for digits, each in found.scores.items()}
    {10: 1.0, 40: 0.0}

    Raises:
        InputError: a length that does not fit into memory, or for which the model has no positions; before any is run.
    """
    drawn: dict[int, Any] = {n: model.task.evaluation_problems(n, problems, seed) for n in dict.fromkeys(digits)}
    if isinstance(model, HookedAdder):
        for n in drawn:
            plan_for(model, drawn[n], interventions)
    scores: dict[int, Score] = {}
    for n in drawn:
        told = after(progress, problems * len(scores))
        scores[n] = score(model, drawn[n], interventions, seed=seed, progress=told)
    return Reach(scores)
