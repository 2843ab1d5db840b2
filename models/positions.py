"""Position schemes: how a score depends on where the query and the key stand.

A scheme may rotate queries and keys before their product, and may then adjust the score. Both act on
:class:`Coordinates`, which are read off the tokens themselves, so that a model needs nothing but token ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.config import AttentionConfig


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
    """No positions (NoPE): the causal mask alone tells order. Base of the others."""

    rotates = False

    def __init__(self, config: AttentionConfig, d_head: int):
        self.config = config
        self.d_head = d_head

    def angles(self, at: Coordinates) -> Float[Tensor, "batch pos pair"]:
        """The angle in radians by which each pair of dimensions is rotated."""
        raise NotImplementedError(f"scheme {self.config.scheme!r} does not rotate")

    def factor(self, queries: Coordinates, keys: Coordinates) -> Float[Tensor, "batch query key"] | None:
        """What the score is multiplied by, or None for 1."""
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


SCHEMES: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "rotary": Rotary,
    "rotary2d": Rotary2D,
    "counters": Counted,
}


def rotate(
    x: Float[Tensor, "batch pos head d_head"],
    cos: Float[Tensor, "batch pos 1 pair"],
    sin: Float[Tensor, "batch pos 1 pair"],
) -> Float[Tensor, "batch pos head d_head"]:
    """Turn dimension pairs ``(i, i + d_head/2)`` by the given angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
