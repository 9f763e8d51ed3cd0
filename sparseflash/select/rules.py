"""How many blocks a row takes, and which blocks it may take."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_lists import EMPTY, FULL
from masks.block_mask import BlockMask
from masks.checks import integer
from sparseflash.cache import cached
from sparseflash.select.static import built, grid_codes, heads_of, static_codes, to_device


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
    """Return the rule of a number of blocks, at least 1, or of a share of them in (0, 1]."""
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: give a share in (0, 1], or a number of blocks")
        return Rule("share", value)
    return Rule("count", integer(name, value, min=1))


def adaptive(
    kind: Literal["mass", "level"], name: str, value: Any, min_blocks: Any, max_blocks: Any
) -> Rule:
    """Return the rule of a probability in (0, 1], with bounds on the blocks of a row."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}: give a number in (0, 1]")
    min_blocks = integer("min_blocks", min_blocks, min=1)
    if max_blocks is not None:
        max_blocks = integer("max_blocks", max_blocks, min=min_blocks)
    return Rule(kind, float(value), min_blocks, max_blocks)


@cached
def candidates_of(
    rule: Rule,
    within: Mask | BlockMask | None,
    always: Mask | BlockMask | None,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int | None,
    device: torch.device,
) -> Candidates:
    """Return the blocks of `within`, those of `always` first; only the first call copies to the
    device.

    heads: of q, None where neither mask differs from head to head.
    """
    shape = (1, 1, -(-n_q // block_size[0]), -(-n_k // block_size[1]))
    if within is None:
        host = np.full(shape, FULL, np.int32)
        codes = to_device(host, device)
        bits = codes.new_empty((0, block_size[0], -(-block_size[1] // 32)))
    else:
        given = (within, n_q, n_k, block_size, heads_of(within, heads))
        host = grid_codes(built(*given))
        codes, bits, _ = static_codes(*given, device)
    taken, forced = np.zeros((1, 1, 1, 1), bool), None
    if always is not None:
        taken = grid_codes(built(always, n_q, n_k, block_size, heads_of(always, heads))) != EMPTY
        forced = to_device(taken.astype(np.int8), device)
    low, high = _bounds(rule, host != EMPTY, taken)
    on_device = (to_device(low, device), to_device(high, device))
    return Candidates(codes, bits, forced, *on_device, int(high.sum()))


def _bounds(rule: Rule, candidate: np.ndarray, forced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fewest and the most blocks of each row, int32 (B, H, rows), forced blocks
    included.
    """
    candidates, forced = candidate.sum(-1), (candidate & forced).sum(-1)
    if rule.kind == "count":
        low = high = int(rule.value)
    elif rule.kind == "share":
        low = high = np.ceil(rule.value * candidates - 1e-9)
    else:
        low, high = rule.min_blocks, rule.max_blocks or candidates
    low = np.minimum(np.maximum(low, forced), candidates)
    high = np.minimum(np.maximum(high, low), candidates)
    return low.astype(np.int32), high.astype(np.int32)
