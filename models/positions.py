"""Position schemes: how a score depends on where the query and the key stand.

A scheme may rotate queries and keys before their product, multiply the score, add to it (:class:`Bias`, one a layer),
or embed where a token stands beside what it is. All act on :class:`Coordinates`, which are read off the tokens
themselves, so that a model needs nothing but token ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.config import AdderConfig, AttentionConfig, InputError


class PositionError(InputError):
    """A sequence longer than a scheme has positions for; the message names the limit."""


class Coordinates(NamedTuple):
    """Where each token stands, ``[batch, pos]``: in the sequence, and by row and column of the sum.

    Padding is not counted: ``position`` is the index among real tokens. ``separator`` is true of ``+`` and ``=``.
    """

    position: Int[Tensor, "batch pos"]
    row: Int[Tensor, "batch pos"]
    column: Int[Tensor, "batch pos"]
    separator: Bool[Tensor, "batch pos"]

    def at(self, positions: slice | Int[Tensor, "some"]) -> Coordinates:
        return Coordinates(*(c[:, positions] for c in self))


def coordinates(
    tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    separators: tuple[int, ...],
    separator_column: int = 0,
) -> Coordinates:
    """Row and column of every token, counted from the separators before it.

    A separator opens the row of the number that follows it and stands in ``separator_column``.
    """
    position = mask.cumsum(1) - 1
    is_separator = (tokens[..., None] == torch.tensor(separators)).any(-1) & mask
    last = torch.where(is_separator, position, -1).cummax(1).values
    column = torch.where(is_separator, separator_column, position - last - 1)
    return Coordinates(position.clamp(min=0), is_separator.cumsum(1), column, is_separator)


def within(
    distance: int, of: slice, axis: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"]
) -> Bool[Tensor, "batch pos"]:
    """Which tokens stand, on the axis, within a distance of the range of some tokens, padding among those aside."""
    most = torch.iinfo(axis.dtype).max
    here, real = axis[:, of], mask[:, of]
    low = torch.where(real, here, most).amin(1, keepdim=True) - distance
    high = torch.where(real, here, -most).amax(1, keepdim=True) + distance
    return (axis >= low) & (axis <= high)


class PositionScheme:
    """No positions (NoPE): the causal mask alone tells order. Base of the others.

    ``bias``: the kind of :class:`Bias` that each layer has, or None. ``every_key``: what a key scores depends on the
    keys between it and the query, so that none may be left out.
    """

    rotates = False
    bias: type[Bias] | None = None
    every_key = False

    def __init__(self, config: AttentionConfig, d_head: int):
        self.config = config
        self.d_head = d_head

    def angles(self, at: Coordinates) -> Float[Tensor, "batch pos pair"]:
        """The angle in radians by which each pair of dimensions is rotated."""
        raise NotImplementedError(f"scheme {self.config.scheme!r} does not rotate")

    def factor(self, queries: Coordinates, keys: Coordinates) -> Float[Tensor, "batch query key"] | None:
        """What the score is multiplied by, or None for 1."""
        return None

    def ids(self, at: Coordinates, first: Int[Tensor, "batch"] | int = 0) -> Int[Tensor, "batch pos"] | None:
        """Which position embedding is added to each token's, or None where there are none."""
        return None

    def vanishes_beyond(self, bound: float, tolerance: float) -> int | None:
        """The distance beyond which every score of size up to ``bound`` is adjusted to within ``tolerance`` of 0.

        None where scores do not vanish with distance.
        """
        return None

    def axis(self, at: Coordinates) -> Int[Tensor, "batch pos"]:
        """The coordinate in whose differences distance is measured (tokens here)."""
        return at.position

    def distance(self, queries: Coordinates, keys: Coordinates) -> Int[Tensor, "batch query key"]:
        """How far a key is from a query, in the scheme's unit."""
        return (self.axis(queries)[:, :, None] - self.axis(keys)[:, None, :]).abs()

    def _frequencies(self, pairs: int) -> Float[Tensor, "pair"]:
        return self.config.rotary_base ** (-torch.arange(pairs) / pairs)


