"""How exact the location of a machine is that addresses by location (:mod:`models.location`).

**Scores.** Neither machine reads its own answer back, so a decision is not given the correct answer so far, as an
adder's is: it is what one pass says. A decision of the Neural GPU is one cell of the tape after its last step, for
every bit of the sum and for the blank behind them, which ends it; its column is the cell, and all cells are read at
once. A decision of the Turing machine is one symbol of the copy, wrong if any of its bits is; its column is its place
in the sequence, no operand ever ends (``state`` is always ``neither``), and its margin is that of its worst bit. A
problem is exact when all of its decisions are right, as for an adder. Lengths are bits and symbols.

**Location.** What attention calls share is here the weight of a head on the cell it should be on. A head that moves by
shifts keeps only the product of what every shift left: with ``1 - e`` of a shift on its best direction, n steps leave
about ``(1 - e)**n`` of the weight where it should be, unless sharpening restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from models.addition import STATES
from models.location import BLANK, Copies, Machine, NeuralGPU, Sums, TuringMachine

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

BATCH = 64  # problems of one length at a time


def batches(model: Machine, problems: Sequence[Any]) -> list[tuple[list[int], Sums | Copies]]:
    """Problems of one length at a time, by index: a tape as long as the problem needs, and as many steps."""
    by_length: dict[int, list[int]] = {}
    for i, problem in enumerate(problems):
        length = len(problem) if isinstance(model, TuringMachine) else max(1, *(n.bit_length() for n in problem))
        by_length.setdefault(length, []).append(i)
    parts = []
    for _, indices in sorted(by_length.items()):
        for start in range(0, len(indices), BATCH):
            part = indices[start : start + BATCH]
            parts.append((part, model.task.encode([problems[i] for i in part])))
    return parts


@torch.no_grad()
def decide(model: Machine, batch: Sums | Copies) -> tuple[np.ndarray, ...]:
    """Of each decision of a batch: problem, column, state, whether it is the end, whether it is wrong, margin."""
    if isinstance(batch, Sums):
        logits = model(batch)[batch.asked].double()
        target = batch.sum[batch.asked][:, None]
        own = logits.gather(1, target)[:, 0]
        margin = own - logits.scatter(1, target, -torch.inf).amax(1)
        wrong = logits.argmax(1) != target[:, 0]
        first_ended, second_ended = ((number == BLANK)[batch.asked].int() for number in (batch.first, batch.second))
        state = first_ended + 2 * second_ended  # both, first ended, second ended, neither
        where = batch.asked.nonzero()
        return tuple(x.numpy() for x in (where[:, 0], where[:, 1], state, target[:, 0] == BLANK, wrong, margin))
    logits = model(batch).double()
    margin = torch.where(batch.symbols.bool(), logits, -logits).amin(2)
    index = np.indices(margin.shape).reshape(2, -1)
    none_ends = np.full(margin.numel(), STATES.index("neither"))
    lead = margin.flatten().numpy()
    return index[0], index[1], none_ends, np.zeros(len(lead), dtype=bool), lead <= 0, lead


@torch.no_grad()
def trace(model: Machine, batch: Sums | Copies) -> dict[str, Tensor]:
    """What every hook saw, ``[step, batch, ...]`` by the hook's name."""
    kept: dict[str, list[Tensor]] = {name: [] for name in model.hook_dict}

    def keep(value: Tensor, hook: Any) -> None:
        kept[str(hook.name)].append(value)

    model.run_with_hooks(batch, fwd_hooks=[(name, keep) for name in kept])
    return {name: torch.stack(values) for name, values in kept.items()}


