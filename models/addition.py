"""The task: ``a + b = s``, least significant first, one sequence.

A **chunk** is one token: 1 or 3 digits. A **row** is one number (a, b, s), a **column** a place value, that is the
index of a chunk in its number. A **decision** is one predicted token of s, its end included, given the correct answer
so far. A **lookup** is what a query must find to decide, and its target is a *set* of keys, possibly empty:

=====================  ===============================  ==========================================================
lookup                 performed at                     target
=====================  ===============================  ==========================================================
first_same_column      the query that predicts column c a's chunk(s) in column c
second_same_column     the query that predicts column c b's chunk(s) in column c
first_from_second      b's chunk in column c            a's chunk(s) in column c
carry                  the query that predicts column c both operands' chunk(s) in column c - 1 and the sum's own
=====================  ===============================  ==========================================================

Columns are compared by the digits they cover, so one rule serves both cuts: cut from the right, chunks are aligned and
a target is one key; cut from the left, a chunk of the sum straddles up to two chunks of an operand and a target is all
that overlap. Nothing here carries: sums are Python integers, and tokens are read off their decimal strings.

Sampling is a function of a seed: batch ``i`` of stream ``name`` comes from
``numpy.random.default_rng([seed, crc32(name), i])`` (PCG64) and from nothing else.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from models.config import InputError, TaskConfig

LOOKUPS = ("first_same_column", "second_same_column", "first_from_second", "carry")
STATES = ("both", "first_ended", "second_ended", "neither")
Problem = tuple[int, int]
MOST_DIGITS = 100_000  # attention over the three numbers would be 300000 tokens long
MOST_PROBLEMS = 10**5  # at one length; more would only be waited for

_STR_LIMIT = 4000  # digits; CPython refuses to convert more than 4300 at once
_STR_BASE = 10**_STR_LIMIT


class ProblemError(InputError):
    """A problem or problem file that cannot be used; the message names the line, the value and the remedy."""


def decimal_string(n: int) -> str:
    """``str(n)`` for any ``n >= 0``, however long (CPython limits ``str`` to 4300 digits)."""
    pieces: list[str] = []
    while n >= _STR_BASE:
        n, rest = divmod(n, _STR_BASE)
        pieces.append(str(rest).zfill(_STR_LIMIT))
    pieces.append(str(n))
    return "".join(reversed(pieces))


def decimal_int(digits: str) -> int:
    """``int(digits)`` for any length; the inverse of :func:`decimal_string`."""
    value = 0
    for start in range(0, len(digits), _STR_LIMIT):
        piece = digits[start : start + _STR_LIMIT]
        value = value * 10 ** len(piece) + int(piece)
    return value


class Vocabulary:
    """Token ids: the chunks first, then ``+``, ``=``, the end of the sum, and padding.

    Cut from the right, a chunk is its value (``10**chunk`` ids). Cut from the left, the chunk that holds the units
    may be narrower, and "5", "05" and "005" are three tokens (1110 ids for chunks of 3).
    """

    def __init__(self, task: TaskConfig):
        self.task = task
        self.widths = [task.chunk] if task.cut == "right" else list(range(task.chunk, 0, -1))
        self.offset = {w: sum(10**v for v in self.widths if v > w) for w in self.widths}
        self.n_chunks = sum(10**w for w in self.widths)
        self.plus, self.equals, self.eos, self.pad = range(self.n_chunks, self.n_chunks + 4)
        self.size = self.n_chunks + 4

    def chunks(self, number: int) -> np.ndarray:
        """Token ids of ``number``, least significant chunk first. Shape ``[chunks]``."""
        k = self.task.chunk
        digits = np.frombuffer(decimal_string(number).encode(), dtype=np.uint8)[::-1].astype(np.int64) - 48
        if k == 1:
            return digits
        if self.task.cut == "right":
            padded = np.zeros(-(-len(digits) // k) * k, dtype=np.int64)
            padded[: len(digits)] = digits
            return np.asarray(padded.reshape(-1, k) @ (10 ** np.arange(k)))
        first = (len(digits) - 1) % k + 1
        head = digits[:first] @ (10 ** np.arange(first)) + self.offset[first]
        rest = digits[first:].reshape(-1, k) @ (10 ** np.arange(k)) + self.offset[k]
        return np.concatenate([[head], rest])

    def text(self, token: int) -> str:
        """The token as text: a chunk as its digits (leading zeros kept), ``+``, ``=``, ``<eos>`` or ``<pad>``."""
        if token < 0 or token >= self.size:
            raise ProblemError(f"token ids run from 0 to {self.size - 1}, got {token}")
        if token >= self.n_chunks:
            return ("+", "=", "<eos>", "<pad>")[token - self.n_chunks]
        width = next(w for w in reversed(self.widths) if token >= self.offset[w])
        return str(token - self.offset[width]).zfill(width)

    def number(self, tokens: Iterable[int]) -> int:
        """The number that these chunks, least significant first, spell."""
        digits = "".join(reversed([self.text(int(t)) for t in tokens]))
        if not digits.isdigit():
            raise ProblemError(f"a number is made of chunks, got {digits!r}")
        return decimal_int(digits)


@dataclass(frozen=True)
class Lookup:
    """Who looks something up, and where it stands.

    ``queries``: bool ``[batch, pos]``, the queries that perform the lookup.
    ``targets``: int ``[batch, pos, set]``, key positions, padded with -1; all -1 is "nothing to find", whose
    target is the sink.
    """

    name: str
    queries: Bool[Tensor, "batch pos"]
    targets: Int[Tensor, "batch pos set"]

    @property
    def present(self) -> Bool[Tensor, "batch pos"]:
        """Where there is something to find."""
        return self.queries & (self.targets >= 0).any(-1)


@dataclass(frozen=True)
class Batch:
    """Problems as tensors. All are ``[batch, pos]``; padding is on the right.

    ``tokens``: ids. ``mask``: true on real tokens. ``row``: 0 for a, 1 for ``+`` and b, 2 for ``=`` and s.
    ``column``: the chunk's index in its number, -1 on separators and padding.
    ``decisions``: the queries whose next token is scored. ``decision_column``: the column of the token they predict
    (-1 elsewhere). ``state``: index into :data:`STATES` at decisions, -1 elsewhere. ``eos``: decisions that predict
    the end of the sum.
    """

    task: TaskConfig
    problems: tuple[Problem, ...]
    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    row: Int[Tensor, "batch pos"]
    column: Int[Tensor, "batch pos"]
    decisions: Bool[Tensor, "batch pos"]
    decision_column: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, "batch row"]  # chunks of a, b, s
    digits: Int[Tensor, "batch row"]  # digits of a, b, s

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def targets(self) -> Int[Tensor, "batch pos"]:
        """The token that follows each position; meaningful at decisions."""
        return torch.cat([self.tokens[:, 1:], self.tokens[:, :1]], dim=1)

    @property
    def eos(self) -> Bool[Tensor, "batch pos"]:
        return self.decisions & (self.decision_column == self.lengths[:, 2:])

    @cached_property
    def state(self) -> Int[Tensor, "batch pos"]:
        first = self.lookups["first_same_column"].present
        second = self.lookups["second_same_column"].present
        index = torch.where(second, torch.where(first, 0, 1), torch.where(first, 2, 3))
        return torch.where(self.decisions, index, -1)

    @cached_property
    def lookups(self) -> dict[str, Lookup]:
        """The four lookups, by the names in :data:`LOOKUPS`."""
        c = self.decision_column
        at_b = (self.row == 1) & (self.column >= 0)
        here, before = self._interval(2, c), self._interval(2, c - 1)
        b_here = self._interval(1, self.column)
        has_before = self.decisions & (c > 0)
        own = torch.where(has_before, torch.arange(c.shape[1]), -1)[..., None]
        sets = {
            "first_same_column": (self.decisions, self._covering(0, here)),
            "second_same_column": (self.decisions, self._covering(1, here)),
            "first_from_second": (at_b, self._covering(0, b_here)),
            "carry": (
                self.decisions,
                torch.cat([self._covering(0, before), self._covering(1, before), own], dim=-1),
            ),
        }
        return {
            name: Lookup(name, queries, torch.where(queries[..., None], targets, -1))
            for name, (queries, targets) in sets.items()
        }

    def _lowest_width(self, row: int) -> Tensor:
        """Digits in the lowest chunk of each number, ``[batch, 1]``."""
        k = self.task.chunk
        n = self.digits[:, row : row + 1]
        return torch.full_like(n, k) if self.task.cut == "right" else (n - 1) % k + 1

    def _interval(self, row: int, column: Tensor) -> tuple[Tensor, Tensor]:
        """The digits ``[low, high)`` that ``column`` of this row's number covers; empty for a negative column."""
        k, width = self.task.chunk, self._lowest_width(row)
        high = torch.where(column >= 0, width + k * column, 0)
        return torch.where(column > 0, high - k, 0), high

    def _covering(self, row: int, interval: tuple[Tensor, Tensor]) -> Tensor:
        """Key positions of this row's chunks that overlap the digits, ``[batch, pos, set]``, -1 where there is none."""
        k, width = self.task.chunk, self._lowest_width(row)
        low, high = interval

        def chunk_of(digit: Tensor) -> Tensor:
            return torch.where(digit < width, 0, 1 + (digit - width).div(k, rounding_mode="floor"))

        first, last = chunk_of(low), chunk_of(high - 1)
        start = (self.lengths[:, :row] + 1).sum(-1, keepdim=True)
        slots = []
        for offset in range(1 if self.task.cut == "right" else 2):
            chunk = first + offset
            valid = (high > low) & (chunk <= last) & (chunk < self.lengths[:, row : row + 1])
            slots.append(torch.where(valid, start + chunk, -1))
        return torch.stack(slots, dim=-1)


