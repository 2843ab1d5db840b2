"""Activation patching on pairs of runs: what carries the difference between them, by layer, head, role and lookup.

A state of the clean run is put into the corrupt run, and what of the clean margin comes back is the **recovered
fraction**, over the pairs,

``sum (patched - corrupt) / sum (clean - corrupt)``

(Meng et al. 2202.05262; Wang et al. 2211.00593; a ratio of sums, so that a pair whose runs hardly differ weighs
little). 0 is no effect, 1 the whole difference; effects of several patches need not add up. TransformerLens's
``generic_activation_patch`` does the patching. Pairs come from :mod:`interp.pairs`, positions go by their role there,
so that problems of any lengths share a batch.

Five sweeps: the residual stream before each layer, and each MLP's output, by role; each head's output (``z``) at all
tokens, by role, and by lookup. The last puts in only what the head reads from the lookup's target, its ``pattern * v``,
at every query that performs the lookup; ``rest`` is what it reads from keys that are no target of the query.

Between two seeds such a patch makes no sense: their residual streams, heads and values have no basis in common, so a
state of one is noise to the other. What both express over the same tokens is where a head looks, and
:mod:`interp.across` carries that over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens import patching as lens_patching

from interp.pairs import ROLES, PairError, Pairs
from interp.partition import Partition
from models.addition import LOOKUPS, Batch, generator
from models.attention import Span
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

READS = (*LOOKUPS, "rest")
SWEEPS = {
    "residual": ("layer", "role"),
    "mlp": ("layer", "role"),
    "head": ("layer", "head"),
    "head_role": ("layer", "head", "role"),
    "lookup": ("layer", "head", "lookup"),
}
LEAST_MARGIN = 0.5  # logits between the runs, in the mean, below which there is nothing to recover
RESAMPLES = 1000
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Patching:
    """Margins, in logits, of every pair under every patch.

    ``clean``, ``corrupt``: ``[pair]``, of the two runs. ``residual`` and ``mlp``: ``[layer, role, pair]``. ``head``:
    ``[layer, head, pair]``. ``head_role``: ``[layer, head, role, pair]``. ``lookup``: ``[layer, head, lookup, pair]``.
    Roles in the order of ``interp.pairs.ROLES``, lookups of :data:`READS`.
    """

    kind: str
    digits: int
    seed: int
    clean: np.ndarray
    corrupt: np.ndarray
    residual: np.ndarray
    mlp: np.ndarray
    head: np.ndarray
    head_role: np.ndarray
    lookup: np.ndarray

    def recovered(self, sweep: str) -> np.ndarray:
        """The recovered fraction of one of :data:`SWEEPS`, its array without the last axis."""
        return recovered(getattr(self, sweep), self.clean, self.corrupt)

    def interval(self, sweep: str) -> tuple[np.ndarray, np.ndarray]:
        """95% interval of :meth:`recovered`: percentile bootstrap over pairs."""
        n = len(self.clean)
        drawn = generator(self.seed, "patching bootstrap", 0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
        effect = (getattr(self, sweep) - self.corrupt) @ drawn.T / ((self.clean - self.corrupt) @ drawn.T)
        low, high = np.quantile(effect, [0.025, 0.975], axis=-1)
        return low, high

    def to_frame(self) -> pd.DataFrame:
        """One row a patch: sweep, layer, head, role, lookup (None where it has none), recovered, low, high."""
        import pandas as pd

        return pd.DataFrame(self._rows()).astype({"head": "Int64"})

    def to_json(self) -> dict[str, Any]:
        """Means of the two runs, and the rows of :meth:`to_frame`."""
        return {
            "pairs": {"kind": self.kind, "digits": self.digits, "n": len(self.clean), "seed": self.seed},
            "clean_margin": float(self.clean.mean()),
            "corrupt_margin": float(self.corrupt.mean()),
            "patches": self._rows(),
        }

    def _rows(self) -> list[dict[str, Any]]:
        names = {"role": ROLES, "lookup": READS}
        rows: list[dict[str, Any]] = []
        for sweep, axes in SWEEPS.items():
            found, (low, high) = self.recovered(sweep), self.interval(sweep)
            for index in np.ndindex(found.shape):
                where = {axis: names[axis][i] if axis in names else i for axis, i in zip(axes, index, strict=True)}
                about = {axis: where.get(axis) for axis in ("layer", "head", "role", "lookup")}
                numbers = {"recovered": found[index], "low": low[index], "high": high[index]}
                rows.append({"sweep": sweep, **about, **{key: float(value) for key, value in numbers.items()}})
        return rows

    def plot(self) -> go.Figure:
        """Recovered fraction as heat maps: residual stream and MLPs by role, heads by role and by lookup."""
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots

        from interp.plots import BLUE, LIGHT, VERMILLION

        layers, heads = self.head.shape[:2]
        named = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
        panels = [
            ("Residual stream before layer", self.recovered("residual"), ROLES, list(map(str, range(layers)))),
            ("MLP of layer", self.recovered("mlp"), ROLES, list(map(str, range(layers)))),
            ("Head, by role", self.recovered("head_role").reshape(layers * heads, -1), ROLES, named),
            ("Head, by lookup", self.recovered("lookup").reshape(layers * heads, -1), READS, named),
        ]
        titles = [title for title, *_ in panels]
        share = layers / (layers + layers * heads)
        figure = make_subplots(
            rows=2, cols=2, subplot_titles=titles, row_heights=[max(0.2, share), 1 - max(0.2, share)]
        )
        for i, (_, values, columns, rows) in enumerate(panels):
            words = [name.replace("_", " ") for name in columns]
            heat = go.Heatmap(
                x=words,
                y=rows,
                z=values,
                coloraxis="coloraxis",
                hovertemplate="%{y}, %{x}: %{z:.2f} recovered<extra></extra>",
            )
            figure.add_trace(heat, row=i // 2 + 1, col=i % 2 + 1)
        scale = [[0, VERMILLION], [0.5, "#f2f2f2"], [1, BLUE]]
        figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
        figure.update_xaxes(showgrid=False, tickangle=-40)
        return figure.update_layout(
            template=LIGHT,
            height=340 + 22 * layers * heads,
            coloraxis={"colorscale": scale, "cmin": -1, "cmax": 1, "colorbar": {"title": {"text": "recovered"}}},
        )


def recovered(patched: np.ndarray, clean: np.ndarray, corrupt: np.ndarray) -> np.ndarray:
    """``sum (patched - corrupt) / sum (clean - corrupt)`` over the last axis, the pairs."""
    return np.asarray((patched - corrupt).sum(-1) / (clean - corrupt).sum())


def patch(model: HookedAdder, pairs: Pairs, *, tell: Tell = lambda what: None) -> Patching:
    """All sweeps on pairs of runs (:func:`interp.pairs.build_pairs`).

    Raises:
        PairError: the two runs' margins differ by less than :data:`LEAST_MARGIN`.
    """
    with torch.no_grad(), model.evaluating():
        runs = Runs(model, pairs)
        check_margin(runs)
        found = {sweep: runs.sweep(sweep, tell) for sweep in SWEEPS}
    return Patching(pairs.kind, pairs.digits, pairs.seed, runs.clean_margin, runs.corrupt_margin, **found)


def check_margin(runs: Runs) -> None:
    """Raises PairError if the two runs' margins differ by less than :data:`LEAST_MARGIN`."""
    apart = float((runs.clean_margin - runs.corrupt_margin).mean())
    if not apart >= LEAST_MARGIN:
        raise PairError(
            f"the clean runs' margin exceeds the corrupt runs' by {apart:.3g} logits in the mean, and at least "
            f"{LEAST_MARGIN} is needed to speak of its recovery; take another kind of pairs, or length pairs of "
            "failing decisions"
        )


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without TransformerLens's progress bar, which has no switch, and in notebooks is a display of its own."""
    bar = lens_patching.tqdm
    lens_patching.tqdm = lambda rows: rows
    try:
        yield
    finally:
        lens_patching.tqdm = bar


