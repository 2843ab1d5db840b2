"""Configuration: frozen, validated, and the same after a round trip through JSON.

Every field that a number depends on lives here, so that ``config.json`` beside the weights is enough to
rebuild the model and the task it was trained on.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scheme = Literal["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"]


class InputError(ValueError):
    """Bad input. The message is one line: the thing, the value it has, and the remedy."""


class Frozen(BaseModel):
    """A frozen record that refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Lengths(Frozen):
    """A share of the training problems, whose operands both have ``U(min_digits, max_digits)`` digits."""

    min_digits: int = Field(ge=1)
    max_digits: int = Field(ge=1)
    share: float = Field(gt=0, le=1)


class TaskConfig(Frozen):
    """The addition task: how numbers are cut into tokens, and the lengths that training draws.

    ``chunk`` is the number of digits a token holds. ``cut="right"`` cuts from the units, so that chunks are
    aligned by place value; ``cut="left"`` cuts from the leading digit, the contrast case.
    Training draws the lengths of both operands from ``U(min_digits, max_digits)``, in digits, or, with ``mix``, from
    one of several such ranges, chosen for each problem by its share.
    """

    chunk: Literal[1, 3] = 1
    cut: Literal["right", "left"] = "right"
    min_digits: int = Field(default=1, ge=1)
    max_digits: int = Field(default=10, ge=1, le=100_000)
    mix: tuple[Lengths, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> TaskConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits must not exceed max_digits, got {self.min_digits} > {self.max_digits}")
        if not self.mix:
            return self
        for part in self.mix:
            if not self.min_digits <= part.min_digits <= part.max_digits <= self.max_digits:
                raise ValueError(
                    f"a range of mix must rise within {self.min_digits} to {self.max_digits} digits, "
                    f"got {part.min_digits} to {part.max_digits}"
                )
        if max(part.max_digits for part in self.mix) < self.max_digits:
            raise ValueError(f"no range of mix reaches max_digits={self.max_digits}")
        if abs(sum(part.share for part in self.mix) - 1) > 1e-9:
            raise ValueError(f"the shares of mix must add to 1, got {sum(part.share for part in self.mix):g}")
        return self

    @property
    def max_columns(self) -> int:
        """Columns of the longest sum that training draws, a final carry included."""
        return -(-(self.max_digits + 1) // self.chunk)

    @property
    def max_keys(self) -> int:
        """The most keys a query sees in training: both operands, both separators, and the whole sum."""
        return 2 * -(-self.max_digits // self.chunk) + 2 + self.max_columns

    def trained_distance(self, unit: Literal["columns", "tokens"]) -> int:
        """The largest query-key distance that training shows, in the position scheme's own unit."""
        return self.max_columns - 1 if unit == "columns" else self.max_keys - 1


class AttentionConfig(Frozen):
    """How a head scores a key, and what competes with the keys.

    ``scheme``
        ``rotary2d``: rotation by row and by column (half of the head's dimensions each), the score multiplied by
        ``exp(-decay |column distance|)``. ``rotary``: rotation by token position. ``none``: no positions (NoPE).
        ``counters``: no positions; each head keeps ``n_counters`` counters of its own (:mod:`models.counters`).
        ``alibi``: a penalty per token of distance, one slope a head. ``fire``: a learned function of the distance over
        the query's position. ``cope``: positions that each head counts from the key to the query, with learned
        embeddings of the first ``cope_positions`` counts. ``coupling``: digits of equal significance share one of
        ``coupled_positions`` ids, whose learned embedding joins the token's (:mod:`models.positions`).
    ``sink``
        One learned, position-free score per head that joins the softmax and has no value (the gpt-oss convention).
    ``null_key``
        The sink's score is the query's product with a learned, position-free key instead.
    ``sink_boost``
        Added to every sink score, at evaluation; a boost of B stands for a crowd of ``e**B`` keys of score 0.
    ``normalizer``, ``scalable``
        From scores to weights (:mod:`models.normalizers`); ``scalable`` multiplies scores and sink by ``s ln n``, n
        being the keys that a query sees, with one learned s a head.
    ``exact_counters``
        Of each head, the first so many counters have gates and resets rounded to 0 or 1.
    ``kernel_beyond``
        What a kernel of counts does beyond a difference of 8: fall linearly (by a learned slope), stay constant, or
        drop to ``kernel_floor``.
    """

    scheme: Scheme = "rotary2d"
    rotary_base: float = Field(default=10_000.0, gt=1)
    decay: float = Field(default=0.0, ge=0)
    separator_column: int = 0
    sink: bool = True
    null_key: bool = False
    sink_boost: float = 0.0
    normalizer: Literal["softmax", "sparsemax", "entmax15"] = "softmax"
    scalable: bool = False
    cope_positions: int = Field(default=64, ge=2, le=100_000)
    coupled_positions: int = Field(default=203, ge=3, le=200_000)
    n_counters: int = Field(default=2, ge=1, le=16)
    exact_counters: int = Field(default=0, ge=0)
    kernel_beyond: Literal["linear", "constant", "floor"] = "linear"
    kernel_floor: float = -12.0

    @model_validator(mode="after")
    def _consistent(self) -> AttentionConfig:
        if self.decay and self.scheme != "rotary2d":
            raise ValueError(f"decay is per column and needs scheme='rotary2d', got scheme={self.scheme!r}")
        if self.sink_boost and not self.sink:
            raise ValueError(f"sink_boost={self.sink_boost} needs sink=true")
        if self.null_key and not self.sink:
            raise ValueError("null_key=true needs sink=true: it is the sink's score that the null key gives")
        if self.exact_counters and self.scheme != "counters":
            raise ValueError(f"exact_counters={self.exact_counters} needs scheme='counters', got {self.scheme!r}")
        if self.exact_counters > self.n_counters:
            raise ValueError(f"exact_counters must be at most n_counters={self.n_counters}, got {self.exact_counters}")
        return self

    @property
    def unit(self) -> Literal["columns", "tokens"]:
        """The unit in which this scheme measures how far a key is."""
        return "columns" if self.scheme in ("rotary2d", "counters", "coupling") else "tokens"


class AdderConfig(Frozen):
    """A decoder-only, pre-norm transformer and the task it reads."""

    task: TaskConfig = TaskConfig()
    attention: AttentionConfig = AttentionConfig()
    n_layers: int = Field(default=3, ge=1, le=64)
    n_heads: int = Field(default=4, ge=1, le=256)
    d_model: int = Field(default=64, ge=4, le=8192)
    d_head: int = Field(default=16, ge=4, le=1024)
    d_mlp: int = Field(default=256, ge=1, le=65536)

    @model_validator(mode="after")
    def _rotatable(self) -> AdderConfig:
        if self.attention.scheme in ("rotary", "rotary2d") and self.d_head % 4:
            raise ValueError(f"d_head must be a multiple of 4 to be rotated, got {self.d_head}")
        needed = self.task.max_columns + 2  # the sign before a sum, and its end
        if self.attention.scheme == "coupling" and self.attention.coupled_positions < needed:
            raise ValueError(
                f"coupled_positions must be at least {needed} for the sums that training draws, "
                f"got {self.attention.coupled_positions}"
            )
        return self

    @property
    def trained_distance(self) -> int:
        """The largest query-key distance seen in training, in columns or tokens by the scheme's unit."""
        return self.task.trained_distance(self.attention.unit)


class MachineConfig(Frozen):
    """What the machines' configurations share: the lengths that training draws, in cells that are written."""

    min_length: int = Field(default=1, ge=1)
    max_length: int = Field(default=20, ge=1, le=1000)

    @model_validator(mode="after")
    def _ordered(self) -> MachineConfig:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length must not exceed max_length, got {self.min_length} > {self.max_length}")
        return self


class NeuralGpuConfig(MachineConfig):
    """``channels``: numbers a cell holds. ``kernel``: cells that a convolution sees. ``layers``: convolutional gated
    recurrent units a step, with weights of their own."""

    machine: Literal["neural-gpu"] = "neural-gpu"
    channels: int = Field(default=48, ge=4, le=1024)
    kernel: Literal[3] = 3
    layers: int = Field(default=1, ge=1, le=8)

    @property
    def weights(self) -> int:
        """About how many weights the machine has."""
        return 3 * self.layers * self.kernel * self.channels**2


class TuringConfig(MachineConfig):
    """``bits``: of a symbol. ``cells`` and ``width``: the tape of training; it may be longer at evaluation.
    ``hidden``: units of the LSTM controller."""

    machine: Literal["turing-machine"] = "turing-machine"
    bits: int = Field(default=8, ge=1, le=64)
    cells: int = Field(default=40, ge=4, le=100_000)
    width: int = Field(default=20, ge=1, le=1024)
    hidden: int = Field(default=32, ge=1, le=4096)

    @model_validator(mode="after")
    def _fits(self) -> TuringConfig:
        if self.cells < 2 * self.max_length:
            raise ValueError(f"cells must be at least twice max_length={self.max_length}, got {self.cells}")
        return self

    @property
    def weights(self) -> int:
        """About how many weights the machine has."""
        heads = 3 * self.width + 12 + 2 * self.width
        return self.hidden * (4 * (self.bits + 1 + self.width + self.hidden) + heads + self.bits)