class AdditionTask:
    """Problems to batches, by one :class:`~models.config.TaskConfig`."""

    def __init__(self, config: TaskConfig):
        self.config = config
        self.vocabulary = Vocabulary(config)

    def encode(self, problems: Sequence[Problem]) -> Batch:
        """One batch of these problems, padded on the right to the longest.

        Raises:
            ProblemError: no problem at all, or a negative operand.
        """
        if not problems:
            raise ProblemError("a batch needs at least one problem, got none")
        vocab = self.vocabulary
        rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        digits = np.zeros((len(problems), 3), dtype=np.int64)
        for i, (a, b) in enumerate(problems):
            if a < 0 or b < 0:
                raise ProblemError(f"operands must not be negative; problem {i} has one that is")
            numbers = (a, b, a + b)
            rows.append(tuple(vocab.chunks(n) for n in numbers))  # type: ignore[arg-type]
            digits[i] = [len(decimal_string(n)) for n in numbers]
        lengths = np.array([[len(chunks) for chunks in row] for row in rows])
        tokens = np.full((len(rows), int(lengths.sum(1).max()) + 3), vocab.pad, dtype=np.int64)
        for i, (a_ids, b_ids, s_ids) in enumerate(rows):
            line = np.concatenate([a_ids, [vocab.plus], b_ids, [vocab.equals], s_ids, [vocab.eos]])
            tokens[i, : len(line)] = line

        pos = np.arange(tokens.shape[1])[None]
        plus = lengths[:, :1]
        equals = plus + 1 + lengths[:, 1:2]
        end = equals + 1 + lengths[:, 2:]
        mask = pos <= end
        row = np.where(mask, (pos >= plus).astype(np.int64) + (pos >= equals), 0)
        column = pos - np.where(row == 0, 0, np.where(row == 1, plus, equals) + 1)
        column = np.where(mask, column, -1)
        decisions = (pos >= equals) & (pos < end)
        as_tensor = torch.from_numpy
        return Batch(
            task=self.config,
            problems=tuple(problems),
            tokens=as_tensor(tokens),
            mask=as_tensor(mask),
            row=as_tensor(row),
            column=as_tensor(column),
            decisions=as_tensor(decisions),
            decision_column=as_tensor(np.where(decisions, column + 1, -1)),
            lengths=as_tensor(lengths),
            digits=as_tensor(digits),
        )

    def prompt(self, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
        """``a + b =`` alone: tokens and mask, ``[batch, pos]``, padded on the right."""
        batch = self.encode(problems)
        equals = batch.lengths[:, :2].sum(-1, keepdim=True) + 1
        keep = torch.arange(batch.tokens.shape[1]) <= equals
        width = int(equals.max()) + 1
        return torch.where(keep, batch.tokens, self.vocabulary.pad)[:, :width], keep[:, :width]

    def training_problems(self, seed: int, step: int, n: int, stream: str = "train") -> list[Problem]:
        """``n`` problems as training draws them: both lengths from ``U(min_digits, max_digits)``, or from the mix.

        A number of more than one digit has no leading zero; a number of one digit may be 0.
        """
        rng = generator(seed, stream, step)
        low, high = self.config.min_digits, self.config.max_digits
        if self.config.mix:
            part = rng.choice(len(self.config.mix), size=n, p=[part.share for part in self.config.mix])
            ends = np.array([(part.min_digits, part.max_digits) for part in self.config.mix])[part]
            lengths = rng.integers(ends[:, :1], ends[:, 1:] + 1, size=(n, 2))
        else:
            lengths = rng.integers(low, high + 1, size=(n, 2))
        digits = rng.integers(0, 10, size=(n, 2, high))
        lead = rng.integers(1, 10, size=(n, 2))
        digits[:, :, 0] = np.where(lengths > 1, lead, digits[:, :, 0])
        text = (digits + 48).astype(np.uint8)
        return [
            (
                decimal_int(text[i, 0, : lengths[i, 0]].tobytes().decode()),
                decimal_int(text[i, 1, : lengths[i, 1]].tobytes().decode()),
            )
            for i in range(n)
        ]

    def evaluation_problems(self, digits: int, n: int, seed: int = 0) -> list[Problem]:
        """``n`` problems at one length: an operand of exactly ``digits`` digits, the other of ``U(1, digits)``.

        Sides are swapped at random and no leading digit is 0. Problem ``i`` is drawn by itself, so the first ``m`` of
        ``n`` problems are the problems of a call with ``m``.

        Raises:
            ProblemError: ``digits`` or ``n`` below 1, or more than :data:`MOST_DIGITS` or :data:`MOST_PROBLEMS`.
        """
        _check_digits(digits)
        if n < 1:
            raise ProblemError(f"problems must be at least 1, got {n}")
        if n > MOST_PROBLEMS:
            raise ProblemError(f"problems must be at most {MOST_PROBLEMS}, got {n}; take fewer")
        out: list[Problem] = []
        for i in range(n):
            rng = generator(seed, f"digits {digits}", i)
            long = _number(rng, digits)
            other = _number(rng, int(rng.integers(1, digits + 1)))
            out.append((other, long) if rng.integers(2) else (long, other))
        return out


def _check_digits(digits: int) -> None:
    if not 1 <= digits <= MOST_DIGITS:
        raise ProblemError(f"digits must be from 1 to {MOST_DIGITS}, got {digits}")


def generator(seed: int, stream: str, index: int) -> np.random.Generator:
    """The one generator that every sample comes from: PCG64 seeded by ``[seed, crc32(stream), index]``."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode()), index])


def _number(rng: np.random.Generator, digits: int) -> int:
    """A number of exactly ``digits`` digits, its leading digit not 0."""
    text = rng.integers(0, 10, size=digits)
    text[0] = rng.integers(1, 10)
    return decimal_int((text + 48).astype(np.uint8).tobytes().decode())


def handmade_problems(digits: int) -> list[Problem]:
    """The problems that random sampling misses, at one length: long carries and extreme shapes.

    99...9 + 1 on either side, 99...9 + 99...9; full-length carry chains that start in the units (a number and its
    complement to ``10**digits``); from 2 digits on, chains that start in the units and die in the top column; sums
    without any carry, of equal lengths; and ``digits`` digits plus 1 digit, with and without a carry, on either side.
    """
    _check_digits(digits)
    top = 10**digits
    rng = generator(0, "handmade", digits)
    nines, ones = top - 1, (top - 1) // 9
    problems: list[Problem] = [(nines, 1), (1, nines), (nines, nines), (4 * ones, 5 * ones), (5 * ones, 5 * ones)]
    for _ in range(3):
        x = _number(rng, digits - 1) * 10 + int(rng.integers(1, 10)) if digits > 1 else int(rng.integers(1, 10))
        problems += [(x, top - x), (top - x, x), (x, nines - x)]
        if digits > 1:
            # the columns below the top add to 99...9 with a 10 in the units; the top digits to 8 and the carry
            tail = x % (top // 10)
            rest = top // 10 - tail
            lead = int(rng.integers(1, 8))
            problems.append((lead * (top // 10) + tail, (8 - lead) * (top // 10) + rest))
    for _ in range(2):
        x = _number(rng, digits)
        units = x % 10
        for small in ([10 - units] if units else []) + ([9 - units] if units < 9 else []):
            problems += [(x, small), (small, x)]
        problems.append((x, _number(rng, digits)))
    carrying, idle = 4 * ones + 5, 4 * ones  # units 9 and 4, whatever was drawn
    problems += [(carrying, 1), (1, carrying), (idle, 5), (5, idle)]
    return problems


_PROBLEM = re.compile(r"([0-9]+)\s*\+\s*([0-9]+)")


def parse_problem(text: str) -> Problem:
    """``"12 + 345"`` as two integers.

    >>> parse_problem("12 + 345")
    (12, 345)

    Raises:
        ProblemError: anything else, leading zeros included.
    """
    match = _PROBLEM.fullmatch(text.strip())
    if match is None:
        raise ProblemError(f"expected two whole numbers as in '12 + 345', got {_shorten(text.strip())!r}")
    for number in match.groups():
        if len(number) > 1 and number[0] == "0":
            raise ProblemError(f"numbers are written without leading zeros, got {_shorten(number)!r}")
    return decimal_int(match[1]), decimal_int(match[2])


def read_problems(path: str | Path) -> list[Problem]:
    """Problems from a text file: one ``a + b`` a line; blank lines and lines that start with ``#`` are skipped.

    Raises:
        ProblemError: the file cannot be read as text, holds no problem, or has a bad line (which it names).
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ProblemError(f"cannot read the problem file {str(path)!r}: {reason}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                problems.append(parse_problem(line))
            except ProblemError as error:
                raise ProblemError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise ProblemError(f"the problem file {str(path)!r} holds no problem; write one 'a + b' a line")
    return problems


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
