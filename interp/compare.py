"""Checkpoints x lengths x interventions, one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp.decisions import Score, score
from interp.interventions import Edit, InterventionError
from models.addition import handmade_problems
from models.checkpoint import MachineRecord, TrainingRecord, load_any, load_any_record
from models.config import InputError
from models.positions import PositionError
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

UNEDITED = "none"


@dataclass(frozen=True)
class Comparison:
    """One cell: a checkpoint at a length under an intervention. ``score`` is None where that does not apply to it."""

    checkpoint: str
    digits: int
    intervention: str
    score: Score | None
    parameters: int
    record: TrainingRecord | MachineRecord

    def to_json(self) -> dict[str, Any]:
        """One row of ``leaksum compare``; numbers that do not apply are None."""
        found = self.score
        low, high = found.exact_interval if found else (None, None)
        return {
            "checkpoint": self.checkpoint,
            "digits": self.digits,
            "intervention": self.intervention,
            "exact": found.exact if found else None,
            "low": low,
            "high": high,
            "wrong": found.n_wrong if found else None,
            "decisions": found.decisions if found else None,
            "parameters": self.parameters,
            "train_steps": self.record.step,
            "train_seconds": self.record.seconds,
        }


def compare(
    checkpoints: Sequence[str | Path],
    digits: Sequence[int],
    interventions: Sequence[Edit] = (),
    problems: int = 50,
    *,
    handmade: bool = False,
    seed: int = 0,
    progress: Callable[[str], object] = lambda what: None,
) -> list[Comparison]:
    """Score every checkpoint at every length, without an edit and under each intervention by itself.

    Args:
        handmade: the hand-made problems of each length (full carry chains, unequal lengths) instead of random ones.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded; all are loaded before anything is run.
    """
    loaded = [(str(path), load_any(path), load_any_record(path)) for path in checkpoints]
    if handmade and not all(isinstance(model, HookedAdder) for _, model, _ in loaded):
        raise InputError("the hand-made problems are decimal sums; leave machines out, or --handmade")
    cells: list[Comparison] = []
    for name, model, record in loaded:
        parameters = sum(weight.numel() for weight in model.parameters())
        for n in dict.fromkeys(digits):
            drawn = handmade_problems(n) if handmade else model.task.evaluation_problems(n, problems, seed)
            for edit in (None, *interventions):
                label = UNEDITED if edit is None else edit.name
                progress(f"{name} at {n} digits, {label}")
                try:
                    found = score(model, drawn, [] if edit is None else [edit], seed=seed)
                except (InterventionError, PositionError):  # a boost without a sink; more columns than position ids
                    found = None
                cells.append(Comparison(name, n, label, found, parameters, record))
    return cells


def to_frame(cells: Sequence[Comparison]) -> pd.DataFrame:
    """One row a cell."""
    import pandas as pd

    return pd.DataFrame([cell.to_json() for cell in cells])
