"""During training: leak, gaps, sink and counters against the step, from the checkpoints that a recipe keeps.

A recipe with ``keep_every`` leaves a checkpoint each so many steps in ``steps/`` beside the final one. Each is a
checkpoint like any other, and measured as the final one is: on the same problems, by the same ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interp.counters import column_counters, has_counters
from interp.decisions import score
from interp.ledger import Ledger, build_ledger
from interp.shares import LeakGrowth
from models.addition import LOOKUPS
from models.checkpoint import load_checkpoint, load_record
from models.config import InputError
from models.training import KEPT

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Moment:
    """One kept checkpoint. ``exact``: share of problems exact, in training lengths and at ``digits``; ``counting``:
    counters that follow the column, of how many (both 0 in a model without counters)."""

    step: int
    trained_exact: float
    exact: float
    counting: int
    counters: int
    ledger: Ledger


@dataclass(frozen=True)
class During:
    """A run as it went, by step."""

    digits: int
    moments: tuple[Moment, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a (step, layer, head, lookup, present): share, leak, gap, n_eff, sink and target score, as
        :meth:`interp.shares.LeakGrowth.to_frame` has them."""
        import pandas as pd

        frames = [
            LeakGrowth({self.digits: moment.ledger}).to_frame().assign(step=moment.step) for moment in self.moments
        ]
        return pd.concat(frames, ignore_index=True)

    def heads(self) -> dict[str, tuple[int, int]]:
        """Per lookup, the head that gives its target the largest mean share at the last step."""
        found = {}
        for name in LOOKUPS:
            if (name, True) in self.moments[-1].ledger.lookups:
                share = self.moments[-1].ledger.lookups[name, True].share.mean(-1)
                layer, head = np.unravel_index(int(share.argmax()), share.shape)
                found[name] = (int(layer), int(head))
        return found

    def courses(self) -> dict[tuple[str, tuple[int, int]], pd.DataFrame]:
        """Per lookup and its head of :meth:`heads`, that head's rows of :meth:`to_frame`, by step."""
        frame = self.to_frame().query("present")
        return {
            (name, head): frame[(frame["lookup"] == name) & (frame["layer"] == head[0]) & (frame["head"] == head[1])]
            for name, head in self.heads().items()
        }

    def to_json(self) -> dict[str, Any]:
        """``"steps"``, ``"heads"`` (per step and head) and ``"performs"`` (per lookup the head that is drawn)."""
        steps = [
            {
                "step": m.step,
                "trained_exact": m.trained_exact,
                "exact": m.exact,
                "column_counters": m.counting if m.counters else None,
                "counters": m.counters or None,
            }
            for m in self.moments
        ]
        return {
            "digits": self.digits,
            "steps": steps,
            "performs": {name: list(head) for name, head in self.heads().items()},
            "heads": self.to_frame().to_dict("records"),
        }

    def plot(self) -> go.Figure:
        """Exact match, gap, sink score and leak against the step (:func:`interp.plots.during_figure`)."""
        from interp.plots import during_figure

        return during_figure(self)


def during(
    folder: str | Path,
    digits: int = 40,
    problems: int = 20,
    *,
    seed: int = 0,
    tell: Callable[[str], object] = lambda what: None,
) -> During:
    """Measure every checkpoint that a run kept, the final one last.

    Raises:
        InputError: the run kept none. CheckpointError: one of them is damaged.
    """
    folder = Path(folder)
    kept = sorted(path for path in (folder / KEPT).glob("*") if path.is_dir() and not path.is_symlink())
    if not kept:
        raise InputError(f"{folder}: no checkpoint was kept in training; train with --keep-every N")
    last = load_record(folder).step
    found = {load_record(path).step: path for path in kept}
    found[last] = folder
    moments = []
    for step, path in sorted(found.items()):
        tell(f"step {step} of {last}")
        model = load_checkpoint(path)
        short, long = (
            model.task.evaluation_problems(n, problems, seed) for n in (model.config.task.max_digits, digits)
        )
        counting = column_counters(model) if has_counters(model) else None
        moments.append(
            Moment(
                step=step,
                trained_exact=score(model, short, seed=seed).exact,
                exact=score(model, long, seed=seed).exact,
                counting=0 if counting is None else int(counting.sum()),
                counters=0 if counting is None else counting.numel(),
                ledger=build_ledger(model, long),
            )
        )
    return During(digits, tuple(moments))
