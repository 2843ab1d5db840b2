"""Ablation of heads: nothing in their place, or what they write elsewhere.

Zero ablation asks what happens without a head, and leaves the layers above with an input that they never saw. Mean and
resample ablation put in what the head writes elsewhere (Wang et al. 2211.00593; Chan et al. 2022, causal scrubbing), so
that only what it says about *this* query is lost. The reference here is the head's outputs at queries of the same
**site** in other problems: decisions by their state, ends of sums, b's chunks by whether the first number has ended,
chunks of a, ``+``. A head that writes the same at a site whatever the digits is thus broken by zero ablation alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.decisions import score
from interp.interventions import Edit, Head, Hook
from interp.partition import Partition
from interp.passes import run_problems
from models.addition import STATES, Batch, Problem, generator, handmade_problems
from models.config import InputError
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Method = Literal["zero", "mean", "resample"]
METHODS: tuple[Method, ...] = ("zero", "mean", "resample")
SITES = (*STATES, "eos", "second with first", "second alone", "first", "plus")
Tell = Callable[[str], None]


class AblationError(InputError):
    """An ablation that cannot be made; says why and what to do."""


def sites(batch: Batch) -> Int[Tensor, "batch pos"]:
    """Index into :data:`SITES` of every query, -1 at padding and at the end of the sum."""
    found = torch.where(batch.eos, len(STATES), batch.state)
    number = batch.column >= 0
    second = (batch.row == 1) & number
    with_first = batch.lookups["first_from_second"].present
    found = torch.where(second, torch.where(with_first, len(STATES) + 1, len(STATES) + 2), found)
    found = torch.where(batch.mask & (batch.row == 0), len(STATES) + 3, found)
    return torch.where((batch.row == 1) & ~number & batch.mask, len(STATES) + 4, found)


@dataclass(frozen=True)
class Reference:
    """Outputs of all heads at every query of some problems.

    ``z``: ``[layer, query, head, d_head]``, sorted by site. ``start``: ``[site + 1]``, where each site's queries begin.
    """

    z: Float[Tensor, "layer query head d_head"]
    start: Int[Tensor, "site_and_end"]

    @property
    def number(self) -> Int[Tensor, "site"]:
        return self.start.diff()

    @cached_property
    def mean(self) -> Float[Tensor, "layer site head d_head"]:
        """By site; 0 where the reference has no such query."""
        ranges = pairwise(self.start.tolist())
        parts = [self.z[:, a:b].mean(1) if b > a else torch.zeros_like(self.z[:, 0]) for a, b in ranges]
        return torch.stack(parts, dim=1)


def reference(model: HookedAdder, problems: Sequence[Problem]) -> Reference:
    """The reference that these problems give. Raises ProblemError: there is no problem."""
    kept: list[dict[int, Tensor]] = []

    def watch(batch: Batch) -> list[Hook]:
        kept.append({})

        def keep(z: Tensor, hook: HookPoint) -> None:
            kept[-1][hook.layer()] = z

        return [(f"blocks.{layer}.attn.hook_z", keep) for layer in range(model.cfg.n_layers)]

    outputs, labels = [], []
    for step in run_problems(model, problems, extra_hooks=watch):
        at = sites(step.batch)
        z = kept.pop()
        outputs.append(torch.stack([z[layer][at >= 0] for layer in range(model.cfg.n_layers)]))
        labels.append(at[at >= 0])
    label, order = torch.cat(labels).sort(stable=True)
    counts = torch.bincount(label, minlength=len(SITES))
    start = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    return Reference(torch.cat(outputs, dim=1)[:, order], start)


@dataclass(frozen=True)
class ReplaceOutput(Edit):
    """One head's output replaced at every query: by 0, or by the mean or a random draw of the reference's same site.

    Draws depend on ``seed``, the problem's tokens and the query alone.
    """

    head: Head
    method: Method
    reference: Reference = field(repr=False)
    seed: int = 0
    every_key = False

    @property
    def name(self) -> str:
        return f"{self.method}-ablation={self.head[0]}.{self.head[1]}"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        """Raises AblationError if the reference has no query of a site that the batch has."""
        layer, head = self.head
        at = sites(partition.batch)
        missing = [SITES[i] for i in at[at >= 0].unique().tolist() if not self.reference.number[i]]
        if missing and self.method != "zero":
            raise AblationError(
                f"the reference has no query of the site {missing[0]!r}; give it more problems, of more lengths"
            )

        def replace(z: Tensor, hook: HookPoint) -> Tensor:
            new = torch.zeros_like(z[:, :, head])
            if self.method == "mean":
                new = self.reference.mean[layer, at.clamp(min=0), head]
            elif self.method == "resample":
                drawn = self.reference.start[at.clamp(min=0)] + self._draws(partition.batch, at)
                new = self.reference.z[layer, drawn, head]
            out = z.clone()
            out[:, :, head] = torch.where((at >= 0)[..., None], new.to(z.dtype), z[:, :, head])
            return out

        return [(f"blocks.{layer}.attn.hook_z", replace)]

    def _draws(self, batch: Batch, at: Tensor) -> Int[Tensor, "batch pos"]:
        """Which query of its site each query gets."""
        draws = np.zeros(at.shape)
        for i, tokens in enumerate(batch.tokens):
            own = tokens[batch.mask[i]].numpy()
            rng = generator(self.seed, f"resample {zlib.crc32(own.tobytes())}", self.head[0] * 1000 + self.head[1])
            draws[i, : len(own)] = rng.random(len(own))
        return (torch.from_numpy(draws) * self.reference.number[at.clamp(min=0)]).long()


@dataclass(frozen=True)
class Ablations:
    """Every head ablated by itself. Arrays are ``[method, layer, head]``, methods in the order of :data:`METHODS`.

    ``wrong``: wrong decisions, of ``decisions``; ``wrong_before``: without an ablation. ``margin``: the mean margin in
    logits, right token less the best other; ``margin_before``: without an ablation. ``reference``: queries a site.
    """

    decisions: int
    wrong_before: int
    margin_before: float
    wrong: np.ndarray
    margin: np.ndarray
    reference: dict[str, int]

    def to_frame(self) -> pd.DataFrame:
        """One row a method and head: method, layer, head, wrong, margin."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> dict[str, Any]:
        about = {"decisions": self.decisions, "wrong": self.wrong_before, "margin": self.margin_before}
        return {**about, "reference": self.reference, "heads": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "method": METHODS[i],
                "layer": layer,
                "head": head,
                "wrong": int(self.wrong[i, layer, head]),
                "margin": float(self.margin[i, layer, head]),
            }
            for i, layer, head in np.ndindex(*self.wrong.shape)
        ]

    def plot(self) -> go.Figure:
        """The share of decisions wrong without each head, by method; a line at what is wrong with all heads."""
        import plotly.graph_objects as go

        from interp.plots import BLUE, GREEN, GREY, LIGHT, VERMILLION

        _, layers, heads = self.wrong.shape
        named = [f"{layer}.{head}" for layer, head in np.ndindex(layers, heads)]
        figure = go.Figure()
        for i, colour in enumerate((VERMILLION, BLUE, GREEN)):
            share = self.wrong[i].ravel() / self.decisions
            figure.add_bar(x=named, y=share, name=METHODS[i], marker_color=colour)
        figure.add_hline(self.wrong_before / self.decisions, line_color=GREY, line_dash="dot")
        figure.update_xaxes(title="head ablated", type="category")
        figure.update_yaxes(title="decisions wrong (share)", rangemode="tozero")
        return figure.update_layout(template=LIGHT, barmode="group", height=360)


