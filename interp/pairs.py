"""Pairs of problems that differ in one thing, built by the task: a clean run and a corrupt one for patching.

=======  ==============================================================================================================
kind     what differs
=======  ==============================================================================================================
chunk    the first number's chunk in the decision's column, carry out of the column unchanged: one token
carry    the carry into the column: both operands' chunks in the column before change and their sum's own does not, so
         that the decision's own token and all else stay
length   far columns: the clean problem is the corrupt one's lowest columns, as many as training showed. The decision is
         the same, and so is its answer
=======  ==============================================================================================================

Chunk and carry pairs have answers of their own, and the measure is the logit of the clean answer less that of the
corrupt one (Wang et al. 2211.00593; Zhang and Nanda 2309.16042 say why not a probability). Length pairs have one
answer, and the measure is the margin: its logit less the best other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.decisions import score
from interp.memory import require
from models.addition import Batch, Problem, decimal_int, generator
from models.config import InputError
from models.transformer import HookedAdder

KINDS = ("chunk", "carry", "length")
ROLES = ("first", "second", "first_before", "second_before", "decision", "decision_before", "separators", "elsewhere")
_TRIES = 1000  # draws for one pair, of which nearly all succeed


class PairError(InputError):
    """Pairs that cannot be built; the message names the value and the remedy."""


@dataclass(frozen=True)
class Pairs:
    """Clean and corrupt problems, one decision each.

    ``column``: of the decision, ``[pair]``. ``source``: int ``[pair, pos]``, where in the clean run each token of the
    corrupt run has its counterpart, -1 where it has none. ``right``: the clean answer's token ``[pair]``; ``rival``:
    the corrupt answer's, or -1 for the best other. ``digits`` and ``seed``: what they were drawn with.
    """

    kind: str
    clean: Batch
    corrupt: Batch
    column: Int[Tensor, "pair"]
    source: Int[Tensor, "pair pos"]
    right: Int[Tensor, "pair"]
    rival: Int[Tensor, "pair"]
    digits: int
    seed: int

    def __len__(self) -> int:
        return len(self.column)

    def query(self, batch: Batch) -> Int[Tensor, "pair"]:
        """Where the decision is made, in the clean or the corrupt batch."""
        return _query(batch, self.column)

    def margin(self, batch: Batch, logits: Float[Tensor, "pair pos d_vocab"]) -> Float[Tensor, "pair"]:
        """The measure, in logits, of a run on the clean or the corrupt batch."""
        rows = torch.arange(len(self))
        asked = logits[rows, self.query(batch)]
        own = asked[rows, self.right]
        others = asked.scatter(1, self.right[:, None], -torch.inf)
        rival = torch.where(self.rival >= 0, asked[rows, self.rival.clamp(min=0)], others.amax(1))
        return own - rival

    @cached_property
    def roles(self) -> Bool[Tensor, "role pair pos"]:
        """Who each token of the corrupt run is to the decision, in the order of :data:`ROLES`; padding is nobody.

        ``first`` and ``second``: the operand's chunk in the decision's column; ``_before``: in the column before.
        ``decision``: the query itself, the sum's own chunk in the column before or ``=``. ``decision_before``: the
        query one earlier. ``separators``: the others of ``+`` and ``=``.
        """
        batch, column = self.corrupt, self.column[:, None]
        number = batch.column >= 0
        operand = [(batch.row == row) & number for row in (0, 1)]
        decision = batch.decisions & (batch.decision_column == column)
        before = batch.decisions & (batch.decision_column == column - 1)
        here = [x & (batch.column == column) for x in operand]
        below = [x & (batch.column == column - 1) for x in operand]
        separators = batch.mask & ~number & ~decision & ~before & (batch.row > 0)
        named = [*here, *below, decision, before, separators]
        return torch.stack([*named, batch.mask & ~torch.stack(named).any(0)])

    def aligned(self, values: Float[Tensor, "pair pos *rest"]) -> Float[Tensor, "pair pos *rest"]:
        """Values of the clean run at the corrupt run's tokens; what stands where ``source`` is -1 means nothing."""
        rows = torch.arange(len(self))[:, None]
        return values[rows, self.source.clamp(min=0)]


