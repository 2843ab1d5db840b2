"""A passing seed's attention in a failing seed: the one patch between two models that makes sense.

Two seeds share tokens and nothing else. Their residual streams, heads, queries and values have bases of their own, so a
state of one put into the other is noise, and what it breaks says nothing. A pattern is over the tokens that both read:
if a head of the passing seed does the same at training length, its pattern says where to look, and what is read there
is still the failing seed's own. That too makes sense only where it does no harm at training length, which is measured
and told beside the effect: a head without a counterpart is not evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.decisions import score
from interp.interventions import Edit, Head, Hook
from interp.partition import Partition
from models.addition import Batch, Problem
from models.attention import Span
from models.config import InputError
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

HARMLESS = 0.01  # share of decisions at training length that a sensible swap may break
ALIKE = 0.3  # mean total variation up to which two heads look at the same keys
_MATCHED_ON = 20  # problems at training length


class AcrossError(InputError):
    """Two models whose attention cannot be compared; says why."""


@dataclass(frozen=True)
class Swap:
    """One head of the failing seed with the pattern of its counterpart; ``head`` None: all heads that are sensible.

    ``distance``: mean total variation between the two patterns at training length, sink included, 0 to 1.
    ``trained_wrong``: share of decisions wrong at training length under the swap. ``wrong``: number of decisions wrong
    at the longer length; ``repaired`` and ``broken`` of those before.
    """

    head: Head | None
    counterpart: Head | None
    distance: float | None
    trained_wrong: float
    wrong: int
    repaired: int
    broken: int

    @property
    def sensible(self) -> bool:
        """The two look at the same keys at training length, and the swap does no harm there."""
        return self.trained_wrong <= HARMLESS and (self.distance is None or self.distance <= ALIKE)


@dataclass(frozen=True)
class Across:
    """All swaps, and, if any is sensible, one of all sensible heads together; ``wrong`` of ``decisions`` without."""

    decisions: int
    wrong: int
    swaps: tuple[Swap, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a swap."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> dict[str, Any]:
        return {"decisions": self.decisions, "wrong": self.wrong, "swaps": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "head": "all sensible" if swap.head is None else f"{swap.head[0]}.{swap.head[1]}",
                "counterpart": None if swap.counterpart is None else f"{swap.counterpart[0]}.{swap.counterpart[1]}",
                "distance": swap.distance,
                "trained_wrong": swap.trained_wrong,
                "sensible": swap.sensible,
                "wrong": swap.wrong,
                "repaired": swap.repaired,
                "broken": swap.broken,
            }
            for swap in self.swaps
        ]


@dataclass(frozen=True)
class PatternFrom(Edit):
    """Heads' patterns replaced by those of another model's heads on the same problems: ``{head: its head}``."""

    other: HookedAdder
    heads: tuple[tuple[Head, Head], ...]
    name: str = "pattern-from"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        patterns = _patterns(self.other, partition.batch)

        def replace(pattern: Tensor, hook: HookPoint) -> Tensor:
            span, out = Span.of(hook), pattern.clone()
            for (layer, head), (from_layer, from_head) in self.heads:
                if layer == hook.layer():
                    out[:, head] = patterns[from_layer][:, from_head, span.query, span.key]
            return out

        layers = sorted({layer for (layer, _), _ in self.heads})
        return [(f"blocks.{layer}.attn.hook_pattern", replace) for layer in layers]


def patch_attention(
    failing: HookedAdder,
    passing: HookedAdder,
    digits: int,
    n: int = 20,
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
) -> Across:
    """Give each head of the failing seed the pattern of the passing seed's most similar head, and then all sensible.

    Raises:
        AcrossError: the two read different tokens. ProblemError: ``digits`` or ``n`` out of range.
    """
    ours, theirs = failing.config.task, passing.config.task
    if (ours.chunk, ours.cut) != (theirs.chunk, theirs.cut):
        raise AcrossError(
            f"attention goes across only over the same tokens, got chunks of {ours.chunk} cut from the {ours.cut} and "
            f"of {theirs.chunk} cut from the {theirs.cut}; take two seeds of one recipe"
        )
    short = failing.task.evaluation_problems(ours.max_digits, _MATCHED_ON, seed)
    long = failing.task.evaluation_problems(digits, n, seed)
    distance = _distances(failing, passing, short)
    base = score(failing, long)
    trained = score(failing, short).n_wrong
    swaps: list[Swap] = []

    def swap(pairs: Sequence[tuple[Head, Head]], head: Head | None, counterpart: Head | None) -> Swap:
        edit = PatternFrom(passing, tuple(pairs))
        at_training, found = score(failing, short, [edit]), score(failing, long, [edit])
        repaired, broken = (int(x.sum()) for x in (base.wrong & ~found.wrong, found.wrong & ~base.wrong))
        apart = None if head is None or counterpart is None else float(distance[head][counterpart])
        harm = max(0, at_training.n_wrong - trained) / at_training.decisions
        return Swap(head, counterpart, apart, harm, found.n_wrong, repaired, broken)

    for layer, head in np.ndindex(failing.cfg.n_layers, failing.cfg.n_heads):
        tell(f"the passing seed's attention in head {layer}.{head}")
        nearest = np.unravel_index(int(distance[layer, head].argmin()), distance.shape[2:])
        counterpart = (int(nearest[0]), int(nearest[1]))
        swaps.append(swap([((layer, head), counterpart)], (layer, head), counterpart))
    sensible = [(s.head, s.counterpart) for s in swaps if s.sensible and s.head and s.counterpart]
    if sensible:
        swaps.append(swap(sensible, None, None))
    return Across(base.decisions, base.n_wrong, tuple(swaps))


def _patterns(model: HookedAdder, batch: Batch) -> list[Tensor]:
    """Of every layer, ``[batch, head, query, key]``."""
    with torch.no_grad(), model.evaluating():
        _, cache = model.run_with_cache(
            batch.tokens,
            batch.mask,
            names_filter=lambda name: name.endswith("hook_pattern"),
            return_cache_object=False,
        )
    return [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)]


def _distances(failing: HookedAdder, passing: HookedAdder, problems: Sequence[Problem]) -> np.ndarray:
    """Mean total variation between every two heads' patterns, ``[layer, head, layer, head]``."""
    batch = failing.task.encode(problems)
    ours, theirs = (torch.cat(_patterns(model, batch), dim=1) for model in (failing, passing))
    rows = []
    for pattern in ours.unbind(1):
        keys = (pattern[:, None] - theirs).abs().sum(-1)
        sink = (pattern[:, None].sum(-1) - theirs.sum(-1)).abs()
        rows.append(((keys + sink) / 2).movedim(1, 0)[:, batch.mask].mean(1))
    shape = [size for model in (failing, passing) for size in (model.cfg.n_layers, model.cfg.n_heads)]
    return torch.stack(rows).reshape(shape).double().numpy()
