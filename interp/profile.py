"""Score against distance: what a head gives to a key d away, and which part of the model gives it.

A score is split into what it would be without positions (**content**), what rotation adds (**rotation**), and what the
factor on the score adds (**decay**); the three sum to the score. Distances beyond the trained one were never seen in
training: nothing constrained the score there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Edit, Head, InterventionError
from interp.partition import Partition
from interp.passes import run_problems
from models.addition import Batch, Problem
from models.attention import Span
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

PARTS = ("score", "content", "rotation", "decay")


@dataclass(frozen=True)
class Profile:
    """One head's scores by distance in the scheme's unit. ``mean`` and ``spread`` (standard deviation) are
    ``[part, distance]`` in the order of :data:`PARTS`; ``count`` is ``[distance]``, the query-key pairs behind them.

    Separators and the query's own token are left out.
    """

    head: Head
    unit: str
    trained_distance: int
    count: np.ndarray
    mean: np.ndarray
    spread: np.ndarray

    def to_frame(self) -> pd.DataFrame:
        """One row a (distance, part): count, mean, spread, whether training saw the distance."""
        import pandas as pd

        distance = np.arange(len(self.count))
        return pd.concat(
            [
                pd.DataFrame(
                    {
                        "part": part,
                        "distance": distance,
                        "trained": distance <= self.trained_distance,
                        "count": self.count,
                        "mean": self.mean[i],
                        "spread": self.spread[i],
                    }
                )
                for i, part in enumerate(PARTS)
            ],
            ignore_index=True,
        )

    def plot(self) -> go.Figure:
        """The score against distance (:func:`interp.plots.profile_figure`)."""
        from interp.plots import profile_figure

        return profile_figure(self)


def score_profile(
    model: HookedAdder, problems: Sequence[Problem], head: Head, interventions: Sequence[Edit] = ()
) -> Profile:
    """Mean and spread of a head's scores at each distance, split into content, rotation and decay.

    ``score`` is what enters the softmax, interventions included; keys they remove do not count.

    Raises:
        InterventionError: the model has no such head.
    """
    layer, index = head
    if not (0 <= layer < model.cfg.n_layers and 0 <= index < model.cfg.n_heads):
        raise InterventionError(
            f"head {layer}.{index} does not exist: {model.cfg.n_layers} layers of {model.cfg.n_heads} heads"
        )
    totals: list[Tensor] = []

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        collector = _Collector(model, batch, index)
        totals.append(collector.sums)
        prefix = f"blocks.{layer}.attn."
        names = ["hook_q", "hook_k"] + (["hook_rot_q", "hook_rot_k"] if model.scheme.rotates else [])
        return [(prefix + name, collector.keep) for name in names] + [(prefix + "hook_attn_scores", collector.add)]

    for _ in run_problems(model, problems, interventions, watch, every_key=True):
        pass
    size = max(sums.shape[-1] for sums in totals)
    total = sum(torch.nn.functional.pad(sums, (0, size - sums.shape[-1])) for sums in totals)
    assert isinstance(total, Tensor)
    count, first, second = total[0], total[1 : 1 + len(PARTS)], total[1 + len(PARTS) :]
    mean = first / count
    spread = (second / count - mean**2).clamp(min=0).sqrt()
    return Profile(
        head=head,
        unit=model.config.attention.unit,
        trained_distance=model.config.trained_distance,
        count=count.numpy(),
        mean=mean.numpy(),
        spread=spread.numpy(),
    )


class _Collector:
    """Sums of one batch by distance: count, then the parts, then their squares. ``[1 + 2 parts, distance]``."""

    def __init__(self, model: HookedAdder, batch: Batch, head: int):
        self.head, self.partition = head, Partition(model, batch)
        self.scale = model.config.d_head**-0.5
        at = self.partition.at
        reach = int((at.column if model.config.attention.unit == "columns" else at.position).max())
        self.sums = torch.zeros(1 + 2 * len(PARTS), reach + 1, dtype=torch.float64)
        self.kept: dict[str, Tensor] = {}

    def keep(self, value: Tensor, hook: HookPoint) -> None:
        self.kept[str(hook.name).rsplit(".", 1)[-1]] = value[:, :, self.head].double()

    def add(self, scores: Tensor, hook: HookPoint) -> None:
        span = Span.of(hook)
        score = scores[:, self.head].double()
        content = self._product("hook_q", "hook_k", span)
        turned = self._product("hook_rot_q", "hook_rot_k", span) if "hook_rot_q" in self.kept else content
        own = span.positions == torch.arange(span.query.start, span.query.stop)[:, None]
        use = self.partition.visible(span) & ~self.partition.separator(span) & ~own
        use = use & torch.isfinite(score)
        bins = self.partition.distance(span)[use]
        parts = torch.stack([part[use] for part in (score, content, turned - content, score - turned)])
        self.sums.index_add_(1, bins, torch.cat([torch.ones_like(parts[:1]), parts, parts**2]))

    def _product(self, q: str, k: str, span: Span) -> Tensor:
        return self.scale * self.kept[q][:, span.query] @ self.kept[k][:, span.key].transpose(1, 2)