def build_pairs(
    model: HookedAdder,
    kind: str,
    digits: int,
    n: int = 16,
    *,
    seed: int = 0,
    failing: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Pairs:
    """``n`` pairs whose operands have ``digits`` digits; of ``length`` pairs the corrupt problems' longer operand has.

    Args:
        failing: of ``length`` pairs, only decisions that the model gets wrong in the long problem.

    Raises:
        PairError: no such kind; numbers cut from the left, whose columns do not add up by themselves; too few digits
            for the kind; ``failing`` of another kind, or too few failing decisions.
        ProblemError: ``digits`` or ``n`` out of range. MemoryLimit: too many pairs, or digits, for the free memory.
    """
    if kind not in KINDS:
        raise PairError(f"pairs are one of {', '.join(KINDS)}, got {kind[:60]!r}")
    if model.config.task.cut != "right":
        raise PairError("pairs change one column, which needs numbers cut from the right, got cut='left'")
    if failing and kind != "length":
        raise PairError(f"failing decisions are chosen among length pairs, got pairs of kind {kind!r}")
    model.task.evaluation_problems(digits, n, seed)  # refuses what is out of range
    tokens = 3 * -(-digits // model.config.task.chunk) + 3
    scores = 2 * n * model.cfg.n_heads * tokens**2 * 4
    require(2 * scores, f"{n} pairs of {digits} digits, every key at once,", "take fewer pairs or fewer digits")
    if kind == "length":
        return _length_pairs(model, digits, n, seed, failing, progress)
    chunks = -(-digits // model.config.task.chunk)
    if kind == "carry" and chunks < 2:
        raise PairError(f"a carry needs a column before the decision's; take more digits than {digits}")
    drawn = [_draw(model, kind, digits, generator(seed, f"{kind} pairs {digits}", i)) for i in range(n)]
    clean, corrupt = (model.task.encode(side) for side in ([pair[0] for pair in drawn], [pair[1] for pair in drawn]))
    column = torch.tensor([pair[2] for pair in drawn])
    width = min(clean.tokens.shape[1], corrupt.tokens.shape[1])
    source = torch.where(torch.arange(corrupt.tokens.shape[1]) < width, torch.arange(corrupt.tokens.shape[1]), -1)
    right, rival = (_answer(batch, column) for batch in (clean, corrupt))
    return Pairs(kind, clean, corrupt, column, source.expand(n, -1).clone(), right, rival, digits, seed)


def _query(batch: Batch, column: Int[Tensor, "pair"]) -> Int[Tensor, "pair"]:
    return ((batch.decision_column == column[:, None]) & batch.decisions).long().argmax(1)


def _answer(batch: Batch, column: Int[Tensor, "pair"]) -> Int[Tensor, "pair"]:
    return batch.targets[torch.arange(len(column)), _query(batch, column)]


def _draw(model: HookedAdder, kind: str, digits: int, rng: np.random.Generator) -> tuple[Problem, Problem, int]:
    """Clean and corrupt problem, and the decision's column."""
    base = 10**model.config.task.chunk
    chunks = -(-digits // model.config.task.chunk)
    low = 10 ** (digits - 1) if digits > 1 else 0
    for _ in range(_TRIES):
        numbers = [_number(rng, digits) for _ in range(2)]
        column = int(rng.integers(0 if kind == "chunk" else 1, chunks))
        at = column if kind == "chunk" else column - 1  # where the operands change
        x, y = (number // base**at % base for number in numbers)
        carry = int(numbers[0] % base**at + numbers[1] % base**at >= base**at)
        if kind == "chunk":
            out = x + y + carry >= base
            candidates = [(c, y) for c in range(base) if c != x and (c + y + carry >= base) == out]
        else:
            total = x + y + (base if x + y + carry < base else -base)  # the other carry, the same chunk of the sum
            candidates = [(c, total - c) for c in range(max(0, total - base + 1), min(base - 1, total) + 1)]
        a, b = numbers
        changed = [(a + (c - x) * base**at, b + (d - y) * base**at) for c, d in candidates]
        changed = [pair for pair in changed if min(pair) >= low]  # no leading zero
        if changed:
            return (a, b), changed[int(rng.integers(len(changed)))], column
    raise PairError(f"no {kind} pair of {digits} digits was found in {_TRIES} draws; take more digits")


def _number(rng: np.random.Generator, digits: int) -> int:
    text = rng.integers(0, 10, size=digits)
    text[0] = rng.integers(1, 10)
    return decimal_int("".join(map(str, text.tolist())))


def _length_pairs(
    model: HookedAdder, digits: int, n: int, seed: int, failing: bool, progress: Callable[[str], None]
) -> Pairs:
    task = model.config.task
    shown = task.max_digits // task.chunk
    if -(-digits // task.chunk) <= shown:
        raise PairError(
            f"length pairs need far columns, but problems of {digits} digits have none beyond the {shown} of training; "
            f"take more digits than {shown * task.chunk}"
        )
    top = 10 ** (shown * task.chunk)
    chosen: list[tuple[Problem, Problem, int]] = []
    drawn, size = 0, 4 * n
    while len(chosen) < n:
        if drawn >= 64 * n:
            raise PairError(
                f"only {len(chosen)} of {n} failing decisions in the lowest {shown} columns were found in {drawn} "
                f"problems of {digits} digits; take fewer pairs or more digits"
            )
        problems = model.task.evaluation_problems(digits, drawn + size, seed)[drawn:]
        progress(f"looking for decisions in problems {drawn} to {drawn + size}")
        wrong = _wrong(model, problems) if failing else None
        for i, (a, b) in enumerate(problems):
            short = (a % top, b % top)
            columns = [c for c in _shared_columns(model, (a, b), short) if wrong is None or (i, c) in wrong]
            if columns and len(chosen) < n:
                pick = int(generator(seed, f"length pairs {digits}", drawn + i).integers(len(columns)))
                chosen.append((short, (a, b), columns[pick]))
        drawn += size
    clean, corrupt = (model.task.encode(side) for side in ([pair[0] for pair in chosen], [pair[1] for pair in chosen]))
    column = torch.tensor([pair[2] for pair in chosen])
    source, best_other = _counterparts(clean, corrupt), torch.full_like(column, -1)
    return Pairs("length", clean, corrupt, column, source, _answer(corrupt, column), best_other, digits, seed)


def _wrong(model: HookedAdder, problems: Sequence[Problem]) -> set[tuple[int, int]]:
    found = score(model, problems)
    return {(int(p), int(c)) for p, c in zip(found.problem[found.wrong], found.column[found.wrong], strict=True)}


def _shared_columns(model: HookedAdder, long: Problem, short: Problem) -> list[int]:
    """Columns whose decision is the same in both: the same operands there, no end of the short sum."""
    of_long, of_short = (model.task.encode([problem]).lengths[0].tolist() for problem in (long, short))
    return [
        column
        for column in range(of_short[2] - 1)  # the short sum's top chunk may be a carry of its own
        if all((column < of_long[row]) == (column < of_short[row]) for row in (0, 1))
    ]


def _counterparts(clean: Batch, corrupt: Batch) -> Int[Tensor, "pair pos"]:
    """Tokens of the same row and column; the end of a sum has no counterpart."""
    starts = torch.stack([torch.zeros_like(clean.lengths[:, 0]), clean.lengths[:, 0], clean.lengths[:, :2].sum(1) + 1])
    start = starts.T.gather(1, corrupt.row) + (corrupt.row > 0)  # of each row's first chunk, in the clean run
    there = clean.lengths.gather(1, corrupt.row)
    return torch.where(corrupt.mask & (corrupt.column < there), start + corrupt.column, -1)
