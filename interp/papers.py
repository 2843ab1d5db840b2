"""Problems as a person writes them on paper: the sum that is right, what the model wrote, and where it looked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Head
from interp.passes import run_problems
from models.addition import Batch, Problem
from models.attention import Span
from models.transformer import HookedAdder

LOOKED_AT = 3  # keys named for each head and wrong decision


@dataclass(frozen=True)
class Look:
    """A key and the share of the attention it had. ``row`` 0, 1 and 2: first number, second number, sum."""

    token: str
    row: int
    column: int
    share: float


@dataclass(frozen=True)
class Mistake:
    """One wrong decision: its column, the right token's text and the written one's, and what heads looked at most."""

    column: int
    right: str
    written: str
    looks: dict[Head, tuple[Look, ...]]


@dataclass(frozen=True)
class Paper:
    """One problem. ``rows``: the first number, the second and the sum, as texts of their tokens, the least significant
    first; ``mistakes``: by column."""

    rows: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    mistakes: dict[int, Mistake]


def write_papers(model: HookedAdder, problems: Sequence[Problem], heads: Sequence[Head]) -> list[Paper]:
    """Each problem as written on paper, every decision given the right answer so far.

    Args:
        heads: whose attention is kept at wrong decisions, at most :data:`LOOKED_AT` keys each.
    """
    if not problems:
        return []
    kept: dict[Head, Tensor] = {}

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        """Keeps the best keys of every query: a decision is known to be wrong only after the pass."""
        kept.clear()
        shape = (*batch.tokens.shape, LOOKED_AT, 2)  # key and share

        def keep(pattern: Tensor, hook: HookPoint) -> None:
            span = Span.of(hook)
            for layer, head in heads:
                if layer != hook.layer():
                    continue
                best = pattern[:, head].topk(min(LOOKED_AT, pattern.shape[-1]), dim=-1)
                kept.setdefault((layer, head), torch.full(shape, -1.0, dtype=torch.float64))
                found = torch.stack([span.positions[best.indices].double(), best.values.double()], dim=-1)
                kept[layer, head][:, span.query, : found.shape[-2]] = found

        return [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in sorted({layer for layer, _ in heads})]

    papers: dict[int, Paper] = {}
    for step in run_problems(model, problems, extra_hooks=watch, every_key=True):
        guesses = step.logits.argmax(-1)
        for at, index in enumerate(step.indices):
            papers[index] = _paper(model, step.batch, guesses, at, kept)
    return [papers[i] for i in range(len(problems))]


def _paper(model: HookedAdder, batch: Batch, guesses: Tensor, at: int, kept: dict[Head, Tensor]) -> Paper:
    text = model.task.vocabulary.text
    tokens, row, column = batch.tokens[at], batch.row[at], batch.column[at]
    chunks = (column >= 0) & batch.mask[at] & (tokens < model.task.vocabulary.n_chunks)
    rows = [[text(int(token)) for token in tokens[chunks & (row == number)]] for number in range(3)]
    mistakes = {}
    for query in (batch.decisions[at] & (guesses[at] != batch.targets[at])).nonzero()[:, 0].tolist():
        looks = {head: _looks(model, batch, at, best[at, query]) for head, best in kept.items()}
        where = int(batch.decision_column[at, query])
        mistakes[where] = Mistake(where, text(int(batch.targets[at, query])), text(int(guesses[at, query])), looks)
    return Paper((tuple(rows[0]), tuple(rows[1]), tuple(rows[2])), mistakes)


def _looks(model: HookedAdder, batch: Batch, at: int, best: Tensor) -> tuple[Look, ...]:
    looks = []
    for key, share in best.tolist():
        if key >= 0 and share > 0:
            position = int(key)
            token = model.task.vocabulary.text(int(batch.tokens[at, position]))
            looks.append(Look(token, int(batch.row[at, position]), int(batch.column[at, position]), share))
    return tuple(looks)
