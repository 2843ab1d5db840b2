"""One pass of a model over many problems: what every analysis shares.

Problems are sorted by length, so that little is padded, and run in batches whose size comes from a fixed ladder.
Results come back in the order of the problems and depend on the batch and block by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from interp.interventions import Edit, hooks_for
from interp.memory import free_memory, require
from models.addition import Batch, Problem, ProblemError
from models.attention import Blocks
from models.transformer import HookedAdder

Progress = Callable[[int], None]


def after(progress: Progress, done: int) -> Progress:
    """``progress`` for a part of some work, when ``done`` were done before it."""
    return lambda more: progress(done + more)


_SCORE_BYTES = 3 * 2**19  # a block of scores that stays in a core's cache; larger ones are several times slower
_BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_BLOCK = 64  # queries
_PARTS = (2, 4, 8)  # of a block where queries see every key, the first whose scores are at most this large
_BLOCK_BYTES = 2**22
_POOL_FROM = 1024  # tokens from which the keys left over are worth the bookkeeping
FarKeys = Literal["each", "skipped", "pooled"]


@dataclass(frozen=True)
class Plan:
    """Problems a batch, queries a block (None: all at once), and what is done about far keys (:class:`Blocks`)."""

    batch: int
    query_block: int | None
    far_keys: FarKeys = "each"
    skip_beyond: int | None = None

    @property
    def blocks(self) -> Blocks | None:
        if self.query_block is None:
            return None
        return Blocks(self.query_block, skip_beyond=self.skip_beyond, pool=self.far_keys == "pooled")


def plan_for(
    model: HookedAdder, problems: Sequence[Problem], interventions: Sequence[Edit] = (), *, every_key: bool = False
) -> Plan:
    """The largest batch of the ladder whose block of scores stays in the cache and which fits into half of the free
    memory, and whether far keys are pooled.

    Far keys are left out where the interventions give them no weight anyway, and pooled in long sequences, unless an
    intervention, a hook of the user's or the caller (``every_key``) looks at them one by one.

    Raises:
        ProblemError: there is no problem. MemoryLimit: not even one problem at a time fits into memory.
        PositionError: the model has no positions for the longest problem.
    """
    if not problems:
        raise ProblemError("there is no problem to run; give at least one")
    longest = model.task.encode([max(problems, key=_size)])
    model.scheme.ids(model.coordinates(longest.tokens, longest.mask))
    tokens = longest.tokens.shape[1]
    far_keys, within = _far_keys(model, tokens, interventions, every_key)
    if tokens <= _BLOCK * 3 // 2:
        block, far_keys, within = None, "each", None
    elif far_keys == "each":  # then a block of scores grows with the length
        sizes = [max(1, _BLOCK // part) for part in _PARTS]
        block = next((b for b in sizes if _scores_bytes(model, b, tokens) <= _BLOCK_BYTES), sizes[-1])
    else:
        block = _BLOCK
    scores = _scores_bytes(model, block or tokens, tokens)
    needed = _pass_bytes(model, tokens, scores)
    require(needed, f"a pass over {tokens} tokens", "take fewer digits")
    most = min(_SCORE_BYTES / scores, free_memory() / 2 / needed)
    batch = next((b for b in _BATCHES if b < 2 * len(problems) and b <= most), 1)
    return Plan(batch, block, far_keys, within)


def _far_keys(
    model: HookedAdder, tokens: int, interventions: Sequence[Edit], every_key: bool
) -> tuple[FarKeys, int | None]:
    """What may be done about far keys, and the distance beyond which they are left out."""
    if _is_hooked(model) or model.scheme.every_key:
        return "each", None
    kept = [edit.keeps_within(model) for edit in interventions]
    one_by_one = any(edit.every_key for edit, within in zip(interventions, kept, strict=True) if within is None)
    limits = [within for within in kept if within is not None]
    if limits and not one_by_one:
        return "skipped", min(limits)
    return ("each" if one_by_one or every_key or tokens < _POOL_FROM else "pooled"), None


def _scores_bytes(model: HookedAdder, queries: int, tokens: int) -> int:
    return model.cfg.n_heads * queries * tokens * 4


def _pass_bytes(model: HookedAdder, tokens: int, scores: int) -> int:
    """About what a pass takes for one problem: the residual stream and what a layer makes of it, a block of scores."""
    width = 10 * model.cfg.d_model + 8 * model.cfg.n_heads * model.cfg.d_head + 3 * (model.cfg.d_mlp or 0)
    return tokens * width * 4 + 8 * scores


def _is_hooked(model: HookedAdder) -> bool:
    """Whether somebody's own hooks look at scores or weights."""
    points = (getattr(block.attn, name) for block in model.blocks for name in ("hook_attn_scores", "hook_pattern"))
    return any(point._forward_hooks for point in points)


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
    *,
    every_key: bool = False,
    progress: Progress = lambda done: None,
) -> Iterator[Step]:
    """Teacher-forced forward passes over the problems, in evaluation mode, without gradients.

    Args:
        interventions: applied in order to every batch.
        extra_hooks: hooks that look on, given the batch; they run after the interventions.
        every_key: they look at keys one by one, so that none may be pooled.
        progress: told the number of problems done after each batch.
    """
    order = sorted(range(len(problems)), key=lambda i: _size(problems[i]))
    plan = plan_for(model, problems, interventions, every_key=every_key)
    done = 0
    for start in range(0, len(order), plan.batch):
        indices = order[start : start + plan.batch]
        batch = model.task.encode([problems[i] for i in indices])
        fwd_hooks = hooks_for(model, batch, interventions)
        if extra_hooks is not None:
            fwd_hooks += extra_hooks(batch)
        with torch.no_grad(), model.evaluating(), model.hooks(fwd_hooks) if fwd_hooks else nullcontext():
            logits = model(batch.tokens, batch.mask, blocks=plan.blocks)
        done += len(indices)
        progress(done)
        yield Step(indices, batch, logits)


def describe_run(
    model: HookedAdder,
    problems: Sequence[Problem],
    seed: int | None,
    interventions: Sequence[Edit] = (),
    *,
    every_key: bool = False,
) -> dict[str, Any]:
    """What a number may depend on, for the ``"run"`` key: plan, threads, versions, seed of the problems."""
    return {
        "seed": seed,
        **asdict(plan_for(model, problems, interventions, every_key=every_key)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
