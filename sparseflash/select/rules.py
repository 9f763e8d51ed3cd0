"""How many blocks a row takes, and which blocks it may take."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from masks.checks import integer


@dataclass(frozen=True)
class Rule:
    """How many blocks of a row are taken, the best first.

    count: `value` blocks;
    share: that share of the candidates, rounded up;
    mass: the fewest blocks whose probabilities sum to `value`;
    level: the blocks of a probability of at least `value`.
    `min_blocks` and `max_blocks` bound the number for mass and level.
    """

    kind: Literal["count", "share", "mass", "level"]
    value: float
    min_blocks: int = 1
    max_blocks: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether the number of blocks is known without the scores."""
        return self.kind in ("count", "share")


class Candidates(NamedTuple):
    """The blocks that rows may take, on the device. An extent of 1 means the same for all."""

    codes: Tensor  # int32 (B, H, rows, cols): the code of a block once taken; EMPTY: not allowed
    bits: Tensor  # int32 (T, block_q, words)
    forced: Tensor | None  # int8 (B, H, rows, cols): taken before all others
    low: Tensor  # int32 (B, H, rows): the fewest blocks of a row
    high: Tensor  # int32 (B, H, rows): the most blocks of a row
    max_blocks: int  # the sum of `high`


def budget(name: str, value: Any) -> Rule:
    """The rule of a number of blocks, at least 1, or of a share of them in (0, 1]."""
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: give a share in (0, 1], or a number of blocks")
        return Rule("share", value)
    return Rule("count", integer(name, value, min=1))


def adaptive(
    kind: Literal["mass", "level"], name: str, value: Any, min_blocks: Any, max_blocks: Any
) -> Rule:
    """The rule of a probability in (0, 1], with bounds on the blocks of a row."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}: give a number in (0, 1]")
    min_blocks = integer("min_blocks", min_blocks, min=1)
    if max_blocks is not None:
        max_blocks = integer("max_blocks", max_blocks, min=min_blocks)
    return Rule(kind, float(value), min_blocks, max_blocks)