class Rotary(PositionScheme):
    """Rotation by token position (Su et al. 2104.09864, eq. 15): pair i turns by ``position * base**(-i/pairs)``."""

    rotates = True

    def angles(self, at: Coordinates) -> Float[Tensor, "batch pos pair"]:
        return at.position[..., None] * self._frequencies(self.d_head // 2)


class Rotary2D(PositionScheme):
    """Rotation by row (first half of the pairs) and column (second half), score times ``exp(-decay |column gap|)``.

    The product of rotated query and key depends on the differences of row and column alone. The decay takes a far
    score to 0, not to minus infinity: a far key keeps the weight ``e**0 = 1``.
    """

    rotates = True

    def angles(self, at: Coordinates) -> Float[Tensor, "batch pos pair"]:
        frequencies = self._frequencies(self.d_head // 4)
        return torch.cat([at.row[..., None] * frequencies, at.column[..., None] * frequencies], dim=-1)

    def factor(self, queries: Coordinates, keys: Coordinates) -> Float[Tensor, "batch query key"] | None:
        if not self.config.decay:
            return None
        apart = queries.column[:, :, None].float() - keys.column[:, None, :].float()
        return apart.abs_().mul_(-self.config.decay).exp_()

    def vanishes_beyond(self, bound: float, tolerance: float) -> int | None:
        if not self.config.decay:
            return None
        return math.ceil(math.log(max(1.0, bound / tolerance)) / self.config.decay)

    def axis(self, at: Coordinates) -> Int[Tensor, "batch pos"]:
        return at.column


class Counted(PositionScheme):
    """No positions are given: heads count for themselves (:mod:`models.counters`).

    Distance is that of a counter which counts the tokens of a number and starts again at the next: in columns. Each
    counter has its own pace, and heads could not be compared if each measured with its own.
    """

    def axis(self, at: Coordinates) -> Int[Tensor, "batch pos"]:
        return at.column


class Coupling(PositionScheme):
    """Position coupling (Cho et al. 2405.20671): digits of equal significance share one position id, in all numbers.

    A separator has the id ``first``, column c has ``first + 1 + c``, and the learned embedding of the id is added to
    that of the token (absolute positions). Training draws ``first`` for each sequence, from 0 to the last that leaves
    room for its sum, so that every id is learned; at evaluation it is 0.
    """

    def ids(self, at: Coordinates, first: Int[Tensor, "batch"] | int = 0) -> Int[Tensor, "batch pos"]:
        """Raises PositionError: a number has more columns than there are ids."""
        ids = torch.where(at.separator, 0, at.column + 1)
        ids = ids + (first[:, None] if isinstance(first, Tensor) else first)
        capacity = self.config.coupled_positions
        if ids.numel() and int(ids.max()) >= capacity:
            raise PositionError(
                f"this model has {capacity} position ids, enough for sums of numbers of {capacity - 3} tokens, "
                f"and was given one that needs {int(ids.max()) + 1}; take fewer digits"
            )
        return ids

    def axis(self, at: Coordinates) -> Int[Tensor, "batch pos"]:
        return at.column


class Bias(nn.Module):
    """What one layer adds to its scores for positions. Base of the others."""

    def __init__(self, config: AdderConfig):
        super().__init__()

    def initialise(self, rng: torch.Generator) -> None:
        """Draw the initial weights."""

    def forward(
        self,
        scores: Float[Tensor, "batch head query key"],
        q: Float[Tensor, "batch head query d_head"],
        queries: Coordinates,
        keys: Coordinates,
        hidden: Bool[Tensor, "batch 1 query tail"],
    ) -> Float[Tensor, "some head query key"]:
        """What is added to the scores.

        Args:
            scores: products of queries and keys, not masked.
            q: the queries, divided by ``sqrt(d_head)``.
            hidden: which of the last so many keys no query may see.
        """
        raise NotImplementedError


class AlibiBias(Bias):
    """``-slope * (i - j)``, in tokens, with one fixed slope a head (Press et al. 2108.12409, section 3)."""

    slopes: Float[Tensor, "head"]

    def __init__(self, config: AdderConfig):
        super().__init__(config)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(config.n_heads)), persistent=False)

    def forward(
        self, scores: Tensor, q: Tensor, queries: Coordinates, keys: Coordinates, hidden: Tensor
    ) -> Float[Tensor, "batch head query key"]:
        apart = (queries.position[:, :, None] - keys.position[:, None, :]).to(self.slopes.dtype)
        return -self.slopes[:, None, None] * apart[:, None]