def ablate_heads(
    model: HookedAdder, digits: int, n: int = 20, *, seed: int = 0, tell: Tell = lambda what: None
) -> Ablations:
    """Ablate every head, three ways, on problems of ``digits`` digits; the reference is as many others of that length.

    Where those lack a site, hand-made problems join them.

    Raises:
        AblationError: a site occurs that the reference has not. ProblemError: ``digits`` or ``n`` out of range.
    """
    drawn = model.task.evaluation_problems(digits, 2 * n, seed)
    problems, others = drawn[:n], drawn[n:]
    known = reference(model, others)
    if not known.number.all():  # a rare site, as a carry past both numbers
        known = reference(model, [*others, *handmade_problems(digits)])
    base = score(model, problems)
    shape = (len(METHODS), model.cfg.n_layers, model.cfg.n_heads)
    wrong, margin = np.zeros(shape, dtype=int), np.zeros(shape)
    for i, layer, head in np.ndindex(*shape):
        tell(f"{METHODS[i]} ablation of head {layer}.{head}")
        found = score(model, problems, [ReplaceOutput((layer, head), METHODS[i], known, seed)])
        wrong[i, layer, head], margin[i, layer, head] = found.n_wrong, float(found.margin.mean())
    number = {name: int(count) for name, count in zip(SITES, known.number, strict=True)}
    return Ablations(base.decisions, base.n_wrong, float(base.margin.mean()), wrong, margin, number)
