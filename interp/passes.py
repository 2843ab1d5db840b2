"""One pass of a model over many problems: what every analysis shares.

Problems are sorted by length, so that little is padded, and run in batches whose size comes from a fixed ladder.
Results come back in the order of the problems and depend on the batch and block by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from interp.interventions import Edit, hooks_for
from models.addition import Batch, Problem, ProblemError
from models.transformer import HookedAdder

Progress = Callable[[int], None]


def after(progress: Progress, done: int) -> Progress:
    """``progress`` for a part of some work, when ``done`` were done before it."""
    return lambda more: progress(done + more)


_SCORE_BYTES = 3 * 2**19  # a block of scores that stays in a core's cache; larger ones are several times slower
_BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_BLOCK = 64  # queries


@dataclass(frozen=True)
class Plan:
    """Problems a batch, and queries a block (None: all at once)."""

    batch: int
    query_block: int | None


def plan_for(model: HookedAdder, problems: Sequence[Problem]) -> Plan:
    """The largest batch of the ladder whose block of scores stays in the cache.

    Raises:
        ProblemError: there is no problem.
    """
    if not problems:
        raise ProblemError("there is no problem to run; give at least one")
    tokens = model.task.encode([max(problems, key=_size)]).tokens.shape[1]
    block = _BLOCK if tokens > _BLOCK * 3 // 2 else None
    per_problem = model.cfg.n_heads * (block or tokens) * tokens * 4
    fitting = (b for b in _BATCHES if b < 2 * len(problems) and b * per_problem <= _SCORE_BYTES)
    return Plan(next(fitting, 1), block)


def _size(problem: Problem) -> int:
    """Grows with the number of tokens, and is cheap."""
    return sum(n.bit_length() for n in (*problem, sum(problem)))


@dataclass(frozen=True)
class Step:
    """One batch of a pass: which problems, the batch, and the logits ``[batch, pos, d_vocab]``."""

    indices: list[int]
    batch: Batch
    logits: Tensor


def run_problems(
    model: HookedAdder,
    problems: Sequence[Problem],
    interventions: Sequence[Edit] = (),
    extra_hooks: Callable[[Batch], list[tuple[str, Callable[..., Any]]]] | None = None,
    progress: Progress = lambda done: None,
) -> Iterator[Step]:
    """Teacher-forced forward passes over the problems, in evaluation mode, without gradients.

    Args:
        interventions: applied in order to every batch.
        extra_hooks: hooks that look on, given the batch; they run after the interventions.
        progress: told the number of problems done after each batch.
    """
    order = sorted(range(len(problems)), key=lambda i: _size(problems[i]))
    plan = plan_for(model, problems)
    done = 0
    for start in range(0, len(order), plan.batch):
        indices = order[start : start + plan.batch]
        batch = model.task.encode([problems[i] for i in indices])
        fwd_hooks = hooks_for(model, batch, interventions)
        if extra_hooks is not None:
            fwd_hooks += extra_hooks(batch)
        with torch.no_grad(), model.evaluating(), model.hooks(fwd_hooks) if fwd_hooks else nullcontext():
            logits = model(batch.tokens, batch.mask, query_block=plan.query_block)
        done += len(indices)
        progress(done)
        yield Step(indices, batch, logits)


def describe_run(model: HookedAdder, problems: Sequence[Problem], seed: int | None) -> dict[str, Any]:
    """What a number may depend on, for the ``"run"`` key: plan, threads, versions, seed of the problems."""
    return {
        "seed": seed,
        **asdict(plan_for(model, problems)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
