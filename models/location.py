"""Machines that address by location: a Neural GPU that adds binary numbers, a Neural Turing Machine that copies.

Attention finds a key by what it holds. These two move along a tape: the Neural GPU by a convolution that reaches one
cell to either side a step, the Neural Turing Machine by shifting the weights of its heads by -1, 0 or +1. Both are
``HookedRootModule``s. A hook fires once a step and is told which by ``hook.ctx["step"]``; an edit takes effect in the
steps that follow. (``run_with_cache`` keeps the last step of each; :func:`interp.location.trace` keeps all.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from models.addition import MOST_DIGITS, MOST_PROBLEMS, Problem, ProblemError, generator
from models.config import NeuralGpuConfig, TuringConfig

BLANK = 2  # what a cell holds where a number has no bit
BY_LOCATION, SHARP = -3.0, 1.0  # a head's gate and sharpness at first, before they are squashed


@dataclass(frozen=True)
class Sums:
    """Binary problems on a tape, least significant bit first, ``[batch, cell]``.

    ``first``, ``second``: 0, 1 or :data:`BLANK`, the operands side by side (aligned, as in Price et al. 1611.00736).
    ``sum``: the same of the sum. ``asked``: its bits and the blank behind them, the cells that are scored.
    """

    first: Int[Tensor, "batch cell"]
    second: Int[Tensor, "batch cell"]
    sum: Int[Tensor, "batch cell"]
    asked: Bool[Tensor, "batch cell"]


class BinaryAddition:
    """The Neural GPU's task: problems are pairs of whole numbers, lengths are in bits."""

    def __init__(self, config: NeuralGpuConfig):
        self.config = config

    def encode(self, problems: Sequence[Problem]) -> Sums:
        """Every number on a tape two cells longer than the longest operand: room for a carry and the end.

        Raises:
            ProblemError: no problem, or a negative operand.
        """
        if not problems:
            raise ProblemError("a batch needs at least one problem, got none")
        if min(min(problem) for problem in problems) < 0:
            raise ProblemError("operands must not be negative")
        cells = 2 + max(_bits(n) for problem in problems for n in problem)
        numbers = torch.tensor([[_cells(n, cells) for n in (a, b, a + b)] for a, b in problems])
        length = (numbers[:, 2] != BLANK).sum(1, keepdim=True)
        return Sums(numbers[:, 0], numbers[:, 1], numbers[:, 2], torch.arange(cells) <= length)

    def training_problems(self, rng: np.random.Generator, n: int, longest: int) -> list[Problem]:
        """Both lengths from ``U(min_length, longest)`` bits, leading bits 1 but for numbers of one bit.

        The tape is as long as the longest problem, and the number of steps with it.
        """
        lengths = rng.integers(self.config.min_length, longest + 1, size=(n, 2))
        return [(_drawn(rng, int(a)), _drawn(rng, int(b))) for a, b in lengths]

    def evaluation_problems(self, digits: int, n: int, seed: int = 0) -> list[Problem]:
        """As :meth:`models.addition.AdditionTask.evaluation_problems`, in bits: one operand of exactly ``digits``
        bits, the other of ``U(1, digits)``, sides at random.

        Raises:
            ProblemError: ``digits`` or ``n`` out of range.
        """
        _check(digits, n, "bits")
        problems: list[Problem] = []
        for i in range(n):
            rng = generator(seed, f"bits {digits}", i)
            long, other = _drawn(rng, digits, lead=True), _drawn(rng, int(rng.integers(1, digits + 1)))
            problems.append((other, long) if rng.integers(2) else (long, other))
        return problems


def _check(digits: int, n: int, unit: str) -> None:
    if not 1 <= digits <= MOST_DIGITS:
        raise ProblemError(f"digits ({unit} here) must be from 1 to {MOST_DIGITS}, got {digits}")
    if not 1 <= n <= MOST_PROBLEMS:
        raise ProblemError(f"problems must be from 1 to {MOST_PROBLEMS}, got {n}")


def _drawn(rng: np.random.Generator, length: int, lead: bool = False) -> int:
    """A number of so many bits, its leading bit 1, but for one bit that may be 0 unless it has to ``lead``."""
    bits = rng.integers(0, 2, size=length)
    if length > 1 or lead:
        bits[0] = 1
    return int("".join(map(str, bits.tolist())), 2)


def _bits(n: int) -> int:
    return max(1, n.bit_length())


