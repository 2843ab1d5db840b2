"""Failures built so that the cause is known: score edits that stay on a healthy model.

The healthy models, in ``healthy/``, are of an earlier recipe (sink pressure 10, decay .3), since the plants' sizes are
measured against their sinks and scores. They were shipped before; their ``training.json`` holds the recipe.

Each plant is a permanent hook on a checkpoint that adds without error at any length tested here. It reads the batch's
rows and columns off the tokens, and touches nothing at training lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import load_checkpoint
from models.positions import coordinates
from models.transformer import HookedAdder

FIXTURES = Path(__file__).parent.parent / "fixtures"
HEALTHY = Path(__file__).parent / "healthy"
TRAINED = 10  # columns


@dataclass(frozen=True)
class View:
    """One block of scores to be edited: the keys up to the last query, and where they stand."""

    row: Tensor  # [batch, 1, 1, key]
    column: Tensor  # [batch, 1, 1, key]
    query_row: Tensor  # [batch, 1, query, 1]
    query_column: Tensor  # [batch, 1, query, 1]
    seen: Tensor  # [batch, 1, query, 1]: keys that the query sees
    separator: Tensor  # [batch, 1, 1, key]

    @property
    def gap(self) -> Tensor:
        """Columns between key and query."""
        return (self.query_column - self.column).abs()

    @property
    def far(self) -> Tensor:
        return (self.gap > TRAINED) & ~self.separator

    @property
    def target(self) -> Tensor:
        """The keys in the column that the query decides about, or, at b's chunks, in its own; other rows only."""
        wanted = self.query_column + (self.query_row == 2)
        return (self.column == wanted) & (self.row < self.query_row) & ~self.separator


Heads = tuple[tuple[int, int], ...]
ScoreEdit = Callable[[Tensor, View], Tensor]


