"""Which keys of the cache the new queries see: lists of key blocks, or none."""

from typing import NamedTuple

from torch import Tensor

import masks
from masks import BlockMask, Mask
from sparseflash.checks import check_extents
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, schedule_for

BLOCK = (64, 64)  # what a `Mask` is cut into: a query reads whole blocks
AnyMask = Mask | BlockMask | Schedule | None


class Bounds(NamedTuple):
    """Which keys each sequence of a call has, and where they are."""

    lengths: Tensor | None  # (B,), contiguous; None: all keys that there is room for
    starts: Tensor | None  # likewise, the first key; None: 0
    table: Tensor | None  # (B, pages of a sequence); with it, k and v are (pages, H_kv, page, D)


class Pattern(NamedTuple):
    """The lists of a mask, and how queries find theirs.

    schedule: None where the queries see all keys, or all up to their own position.
    from_end: query i is token length - n_q + i and takes the row of that token, not row i.
    causal: without a schedule, query i sees the keys up to its token.
    """

    schedule: Schedule | None
    from_end: bool
    causal: bool

    @property
    def heads(self) -> int:
        """Of the mask: 1, the key heads or the query heads."""
        return 1 if self.schedule is None else self.schedule.heads


def pattern_of(mask: AnyMask, problem: Problem, n: int) -> Pattern:
    """Return the pattern of a mask for a cache with room for n keys; problem: that of the call.

    Raises ValueError for a mask of other extents.
    """
    causal = isinstance(mask, Mask) and mask == masks.causal()
    if mask is None or causal:
        return Pattern(None, causal, causal)
    if isinstance(mask, Mask):
        heads = problem.kv_heads if mask.heads == problem.kv_heads else problem.heads
        extents = n, n, problem.batch, heads
        return Pattern(schedule_for(mask, *extents, problem.device, BLOCK), True, False)
    from_end = (mask.n_q, mask.n_k) == (n, n)
    if not from_end and (mask.n_q, mask.n_k) != (problem.n_q, n):
        raise ValueError(
            f"the mask is for {mask.n_q} queries and {mask.n_k} keys, the cache has room for {n}"
            f" keys: build it with mask.build({n}, {n}), or pass the Mask itself; a mask for"
            f" {problem.n_q} queries and {n} keys is taken row by row"
        )
    check_extents(mask, mask.n_q, mask.n_k, problem.batch, problem.heads, problem.kv_heads)
    if isinstance(mask, BlockMask):
        extents = mask.n_q, mask.n_k, problem.batch, mask.heads
        mask = schedule_for(mask, *extents, problem.device)
    return Pattern(mask, from_end, False)