def _cells(n: int, cells: int) -> list[int]:
    text = [int(bit) for bit in reversed(bin(n)[2:])]
    return text + [BLANK] * (cells - len(text))


class NeuralGPU(HookedRootModule):
    """A Neural GPU (Kaiser and Sutskever 1511.08228) on a tape one cell wide.

    A cell starts as the sum of the embeddings of its two bits; ``cells`` steps later, as many as the tape has cells,
    a linear map reads what it holds: 0, 1 or blank. A step is a convolutional gated recurrent unit (section 2):

    ``s <- u * s + (1 - u) * tanh(U * (r * s) + B)``, ``u = cut(U' * s + B')``, ``r = cut(U'' * s + B'')``,

    with ``*`` a convolution of 3 cells before a state, and ``cut(x) = min(1, max(0, 1.2 sigmoid(x) - .1))``, the
    paper's gate cutoff. Hooks: ``hook_tape``, ``hook_update_gate``, ``hook_reset_gate`` ``[batch, cell, channel]``.
    """

    def __init__(self, config: NeuralGpuConfig, seed: int = 0):
        super().__init__()
        self.config, self.task = config, BinaryAddition(config)
        m, k, layers = config.channels, config.kernel, config.layers
        self.embed = nn.Parameter(torch.empty(2, BLANK + 1, m))
        self.gates, self.gate_bias = (
            nn.Parameter(torch.empty(layers, 2 * m, m, k)),
            nn.Parameter(torch.ones(layers, 2 * m)),
        )
        self.candidate = nn.Parameter(torch.empty(layers, m, m, k))
        self.candidate_bias = nn.Parameter(torch.zeros(layers, m))
        self.read, self.read_bias = nn.Parameter(torch.empty(m, BLANK + 1)), nn.Parameter(torch.zeros(BLANK + 1))
        rng = torch.Generator().manual_seed(seed)
        for weight, fan_in in ((self.embed, 1), (self.gates, m * k), (self.candidate, m * k), (self.read, m)):
            nn.init.normal_(weight, std=fan_in**-0.5, generator=rng)
        self.hook_tape, self.hook_update_gate, self.hook_reset_gate = HookPoint(), HookPoint(), HookPoint()
        self.setup()

    def forward(self, batch: Sums, steps: int | None = None) -> Float[Tensor, "batch cell symbol"]:
        """Logits of 0, 1 and blank for every cell, after ``steps`` steps (one for each cell)."""
        tape = torch.tanh(self.embed[0][batch.first] + self.embed[1][batch.second])
        for step in range(tape.shape[1] if steps is None else steps):
            for layer in range(self.config.layers):
                tape = self.step(tape, layer, step)
            tape = _hooked(self.hook_tape, tape, step)
        return self.readout(tape)

    def step(self, tape: Float[Tensor, "batch cell channel"], layer: int, step: int = 0) -> Tensor:
        """One convolutional gated recurrent unit."""
        state, pad = tape.transpose(1, 2), self.config.kernel // 2
        gates = nn.functional.conv1d(state, self.gates[layer], self.gate_bias[layer], padding=pad).transpose(1, 2)
        update, reset = (1.2 * gates.sigmoid() - 0.1).clamp(0, 1).chunk(2, dim=2)
        update, reset = _hooked(self.hook_update_gate, update, step), _hooked(self.hook_reset_gate, reset, step)
        kept = (reset * tape).transpose(1, 2)
        new = nn.functional.conv1d(kept, self.candidate[layer], self.candidate_bias[layer], padding=pad)
        return update * tape + (1 - update) * new.transpose(1, 2).tanh()

    def readout(self, tape: Float[Tensor, "batch cell channel"]) -> Float[Tensor, "batch cell symbol"]:
        return tape @ self.read + self.read_bias


def _hooked(point: HookPoint, value: Tensor, step: int) -> Tensor:
    point.ctx["step"] = step
    return point(value)


@dataclass(frozen=True)
class Copies:
    """Sequences of symbols to copy, all of one length: ``symbols``, 0 or 1, ``[batch, place, bit]``."""

    symbols: Float[Tensor, "batch place bit"]

    @property
    def inputs(self) -> Float[Tensor, "batch step channel"]:
        """What is read: the symbols, a step with the delimiter (the last channel), and nothing while it is answered."""
        batch, length, bits = self.symbols.shape
        inputs = torch.zeros(batch, 2 * length + 1, bits + 1)
        inputs[:, :length, :bits] = self.symbols
        inputs[:, length, bits] = 1
        return inputs


