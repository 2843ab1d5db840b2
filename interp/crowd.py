"""What the crowd writes: the far keys' part of a head's output, and what it does to the right token's margin.

Removing far keys and zeroing their weights differ. Removing asks whether the target lost its *share* to the crowd;
zeroing, whether the crowd *wrote* something harmful. Here the second is measured without an intervention: a head's
output is the sum over keys of ``pattern * v W_O``, and the far keys' part of that sum is a vector whose direct effect
on the logits can be read off, as in direct logit attribution (Elhage et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import einsum
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Edit
from interp.partition import Partition
from interp.passes import run_problems
from models.addition import Batch, Problem
from models.attention import Span
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CrowdOutput:
    """Per head, means over decisions; all ``[layer, head]``.

    ``norm``: length of what far keys write. ``output_norm``: of the head's whole output. ``margin``: direct effect of
    the far part on the margin, in logits: right token minus the best other (negative hurts).
    """

    norm: np.ndarray
    output_norm: np.ndarray
    margin: np.ndarray

    def to_frame(self) -> pd.DataFrame:
        """One row a head."""
        import pandas as pd

        layer, head = np.indices(self.norm.shape)
        columns: dict[str, np.ndarray] = {
            "layer": np.asarray(layer),
            "head": np.asarray(head),
            "norm": self.norm,
            "output_norm": self.output_norm,
            "margin": self.margin,
        }
        return pd.DataFrame({name: np.ravel(values) for name, values in columns.items()})


def crowd_output(model: HookedAdder, problems: Sequence[Problem], interventions: Sequence[Edit] = ()) -> CrowdOutput:
    """Measure what far keys write at decisions, per head."""
    writers: list[_Writer] = []

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        writers.append(_Writer(model, batch))
        return writers[-1].hooks()

    totals = np.zeros((3, model.cfg.n_layers, model.cfg.n_heads))
    decisions = 0
    for step in run_problems(model, problems, interventions, watch, every_key=True):
        totals += writers.pop().totals(step.logits)
        decisions += int(step.batch.decisions.sum())
    return CrowdOutput(*(totals / decisions))


class _Writer:
    """Keeps, for one batch, the far part of each head's ``z`` and the whole of it, at decisions."""

    def __init__(self, model: HookedAdder, batch: Batch):
        self.model, self.batch = model, batch
        self.partition = Partition(model, batch)
        layers = range(model.cfg.n_layers)
        self.values: dict[int, Tensor] = {}
        self.far: list[list[Tensor]] = [[] for _ in layers]
        self.whole: dict[int, Tensor] = {}
        self.scale: Tensor | None = None

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        hooks: list[tuple[str, Callable[..., Any]]] = [("ln_final.hook_scale", self._keep_scale)]
        for layer in range(self.model.cfg.n_layers):
            prefix = f"blocks.{layer}.attn."
            hooks += [(prefix + "hook_v", self._keep_v), (prefix + "hook_pattern", self._add_far)]
            hooks += [(prefix + "hook_z", self._keep_z)]
        return hooks

    def _keep_v(self, v: Tensor, hook: HookPoint) -> None:
        self.values[hook.layer()] = v

    def _add_far(self, pattern: Tensor, hook: HookPoint) -> None:
        span = Span.of(hook)
        far = pattern * self.partition.far(span)[:, None]
        v = self.values[hook.layer()][:, span.key]
        part = einsum(far, v, "batch head query key, batch key head d_head -> batch query head d_head")
        self.far[hook.layer()].append(part)

    def _keep_z(self, z: Tensor, hook: HookPoint) -> None:
        self.whole[hook.layer()] = z

    def _keep_scale(self, scale: Tensor, hook: HookPoint) -> None:
        self.scale = scale

    def totals(self, logits: Tensor) -> np.ndarray:
        """Sums over decisions of norm, output norm and margin effect, ``[3, layer, head]``."""
        asked = self.batch.decisions
        right = self.batch.targets[asked][:, None]
        rival = logits[asked].scatter(1, right, -torch.inf).argmax(1)
        assert self.scale is not None
        direction = (self.model.W_U.T[right[:, 0]] - self.model.W_U.T[rival]) / self.scale[asked]
        rows = []
        for layer in range(self.model.cfg.n_layers):
            W_O = self.model.blocks[layer].attn.W_O
            far, whole = (
                einsum(z[asked], W_O, "query head d_head, head d_head d_model -> query head d_model")
                for z in (torch.cat(self.far[layer], dim=1), self.whole[layer])
            )
            effect = einsum(far, direction, "query head d_model, query d_model -> head")
            rows.append(torch.stack([far.norm(dim=-1).sum(0), whole.norm(dim=-1).sum(0), effect]))
        return torch.stack(rows, dim=1).detach().double().numpy()