@dataclass(frozen=True)
class HeadLocation:
    """The heads of a Turing machine while it copies. Arrays are ``[head, place]``, heads write and read.

    ``weight``: mean weight on the intended cell when the symbol of this place is written or read; the intended cell of
    a read is where the symbol was written, that of a write the cell of largest weight. ``n_eff``: mean of
    ``1 / sum(weight**2)``, the cells that a head is spread over. ``shift_leak``: mean share of the shift that is not on
    its best direction. ``kept``: mean product of ``1 - shift_leak`` over the steps of this phase so far, what would be
    left without sharpening.
    """

    weight: np.ndarray
    n_eff: np.ndarray
    shift_leak: np.ndarray
    kept: np.ndarray
    problems: int

    def to_frame(self) -> pd.DataFrame:
        """One row a head and place."""
        import pandas as pd

        return pd.DataFrame(self.to_json()["places"])

    def to_json(self) -> dict[str, Any]:
        names = ("weight", "n_eff", "shift_leak", "kept")
        places = [
            {"head": head, "place": place, **{name: float(getattr(self, name)[i, place]) for name in names}}
            for i, head in enumerate(("write", "read"))
            for place in range(self.weight.shape[1])
        ]
        return {"machine": "turing-machine", "problems": self.problems, "places": places}

    def summary(self) -> list[dict[str, Any]]:
        """What is shown to people: a few places of each head."""
        places = self.to_json()["places"]
        length = self.weight.shape[1]
        shown = {0, length // 4, length // 2, 3 * length // 4, length - 1}
        return [row for row in places if row["place"] in shown]

    def plot(self) -> go.Figure:
        """Weight on the intended cell by place, and what the shifts alone would have left."""
        import plotly.graph_objects as go

        from interp.plots import BLUE, LIGHT, VERMILLION

        figure = go.Figure()
        for i, (head, colour) in enumerate((("write", BLUE), ("read", VERMILLION))):
            figure.add_scatter(y=self.weight[i], name=f"{head} head", line_color=colour)
            figure.add_scatter(y=self.kept[i], name=f"{head}: shifts alone", line={"color": colour, "dash": "dot"})
        figure.update_xaxes(title="place in the sequence (symbols)")
        figure.update_yaxes(title="weight on the intended cell (share)", range=[0, 1.02])
        return figure.update_layout(template=LIGHT, height=360)


@dataclass(frozen=True)
class CellAccuracy:
    """A Neural GPU while it adds. ``right``: ``[step, cell]``, the share of problems whose cell already reads right
    after so many steps (row 0: after the first), of those that are scored there; NaN where none is. ``problems``: how
    many."""

    right: np.ndarray
    problems: int

    def to_frame(self) -> pd.DataFrame:
        """One row a step and cell."""
        import pandas as pd

        return pd.DataFrame(self.to_json()["cells"])

    def to_json(self) -> dict[str, Any]:
        cells = [
            {"step": step + 1, "cell": cell, "right": None if np.isnan(share) else float(share)}
            for (step, cell), share in np.ndenumerate(self.right)
        ]
        return {"machine": "neural-gpu", "problems": self.problems, "cells": cells}

    def summary(self) -> list[dict[str, Any]]:
        """What is shown to people: for each cell the step from which it stays right in all problems."""
        rows = []
        for cell, shares in enumerate(self.right.T):
            late = np.flatnonzero(~(shares == 1))
            settled = (
                None if np.isnan(shares).all() or len(late) == len(shares) else int(late[-1] + 2) if len(late) else 1
            )
            last = float(shares[-1])
            rows.append({"cell": cell, "right": None if np.isnan(last) else last, "always_right_from_step": settled})
        return rows

    def plot(self) -> go.Figure:
        """The share right, cells across and steps down."""
        import plotly.graph_objects as go

        from interp.plots import LIGHT

        steps = np.arange(1, len(self.right) + 1)
        figure = go.Figure(go.Heatmap(z=self.right, y=steps, zmin=0, zmax=1, colorscale="Viridis"))
        figure.update_xaxes(title="cell (0: least significant)")
        figure.update_yaxes(title="step", autorange="reversed")
        return figure.update_layout(template=LIGHT, height=480)


def location(
    model: Machine, digits: int, problems: int = 50, *, seed: int = 0, progress: Callable[[int], None] = lambda n: None
) -> HeadLocation | CellAccuracy:
    """How exact the machine's location is on problems of ``digits`` bits or symbols.

    Raises:
        ProblemError: ``digits`` or ``problems`` out of range.
    """
    drawn = model.task.evaluation_problems(digits, problems, seed)
    parts = []
    for indices, batch in batches(model, drawn):
        parts.append(_cells(model, batch) if isinstance(batch, Sums) else _heads(model, batch))
        progress(len(indices))
    if isinstance(model, NeuralGPU):
        right, asked = (np.sum([part[i] for part in parts], axis=0) for i in range(2))
        with np.errstate(invalid="ignore", divide="ignore"):
            return CellAccuracy(right / asked, problems)
    total = np.sum(parts, axis=0) / problems
    return HeadLocation(total[0], total[1], total[2], total[3], problems)


@torch.no_grad()
def _cells(model: Machine, batch: Sums) -> tuple[np.ndarray, np.ndarray]:
    """How many problems have each cell right after each step ``[step, cell]``, and how many are scored there."""
    assert isinstance(model, NeuralGPU)
    tapes = trace(model, batch)["hook_tape"]
    right = (model.readout(tapes).argmax(-1) == batch.sum) & batch.asked
    return right.sum(1).numpy(), batch.asked.sum(0).expand(len(tapes), -1).numpy()


def _heads(model: Machine, batch: Copies) -> np.ndarray:
    """Sums over the batch of weight, N_eff, shift leak and what shifts alone would keep, ``[4, head, place]``."""
    length = batch.symbols.shape[1]
    seen = trace(model, batch)
    phases = {"write": slice(0, length), "read": slice(length + 1, 2 * length + 1)}
    weights = {head: seen[f"hook_{head}_weights"][steps].double() for head, steps in phases.items()}
    intended = weights["write"].argmax(2, keepdim=True)
    found = []
    for head, steps in phases.items():
        on, leak = weights[head].gather(2, intended)[..., 0], 1 - seen[f"hook_{head}_shift"][steps].double().amax(2)
        found.append([on, 1 / (weights[head] ** 2).sum(2), leak, (1 - leak).cumprod(0)])
    return np.array([[part.sum(1).numpy() for part in head] for head in found]).swapaxes(0, 1)