class Copying:
    """The Turing machine's task: a problem is a sequence of symbols, as whole numbers below ``2**bits``; lengths are in
    symbols (Graves et al. 1410.5401, section 4.1)."""

    def __init__(self, config: TuringConfig):
        self.config = config

    def encode(self, problems: Sequence[tuple[int, ...]]) -> Copies:
        """Raises ProblemError: no problem, problems of different lengths, or a symbol out of range."""
        if not problems or not problems[0] or len({len(problem) for problem in problems}) > 1:
            raise ProblemError("a batch needs sequences of one length, of at least 1 symbol")
        symbols = torch.tensor(problems)
        if symbols.min() < 0 or symbols.max() >= 2**self.config.bits:
            raise ProblemError(f"symbols run from 0 to {2**self.config.bits - 1}, got {int(symbols.max())}")
        return Copies((symbols[..., None] >> torch.arange(self.config.bits) & 1).float())

    def draw(self, rng: np.random.Generator, length: int, n: int) -> list[tuple[int, ...]]:
        """``n`` sequences of ``length`` random symbols."""
        return [tuple(row) for row in rng.integers(0, 2**self.config.bits, size=(n, length)).tolist()]

    def evaluation_problems(self, digits: int, n: int, seed: int = 0) -> list[tuple[int, ...]]:
        """``n`` sequences of ``digits`` symbols, each drawn by itself. Raises ProblemError."""
        _check(digits, n, "symbols")
        return [self.draw(generator(seed, f"symbols {digits}", i), digits, 1)[0] for i in range(n)]


class TuringMachine(HookedRootModule):
    """A Neural Turing Machine (Graves, Wayne and Danihelka 1410.5401) with one head that reads and one that writes.

    At each step an LSTM sees the input and what was read last, and gives each head a key, its strength, a gate, a shift
    and a sharpness (:func:`addressed`). The write head erases and adds (eq. 3 and 4), then the read head reads (eq. 2),
    and a linear map of the controller's output and what was read gives the logits of the bits. The heads start on cell
    0, and every cell at ``1e-6``. Untrained, gates are near 0 and heads sharp (:data:`BY_LOCATION`, :data:`SHARP`), so
    that a head stays where it is put until training moves it: with neither it did not learn to copy in 1000 steps.

    Hooks: ``hook_read_weights``, ``hook_write_weights`` ``[batch, cell]``, ``hook_read_shift``, ``hook_write_shift``
    ``[batch, 3]`` for -1, 0 and +1, ``hook_read_gate``, ``hook_write_gate`` ``[batch, 1]`` (1: by content, 0: from
    where the head was), ``hook_tape`` ``[batch, cell, width]``.
    """

    def __init__(self, config: TuringConfig, seed: int = 0):
        super().__init__()
        self.config, self.task = config, Copying(config)
        self.sizes = (config.width, 1, 1, 3, 1)  # of a head: key, strength, gate, shift, sharpness
        inputs, heads = config.bits + 1 + config.width, 2 * sum(self.sizes) + 2 * config.width
        self.input, self.recurrent = (
            nn.Parameter(torch.empty(4 * config.hidden, inputs)),
            nn.Parameter(torch.empty(4 * config.hidden, config.hidden)),
        )
        self.controller_bias = nn.Parameter(torch.zeros(4 * config.hidden))
        self.heads, self.heads_bias = nn.Parameter(torch.empty(heads, config.hidden)), nn.Parameter(torch.zeros(heads))
        self.answer = nn.Parameter(torch.empty(config.bits, config.hidden + config.width))
        self.answer_bias = nn.Parameter(torch.zeros(config.bits))
        rng = torch.Generator().manual_seed(seed)
        for weight in (self.input, self.recurrent, self.heads, self.answer):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=rng)
        with torch.no_grad():
            for bias in self.heads_bias[: 2 * sum(self.sizes)].split(sum(self.sizes)):
                bias[config.width + 1], bias[-1] = BY_LOCATION, SHARP
        for name in ("weights", "shift", "gate"):
            for head in ("read", "write"):
                setattr(self, f"hook_{head}_{name}", HookPoint())
        self.hook_tape = HookPoint()
        self.setup()

    def forward(self, batch: Copies, cells: int | None = None) -> Float[Tensor, "batch place bit"]:
        """Logits of the bits of every symbol of the copy.

        Args:
            cells: of the tape; by default those of training, or twice as many as there are symbols if that is more:
                the tape is a ring, and training never wrote all round it.
        """
        inputs = batch.inputs
        n, steps = inputs.shape[:2]
        length = batch.symbols.shape[1]
        cells = max(self.config.cells, 2 * length) if cells is None else cells
        tape = torch.full((n, cells, self.config.width), 1e-6)
        at = {
            head: nn.functional.one_hot(torch.zeros(n, dtype=torch.long), cells).float() for head in ("read", "write")
        }
        read = torch.zeros(n, self.config.width)
        state = torch.zeros(n, self.config.hidden), torch.zeros(n, self.config.hidden)
        answers = []
        for step in range(steps):
            gates = torch.cat([inputs[:, step], read], dim=1) @ self.input.T + state[0] @ self.recurrent.T
            state = _lstm(gates + self.controller_bias, state[1])
            asked = (state[0] @ self.heads.T + self.heads_bias).split(
                [*self.sizes, *self.sizes, *[self.config.width] * 2], 1
            )
            at["write"] = self._move("write", at["write"], tape, asked[5:10], step)
            erase, add = asked[10].sigmoid(), asked[11]
            tape = tape * (1 - at["write"][..., None] * erase[:, None]) + at["write"][..., None] * add[:, None]
            tape = _hooked(self.hook_tape, tape, step)
            at["read"] = self._move("read", at["read"], tape, asked[:5], step)
            read = (at["read"][:, None] @ tape)[:, 0]
            if step > length:
                answers.append(torch.cat([state[0], read], dim=1) @ self.answer.T + self.answer_bias)
        return torch.stack(answers, dim=1)

    def _move(self, head: str, before: Tensor, tape: Tensor, asked: Sequence[Tensor], step: int) -> Tensor:
        """Where a head stands after this step."""
        key, strength, gate, shift, sharpness = asked
        gate = _hooked(getattr(self, f"hook_{head}_gate"), gate.sigmoid(), step)
        shift = _hooked(getattr(self, f"hook_{head}_shift"), shift.softmax(1), step)
        beta, gamma = nn.functional.softplus(strength), 1 + nn.functional.softplus(sharpness)
        weights = addressed(before, by_content(tape, key, beta), gate, shift, gamma)
        return _hooked(getattr(self, f"hook_{head}_weights"), weights, step)


