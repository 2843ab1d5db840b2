"""Where attention goes, and how the leak grows: the ledger, read by head, column, lookup and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from interp.interventions import Edit, Head
from interp.leak import median
from interp.ledger import CLASSES, Ledger, LookupLedger, build_ledger
from interp.passes import Progress, after
from models.addition import LOOKUPS, Problem
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Shares:
    """Mean share of each class of key, by lookup, head and column; ``ledger`` is what they were read from."""

    ledger: Ledger

    def to_frame(self) -> pd.DataFrame:
        """One row a (lookup, present, layer, head, column); ``target`` to ``self`` add to 1.

        Where there is nothing to find the target is the sink, so ``target`` is 0 and ``sink`` is its share. ``beside``
        is the share of the keys one column to either side of the target, which ``near`` or ``far`` contains too.
        """
        import pandas as pd

        frames = []
        for (name, present), found in self.ledger.lookups.items():
            order = np.argsort(found.column, kind="stable")
            columns, start, count = np.unique(found.column[order], return_index=True, return_counts=True)
            parts = {"target": found.share * present, "sink": found.sink_share, "beside": found.beside_share}
            parts |= {kind: found.class_shares[..., i] for i, kind in enumerate(CLASSES)}
            layers, heads = found.share.shape[:2]
            layer, head, column = np.indices((layers, heads, len(columns)))
            rows = {
                "lookup": name,
                "present": present,
                "layer": layer.ravel(),
                "head": head.ravel(),
                "column": columns[column.ravel()],
                "queries": count[column.ravel()],
            }
            for kind, values in parts.items():
                rows[kind] = (np.add.reduceat(values[..., order], start, axis=-1) / count).ravel()
            frames.append(pd.DataFrame(rows))
        return pd.concat(frames, ignore_index=True)

    def to_json(self) -> list[dict[str, Any]]:
        """The ``"heads"`` of ``leaksum shares``."""
        groups: Any = self.to_frame().groupby(["layer", "head", "lookup", "present"], sort=True)
        keep = ["column", "queries", "target", "sink", "near", "far", "separator", "self", "beside"]
        return [
            {
                "layer": int(layer),
                "head": int(head),
                "lookup": lookup,
                "present": bool(present),
                "by_column": rows[keep].to_dict("records"),
            }
            for (layer, head, lookup, present), rows in groups
        ]

    def plot(self, head: Head, lookup: str, present: bool = True) -> go.Figure:
        """One head's attention by column, in one lookup (:func:`interp.plots.shares_figure`)."""
        from interp.plots import shares_figure

        return shares_figure(head, (lookup, present), [self.to_frame()])


def shares(
    model: HookedAdder,
    problems: Sequence[Problem],
    interventions: Sequence[Edit] = (),
    *,
    progress: Progress = lambda done: None,
) -> Shares:
    """Attention shares by head, lookup and column on these problems."""
    return Shares(build_ledger(model, problems, interventions, progress=progress))


@dataclass(frozen=True)
class LeakGrowth:
    """The leak at several lengths. ``ledgers``: by digits."""

    ledgers: dict[int, Ledger]

    def to_frame(self) -> pd.DataFrame:
        """One row a (layer, head, lookup, digits, present).

        ``share``, ``sink_share`` and ``far_share`` are means over queries; ``leak``, ``gap``, ``n_eff`` and the scores
        are medians, since a leak's mean is its largest value. ``keys`` is the mean number of keys a query sees.
        """
        import pandas as pd

        return pd.DataFrame(
            [
                row
                for digits, ledger in self.ledgers.items()
                for found in ledger.lookups.values()
                for row in _head_rows(digits, found)
            ]
        )

    def growth(self) -> list[dict[str, Any]]:
        """Slope of the gap against ln(distance) beyond the trained range, from the longest length, by head and lookup.

        The leak of the crowd stays bounded as the sequence grows if the slope exceeds 1; null where no key is far.
        """
        distances = self.ledgers[max(self.ledgers)].distances
        assert distances is not None
        slopes = distances.slopes()
        return [
            {"layer": layer, "head": head, "lookup": name, "slope": float(slopes[name][layer, head])}
            for name in LOOKUPS
            for layer, head in np.ndindex(*slopes[name].shape)
        ]

    def to_json(self) -> dict[str, Any]:
        """``"heads"`` and ``"growth"`` of ``leaksum leak``."""
        return {"heads": self.to_frame().to_dict("records"), "growth": self.growth()}

    def plot(self, head: Head, lookup: str, present: bool = True) -> go.Figure:
        """One lookup's leak in one head, at the shortest and the longest length (:func:`interp.plots.leak_figure`)."""
        from interp.plots import View, leak_figure

        digits, key = (min(self.ledgers), max(self.ledgers)), (lookup, present)
        return leak_figure(View(head, key, *(self.ledgers[n].lookups[key] for n in digits)), digits)


def leak_growth(
    model: HookedAdder,
    digits: Sequence[int],
    problems: int = 50,
    interventions: Sequence[Edit] = (),
    *,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> LeakGrowth:
    """The leak of every lookup in every head at each length, on ``problems`` problems a length."""
    ledgers: dict[int, Ledger] = {}
    for n in dict.fromkeys(digits):
        drawn = model.task.evaluation_problems(n, problems, seed)
        before = problems * len(ledgers)
        told, longest = after(progress, before), n == max(digits)
        ledgers[n] = build_ledger(model, drawn, interventions, distances=longest, progress=told)
    return LeakGrowth(ledgers)


def _head_rows(digits: int, found: LookupLedger) -> list[dict[str, Any]]:
    far = found.class_shares[..., CLASSES.index("far")]
    means = {"share": found.share, "sink_share": found.sink_share, "far_share": far}
    medians = {
        "leak": found.leak,
        "gap": found.gap,
        "n_eff": found.n_eff,
        "sink_score": found.sink,
        "target_score": found.target,
    }
    values = {k: v.mean(-1) for k, v in means.items()} | {k: median(v) for k, v in medians.items()}
    return [
        {
            "layer": layer,
            "head": head,
            "lookup": found.name,
            "digits": digits,
            "present": found.present,
            "queries": len(found.column),
            "keys": float(found.keys.mean()),
            **{name: float(value[layer, head]) for name, value in values.items()},
        }
        for layer, head in np.ndindex(*found.target.shape[:2])
    ]