def alibi_slopes(heads: int) -> list[float]:
    """``2**(-8 i / heads)`` for i from 1 on; where the number of heads is no power of two, those of the power below,
    and every other slope of twice that power (the authors' code)."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[: 2 * (heads - power) : 2]


class FireBias(Bias):
    """``f(psi(i - j) / psi(max(L, i)))`` with ``psi(x) = ln(c x + 1)`` (FIRE, Li et al. 2310.04418, section 3).

    f is an MLP of 1 input, :data:`FIRE_WIDTH` rectified units and one output a head. c and L are learned by each layer,
    L as a multiple of the most keys that training shows. Positions count from 0. Both c and L are used by size, and
    ``1e-6`` is added to the denominator.
    """

    def __init__(self, config: AdderConfig):
        super().__init__(config)
        self.max_keys = config.task.max_keys
        self.c, self.threshold = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(0.25))
        self.weight, self.offset = (nn.Parameter(torch.zeros(FIRE_WIDTH)) for _ in range(2))
        self.out_weight = nn.Parameter(torch.zeros(config.n_heads, FIRE_WIDTH))
        self.out_offset = nn.Parameter(torch.zeros(config.n_heads))

    def initialise(self, rng: torch.Generator) -> None:
        """Kinks spread over the input's range; sums of about the size of one."""
        for weight in (self.weight, self.offset):
            nn.init.uniform_(weight, -1.0, 1.0, generator=rng)
        nn.init.normal_(self.out_weight, std=FIRE_WIDTH**-0.5, generator=rng)

    def interpolated(
        self, i: Int[Tensor, "batch query"], j: Int[Tensor, "batch key"]
    ) -> Float[Tensor, "batch query key"]:
        """f's input, from 0 for the query itself to 1 for the first token, if the query stands at L or beyond."""
        apart = (i[:, :, None] - j[:, None, :]).clamp(min=0)
        longest = torch.maximum(i, self.threshold.abs() * self.max_keys)
        c = self.c.abs()
        return torch.log1p(c * apart) / (torch.log1p(c * longest)[..., None] + 1e-6)

    def forward(
        self, scores: Tensor, q: Tensor, queries: Coordinates, keys: Coordinates, hidden: Tensor
    ) -> Float[Tensor, "batch head query key"]:
        positions = torch.cat([queries.position, keys.position], dim=1)
        rows, which = positions.unique(dim=0, return_inverse=True)  # most sequences of a batch stand alike
        with torch.autocast("cpu", enabled=False):  # eight bits do not tell far positions apart
            x = self.interpolated(*rows.split([queries.position.shape[1], keys.position.shape[1]], dim=1))
            units = torch.relu(x[..., None] * self.weight + self.offset)
            added = (units @ self.out_weight.T + self.out_offset).permute(0, 3, 1, 2)
        return added if len(added) == 1 else added.index_select(0, which)


FIRE_WIDTH = 32


class CopeBias(Bias):
    """``q_i . e[p_ij]``, at a position that the head counts, ``p_ij = sum_(k=j..i) sigmoid(q_i . k_k)`` (CoPE,
    Golovneva et al. 2405.18719, section 4); q is divided by ``sqrt(d_head)`` in both products.

    ``embedding``: ``[position, d_head]``, one table for the heads of a layer, interpolated linearly between whole
    positions; every further count has the last position.
    """

    def __init__(self, config: AdderConfig):
        super().__init__(config)
        self.embedding = nn.Parameter(torch.zeros(config.attention.cope_positions, config.d_head))

    def positions(
        self, scores: Float[Tensor, "batch head query key"], hidden: Bool[Tensor, "batch 1 query tail"]
    ) -> Float[Tensor, "batch head query key"]:
        """How many keys each head counts from every key to the query, both included."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        before = scores.shape[-1] - hidden.shape[-1]
        seen = torch.cat([scores[..., :before], scores[..., before:].masked_fill(hidden, -torch.inf)], dim=-1)
        counts = seen.sigmoid().flip(-1).cumsum(-1).flip(-1)
        return counts.clamp(max=len(self.embedding) - 1)

    def forward(
        self, scores: Tensor, q: Tensor, queries: Coordinates, keys: Coordinates, hidden: Tensor
    ) -> Float[Tensor, "batch head query key"]:
        p = self.positions(scores, hidden)
        low = p.detach().floor().clamp(max=len(self.embedding) - 2)
        table = (q @ self.embedding.T).to(p.dtype)
        at, step = (values.gather(-1, low.long()) for values in (table[..., :-1], table.diff(dim=-1)))
        return at + (p - low) * step


class Alibi(PositionScheme):
    """Attention with linear biases."""

    bias = AlibiBias


class Fire(PositionScheme):
    """Functional interpolation of relative positions."""

    bias = FireBias


class Cope(PositionScheme):
    """Contextual position encoding."""

    bias = CopeBias
    every_key = True


SCHEMES: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "rotary": Rotary,
    "rotary2d": Rotary2D,
    "counters": Counted,
    "alibi": Alibi,
    "fire": Fire,
    "cope": Cope,
    "coupling": Coupling,
}


def rotate(
    x: Float[Tensor, "batch pos head d_head"],
    cos: Float[Tensor, "batch pos 1 pair"],
    sin: Float[Tensor, "batch pos 1 pair"],
) -> Float[Tensor, "batch pos head d_head"]:
    """Turn dimension pairs ``(i, i + d_head/2)`` by the given angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