class Runs:
    """Both runs of the pairs, and what a patch takes from the clean one, aligned to the corrupt one's tokens."""

    def __init__(self, model: HookedAdder, pairs: Pairs):
        self.model, self.pairs = model, pairs
        residual = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
        names = (*residual, "hook_mlp_out", "attn.hook_z", "attn.hook_v", "attn.hook_pattern")

        def wanted(name: str) -> bool:
            return name.endswith(names)

        self.logits, self.caches = {}, {}
        for side, batch in (("clean", pairs.clean), ("corrupt", pairs.corrupt)):
            logits, cache = model.run_with_cache(
                batch.tokens, batch.mask, names_filter=wanted, return_cache_object=False
            )
            self.logits[side], self.caches[side] = logits, cache
        self.clean_margin = pairs.margin(pairs.clean, self.logits["clean"]).double().numpy()
        self.corrupt_margin = pairs.margin(pairs.corrupt, self.logits["corrupt"]).double().numpy()
        self.where = pairs.roles & (pairs.source >= 0)  # [role, pair, pos]

    def sweep(self, sweep: str, tell: Tell) -> np.ndarray:
        """The margins of one sweep, in its shape and ``[pair]``."""
        layers, heads = self.model.cfg.n_layers, self.model.cfg.n_heads
        sizes = {"layer": layers, "head": heads, "role": len(ROLES), "lookup": len(READS)}
        shape = tuple(sizes[axis] for axis in SWEEPS[sweep])
        tell(f"patching: {sweep.replace('_', ' ')}, {int(np.prod(shape))} patches")
        if sweep == "residual":
            return self.run("resid_pre", self._aligned("hook_resid_pre"), self._by_role, shape)
        if sweep == "mlp":
            return self.run("mlp_out", self._aligned("hook_mlp_out"), self._by_role, shape)
        if sweep == "lookup":
            return self.run("z", self._reads(), self._read, shape)
        setter = self._head if sweep == "head" else self._head_by_role
        return self.run("z", self._aligned("attn.hook_z"), setter, shape)

    def run(
        self, point: str, values: dict[str, Tensor], setter: Callable[..., Tensor], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Patch every index of a shape, by TransformerLens; margins ``[*shape, pair]``."""
        import pandas as pd

        cells = pd.DataFrame(list(np.ndindex(*shape)), columns=[f"axis{i}" for i in range(len(shape))])
        with _no_bar():
            found = lens_patching.generic_activation_patch(
                self.model,
                self.pairs.corrupt.tokens,
                ActivationCache(values, self.model),
                lambda logits: self.pairs.margin(self.pairs.corrupt, logits),
                setter,
                point,
                index_df=cells,
                reduce="none",
            )
        return found.values.double().numpy().reshape(*shape, len(self.pairs))

    def _aligned(self, name: str) -> dict[str, Tensor]:
        names = [f"blocks.{layer}.{name}" for layer in range(self.model.cfg.n_layers)]
        return {name: self.pairs.aligned(self.caches["clean"][name]) for name in names}

    def _by_role(self, corrupt: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
        _, role = index
        return torch.where(self.where[role][..., None], clean, corrupt)

    def _head(self, corrupt: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
        _, head = index
        corrupt[:, :, head] = torch.where((self.pairs.source >= 0)[..., None], clean[:, :, head], corrupt[:, :, head])
        return corrupt

    def _head_by_role(self, corrupt: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
        _, head, role = index
        corrupt[:, :, head] = torch.where(self.where[role][..., None], clean[:, :, head], corrupt[:, :, head])
        return corrupt

    def _reads(self) -> dict[str, Tensor]:
        """Clean less corrupt part of z that is read from each lookup's targets, ``[pair, pos, head, d_head, lookup]``.

        0 at the corrupt run's tokens that have no counterpart.
        """
        pairs, parts = self.pairs, {}
        for side, batch in (("clean", pairs.clean), ("corrupt", pairs.corrupt)):
            parts[side] = read_parts(self.model, batch, self.caches[side])
        there = (pairs.source >= 0)[..., None, None, None]
        return {
            name: torch.where(there, pairs.aligned(parts["clean"][name]) - corrupt, 0.0)
            for name, corrupt in parts["corrupt"].items()
        }

    @staticmethod
    def _read(corrupt: Tensor, index: Sequence[int], difference: Tensor) -> Tensor:
        _, head, lookup = index
        corrupt[:, :, head] += difference[:, :, head, :, lookup]
        return corrupt


def read_parts(
    model: HookedAdder, batch: Batch, cache: dict[str, Tensor]
) -> dict[str, Float[Tensor, "batch pos head d_head read"]]:
    """What each head's ``z`` reads from each lookup's target keys, and from all others, by the name of ``hook_z``.

    A key that is the target of several lookups counts in each; ``rest`` is what is read from keys that are none's.
    """
    span = Span(slice(0, batch.tokens.shape[1]), slice(0, batch.tokens.shape[1]))
    partition = Partition(model, batch)
    sets = [partition.target_set(name, span) for name in LOOKUPS]
    masks = torch.stack([*sets, ~partition.targets(span)], dim=-1)
    found = {}
    for layer in range(model.cfg.n_layers):
        prefix = f"blocks.{layer}.attn.hook_"
        parts = [
            einsum(
                cache[prefix + "pattern"] * masks[..., i][:, None],
                cache[prefix + "v"],
                "batch head query key, batch key head d_head -> batch query head d_head",
            )
            for i in range(len(READS))
        ]
        found[prefix + "z"] = torch.stack(parts, dim=-1)
    return found