def _lstm(gates: Float[Tensor, "batch gates"], cell: Float[Tensor, "batch hidden"]) -> tuple[Tensor, Tensor]:
    """Output and cell of an LSTM, of its gates before they are squashed."""
    i, f, g, o = gates.chunk(4, dim=1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def by_content(
    tape: Float[Tensor, "batch cell width"], key: Float[Tensor, "batch width"], strength: Float[Tensor, "batch 1"]
) -> Float[Tensor, "batch cell"]:
    """``softmax(strength * cos(key, cell))`` (Graves et al. 1410.5401, eq. 5 and 6); norms have ``1e-16`` added."""
    product = (tape @ key[..., None])[..., 0]
    norms = tape.norm(dim=2) * key.norm(dim=1, keepdim=True)
    return (strength * product / (norms + 1e-16)).softmax(1)


def addressed(
    before: Float[Tensor, "batch cell"],
    content: Float[Tensor, "batch cell"],
    gate: Float[Tensor, "batch 1"],
    shift: Float[Tensor, "batch 3"],
    sharpness: Float[Tensor, "batch 1"],
) -> Float[Tensor, "batch cell"]:
    """Interpolation, circular shift and sharpening (Graves et al. 1410.5401, eq. 7, 8 and 9).

    ``shift`` is a distribution over -1, 0 and +1: the weight of a cell moves to the cell before it, stays, or moves on.
    """
    held = gate * content + (1 - gate) * before
    back, stay, on = shift.T[..., None]
    moved = back * held.roll(-1, 1) + stay * held + on * held.roll(1, 1)
    return (sharpness * (moved + 1e-16).log()).softmax(1)  # moved ** sharpness, over its sum


Machine = NeuralGPU | TuringMachine


def machine(config: NeuralGpuConfig | TuringConfig, seed: int = 0) -> Machine:
    """The untrained machine of a configuration."""
    return NeuralGPU(config, seed) if isinstance(config, NeuralGpuConfig) else TuringMachine(config, seed)