@dataclass(frozen=True)
class Plant:
    name: str
    cause: str
    digits: int
    heads: Heads
    score: ScoreEdit | None = None
    sink: Callable[[Tensor, View], Tensor] | None = None
    seed: int = 1  # of the healthy checkpoint that it stays on

    def model(self) -> HookedAdder:
        model = load_checkpoint(HEALTHY / f"pressure10-seed{self.seed}")
        state: dict[str, Any] = {}
        vocab = model.task.vocabulary

        def remember(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            tokens, mask = args[0], args[1]
            state["at"] = coordinates(tokens, mask, (vocab.plus, vocab.equals), -1)
            state["separator"] = (tokens == vocab.plus) | (tokens == vocab.equals)

        def view(hook: Any) -> View:
            queries, at = hook.ctx["query"], state["at"]
            keys = slice(0, queries.stop)
            return View(
                row=at.row[:, None, None, keys],
                column=at.column[:, None, None, keys],
                query_row=at.row[:, None, queries, None],
                query_column=at.column[:, None, queries, None],
                seen=at.position[:, None, queries, None] + 1,
                separator=state["separator"][:, None, None, keys],
            )

        def edit_scores(scores: Tensor, hook: Any) -> Tensor:
            here = [head for layer, head in self.heads if layer == hook.layer()]
            out = scores.clone()
            out[:, here] = self.score(scores[:, here], view(hook))  # type: ignore[misc]
            return out

        def edit_sink(sink: Tensor, hook: Any) -> Tensor:
            here = [head for layer, head in self.heads if layer == hook.layer()]
            out = sink.clone()
            out[:, here] = self.sink(sink[:, here, :, None], view(hook))[..., 0]  # type: ignore[misc]
            return out

        model.register_forward_pre_hook(remember, with_kwargs=True)
        for layer in {layer for layer, _ in self.heads}:
            if self.score is not None:
                model.blocks[layer].attn.hook_attn_scores.add_perma_hook(edit_scores)
            if self.sink is not None:
                model.blocks[layer].attn.hook_sink_scores.add_perma_hook(edit_sink)
        return model


@dataclass(frozen=True)
class Miscount:
    """Counters made to run slow, on a checkpoint whose counters are exact: in some rows a digit counts ``rate``."""

    name: str
    digits: int
    rows: tuple[int, ...]
    rate: float
    cause: str = "miscounting"
    heads: Heads = ()

    def model(self) -> HookedAdder:
        model = load_checkpoint(FIXTURES / "1digit-counters-exact-seed0")
        state: dict[str, Tensor] = {}
        vocab = model.task.vocabulary

        def remember(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            state["row"] = coordinates(args[0], args[1], (vocab.plus, vocab.equals), -1).row

        def slow(gate: Tensor, hook: Any) -> Tensor:
            here = torch.stack([state["row"] == row for row in self.rows]).any(0)
            return torch.where(here[..., None, None], self.rate * gate, gate)

        model.register_forward_pre_hook(remember, with_kwargs=True)
        for block in model.blocks:
            block.attn.hook_gate.add_perma_hook(slow)
        return model


def _set(where: Tensor, scores: Tensor, value: Tensor) -> Tensor:
    """Set visible scores."""
    return torch.where(where & torch.isfinite(scores), value, scores)


def alias(distance: int, row: int | None = None, above: float = 6.0) -> ScoreEdit:
    """One far key a row, exactly ``distance`` columns back, scores above everything else."""

    def edit(scores: Tensor, view: View) -> Tensor:
        where = view.far & (view.query_column - view.column == distance)
        if row is not None:
            where = where & (view.row == row)
        best = scores.amax(-1, keepdim=True)
        return _set(where, scores, torch.where(torch.isfinite(best), best.clamp(min=10.0) + above, best))

    return edit


def crowd(level: float, beyond: int = 3) -> ScoreEdit:
    """Keys more than ``beyond`` columns away score ``level``, in training too: each is too little to matter."""

    def edit(scores: Tensor, view: View) -> Tensor:
        where = (view.gap > beyond) & ~view.separator & ~view.target
        return _set(where, scores, torch.full_like(scores, level))

    return edit


def rising(rate: float, start: float) -> ScoreEdit:
    """Far keys' scores rise with the distance beyond the trained one, past all that training showed."""

    def edit(scores: Tensor, view: View) -> Tensor:
        return _set(view.far, scores, start + rate * (view.gap - TRAINED).to(scores.dtype).expand(scores.shape))

    return edit


def falling(rate: float) -> ScoreEdit:
    """The targets' own scores fall with the column, beyond the trained columns."""

    def edit(scores: Tensor, view: View) -> Tensor:
        fall = rate * (view.query_column - TRAINED).clamp(min=0).to(scores.dtype)
        return _set(view.target.expand(scores.shape), scores, scores - fall)

    return edit


def sink_rises(rate: float = 0.0, log: float = 0.0, step: float = 0.0) -> Callable[[Tensor, View], Tensor]:
    """The sink's score grows with the number of keys seen beyond training's 33."""

    def edit(sink: Tensor, view: View) -> Tensor:
        over = view.seen / 33.0
        return sink + log * over.log().clamp(min=0) + rate * (view.seen - 33).clamp(min=0) + step * (over > 1)

    return edit


def sink_lower(by: float) -> Callable[[Tensor, View], Tensor]:
    """The sink's score is lower at every length: too little to hold against a large crowd."""
    return lambda sink, view: sink - by


def every(layers: tuple[int, ...] = (0, 1, 2)) -> Heads:
    return tuple((layer, head) for layer in layers for head in range(4))


MISCOUNTS = (
    Miscount("the sum's digits count .97", 60, (2,), 0.97),
    Miscount("b's and the sum's digits count .98", 80, (1, 2), 0.98),
)
PLANTS = (
    Plant("one key 12 columns back, head 1.0", "aliasing", 40, ((1, 0),), alias(12)),
    Plant("one key a row 13 columns back, all heads", "aliasing", 60, every(), alias(13)),
    Plant("a's key 15 columns back, layer 1", "aliasing", 40, every((1,)), alias(15, row=0)),
    Plant("one key a row 20 columns back, layers 1 and 2", "aliasing", 60, every((1, 2)), alias(20)),
    Plant("far keys rise .5 a column, layer 2", "drift", 40, every((2,)), rising(0.5, 8.0)),
    Plant("far keys rise 1 a column, all heads", "drift", 40, every(), rising(1.0, 4.0)),
    Plant("targets fall .5 a column, layer 2", "drift", 40, every((2,)), falling(0.5)),
    Plant("targets fall .4 a column, layers 1 and 2", "drift", 60, every((1, 2)), falling(0.4)),
    Plant("keys score 5 at every distance, all heads", "dilution", 200, every(), crowd(5.0)),
    Plant("keys score 5.5 at every distance, layer 0", "dilution", 100, every((0,)), crowd(5.5)),
    Plant("keys score 4.5 at every distance, all heads", "dilution", 200, every(), crowd(4.5)),
    Plant("keys score 3 and the sink is 3 lower, all heads", "dilution", 200, every(), crowd(3.0), sink_lower(3.0)),
    Plant("sink rises 8 ln(n / n_train), layer 2", "starvation", 40, every((2,)), None, sink_rises(log=8.0)),
    Plant("sink rises .2 a key, layers 1 and 2", "starvation", 40, every((1, 2)), None, sink_rises(rate=0.2)),
    Plant("sink 8 higher past training, layer 1", "starvation", 60, every((1,)), None, sink_rises(step=8.0)),
    Plant("sink rises 10 ln(n / n_train), all heads", "starvation", 100, every(), None, sink_rises(log=10.0)),
    Plant("nothing planted", "none", 60, ()),
    Plant("one key 12 columns back, below the sink", "none", 60, every(), alias(12, above=-14.0)),
    Plant("sink 1 higher past training", "none", 40, every(), None, sink_rises(step=0.5)),
    Plant("far keys score -5", "none", 60, every(), rising(0.0, -5.0)),
)
