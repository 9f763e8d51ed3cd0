"""Selectors that score a block by one vector for its queries and one or two for its keys."""

from dataclasses import dataclass

from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import choice
from masks.spec import call_text
from sparseflash.select.base import (
    BlockSelector,
    budget,
    check_blocks,
    check_masks,
    extent_text,
    fraction,
    limits,
)
from sparseflash.select.choose import Rule
from sparseflash.select.pool import dot, pool_both

POOLS = ("mean", "max", "bound")
# max(q min k, q max k) is q max k where q > 0, and q min k elsewhere
KINDS_OF = {"bound": (["positive", "negative"], ["max", "min"])}


def top_k(
    k: int | float,
    pool: str = "mean",
    block_size: int | tuple[int, int] = 128,
    *,
    within: Mask | BlockMask | None = None,
    always: Mask | BlockMask | None = None,
) -> "Pooled":
    """The k best key blocks of every query block.

    Args:
        k: how many, or as a float the share of those that `within` leaves to the row. Rows with
            fewer take them all.
        pool: the score of a block. "mean": mean query times mean key (as in SpargeAttn,
            arXiv:2502.18137, and the block-sparse heads of MInference, arXiv:2407.02490); "max":
            the same of the maxima in every dimension; "bound": no key inside scores higher with
            the mean query, sum over d of max(q_d min k_d, q_d max k_d) (Quest, arXiv:2406.10774,
            which asks for every query by itself).
        block_size: tokens, one size or (block_q, block_k).
        within: the pairs that may be allowed at all, such as `causal()`.
        always: blocks that it touches are taken first, as far as `within` leaves them, and count
            among the k (if they are more than k, they all stay). `local(0)` is the diagonal.

    Reads q and k once. Among equal scores the first block wins. ValueError for arguments out of
    range.
    """
    block_size = _checked(pool, block_size, within, always)
    rule = budget("k", k)
    options = {"pool": (pool, "mean"), "block_size": (extent_text(block_size), 128)}
    text = call_text("top_k", k, **options, within=(within, None), always=(always, None))
    return Pooled(text, block_size, within, rule, always, pool)


def mass(
    threshold: float,
    pool: str = "mean",
    block_size: int | tuple[int, int] = 128,
    *,
    least: int = 1,
    most: int | None = None,
    within: Mask | BlockMask | None = None,
    always: Mask | BlockMask | None = None,
) -> "Pooled":
    """As few key blocks as hold `threshold` of the attention that pooled scores promise.

    The probabilities of a row are softmax(D ** -0.5 * score) over the blocks that `within` leaves;
    those of `always` are taken first, then the likeliest, until their sum reaches `threshold`: at
    least one block, and between `least` and `most` blocks. After the query-aware pattern of
    FlexPrefill (arXiv:2502.20766) and SpargeAttn (arXiv:2502.18137). The rest is as in `top_k`.
    """
    block_size = _checked(pool, block_size, within, always)
    least, most = limits(least, most)
    rule = Rule("mass", fraction("threshold", threshold), least, most)
    options = {"pool": (pool, "mean"), "block_size": (extent_text(block_size), 128)}
    options |= {"least": (least, 1), "most": (most, None)}
    text = call_text("mass", threshold, **options, within=(within, None), always=(always, None))
    return Pooled(text, block_size, within, rule, always, pool)


def _checked(kind, block_size, within, always) -> tuple[int, int]:
    choice("pool", kind, POOLS)
    check_masks(within=within, always=always)
    return check_blocks(block_size)


@dataclass(frozen=True, repr=False, eq=False)
class Pooled(BlockSelector):
    """`top_k` and `mass`."""

    pool: str

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        kinds = KINDS_OF.get(self.pool, ([self.pool], [self.pool]))
        (block_q, block_k), (q_kinds, k_kinds) = self.block_size, kinds
        q_pooled, k_pooled = pool_both(q, block_q, q_kinds, k, block_k, k_kinds)
        return dot(q_pooled, k_pooled, q.shape[-1] ** -0.5)
