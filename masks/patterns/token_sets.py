"""Sets of tokens as ascending intervals, and the arguments that name them."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from masks.checks import FAR, integer
from masks.runs import Bools, Ints


class TokenSet(NamedTuple):
    """Tokens starts[i] <= x < stops[i]; the intervals are disjoint and ascend."""

    starts: Ints
    stops: Ints

    @classmethod
    def between(cls, start: int, stop: int) -> "TokenSet":
        """start <= x < stop; none when that is empty."""
        interval = np.array([[start], [stop]], np.int64)
        return cls(*interval[:, : stop > start])

    @classmethod
    def of(cls, tokens: tuple[int, ...]) -> "TokenSet":
        """Ascending tokens."""
        x = np.array(tokens, np.int64)
        return cls(x[np.diff(x, prepend=-2) > 1], x[np.diff(x, append=2 * FAR) > 1] + 1)

    def contains(self, x: Ints) -> Bools:
        """Whether the tokens are in the set, elementwise."""
        return np.searchsorted(self.starts, x, "right") > np.searchsorted(self.stops, x, "right")

    def count(self, first: Ints, last: Ints) -> Ints:
        """Tokens of the set among first..last, elementwise."""
        return self._below(last + 1) - self._below(first)

    def _below(self, x: Ints) -> Ints:
        """Tokens of the set before x >= 0."""
        before = np.append(0, np.cumsum(self.stops - self.starts))
        begun = np.searchsorted(self.starts, x, "right")
        beyond = np.append(0, self.stops)[begun] - x  # of the last interval begun
        return before[begun] - np.maximum(beyond, 0)


def ascending(name: str, values: Any, *, least: int | None = 0) -> tuple[int, ...]:
    """`values`, different integers >= least (any where that is None), as an ascending tuple."""
    try:
        values = tuple(values)
    except TypeError:
        raise ValueError(f"{name} is {values!r}: give a tuple of integers") from None
    least = -FAR if least is None else least
    numbers = sorted(integer(f"a number in {name}", value, least=least) for value in values)
    for number, following in pairwise(numbers):
        if number == following:
            raise ValueError(f"{name} has {number} twice: give every number once")
    return tuple(numbers)
