"""Selectors that score a block by pooled vectors of its queries and its keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import block_sizes, choice, integer
from sparseflash.checks import is_number
from sparseflash.kernels.common.device import kernels_of, on_nvidia
from sparseflash.select.base import BlockSelector, Rule, budget, selector

POOLS = {  # kinds of the queries' vector and of the keys'
    "mean": (["mean"], ["mean"]),
    "max": (["max"], ["max"]),
    # max(q min k, q max k) is q max k where q > 0, and q min k elsewhere
    "bound": (["positive", "negative"], ["max", "min"]),
}


@dataclass(frozen=True, repr=False, eq=False)
class Pooled(BlockSelector):
    """The selectors of `top_k` and `mass`."""

    pool: str

    def __post_init__(self) -> None:
        choice("pool", self.pool, tuple(POOLS))
        super().__post_init__()

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        (block_q, block_k), (q_kinds, k_kinds) = self.block_size, POOLS[self.pool]
        q_pooled, k_pooled = pool((q, block_q, q_kinds), (k, block_k, k_kinds))
        return dot(q_pooled, k_pooled, q.shape[-1] ** -0.5)

    def summary(self, k: Tensor) -> Tensor:
        return pool((k, self.block_size[1], POOLS[self.pool][1]))[0]

    def compare(self, q: Tensor, summary: Tensor) -> Tensor:
        (pooled,) = pool((q, self.block_size[0], POOLS[self.pool][0]))
        return dot(pooled, summary, q.shape[-1] ** -0.5)


@selector
def top_k(
    k: int | float,
    pool: str = "mean",
    block_size: int | tuple[int, int] = 128,
    *,
    within: Mask | BlockMask | None = None,
    always: Mask | BlockMask | None = None,
) -> Pooled:
    """Return the k best key blocks of every query block.

    Args:
        k: how many, or as a float the share of the blocks that `within` leaves to the row. Rows
            with fewer blocks take them all.
        pool: the score of a block. "mean": mean query times mean key (as in SpargeAttn,
            arXiv:2502.18137, and the block-sparse heads of MInference, arXiv:2407.02490). "max":
            the same of the maxima in every dimension. "bound": the highest score that a key of
            the block can have with the mean query, the sum over d of
            max(q_d min k_d, q_d max k_d). Quest (arXiv:2406.10774) computes it for each query.
        block_size: tokens, one size or (block_q, block_k).
        within: the pairs that may be allowed at all, such as `causal()`.
        always: blocks that are taken first, as far as `within` has them, and count among the k.
            If they are more than k, they all stay. `local(0)` is the diagonal.

    Reads q and k once. Among equal scores the first block wins. Raises ValueError for arguments
    out of range.
    """
    return Pooled(block_sizes(block_size), within, budget("k", k), always, pool)


@selector
def mass(
    threshold: float,
    pool: str = "mean",
    block_size: int | tuple[int, int] = 128,
    *,
    min_blocks: int = 1,
    max_blocks: int | None = None,
    within: Mask | BlockMask | None = None,
    always: Mask | BlockMask | None = None,
) -> Pooled:
    """Return the fewest key blocks that hold `threshold` of the attention estimated from pooled
    scores.

    The probabilities of a row are softmax(D ** -0.5 * score) over the blocks of `within`. The
    blocks of `always` come first, then the most probable, until the sum reaches `threshold`. A row
    takes between `min_blocks` and `max_blocks`. After the query-aware pattern of FlexPrefill
    (arXiv:2502.20766) and SpargeAttn (arXiv:2502.18137). The rest is as in `top_k`.
    """
    if not is_number(threshold) or not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold!r}: give a number in (0, 1]")
    min_blocks = integer("min_blocks", min_blocks, min=1)
    if max_blocks is not None:
        max_blocks = integer("max_blocks", max_blocks, min=min_blocks)
    rule = Rule("mass", float(threshold), min_blocks, max_blocks)
    return Pooled(block_sizes(block_size), within, rule, always, pool)


KINDS = ("mean", "max", "min")
PARTS = ("positive", "negative")  # the mean where it is above 0, and where it is below
SCORES_AT_ONCE = 1 << 26  # bounds the memory of scores that are computed part by part


def pool(*inputs: tuple[Tensor, int, Sequence[str]]) -> tuple[Tensor, ...]:
    """Pools one or two (x, block, kinds), in one launch on a GPU that reads each x once.

    Returns (B, H, blocks, kinds * D) for each x (B, H, N, D): the kinds end to end, over the
    tokens that exist. float64 stays float64, all else comes out in float32.
    """
    if all(
        on_nvidia(x) and x.dtype != torch.float64 and len(set(kinds)) == len(kinds)
        for x, _, kinds in inputs
    ):
        return kernels_of("select").pool_blocks(*inputs)
    return tuple(pool_torch(*given) for given in inputs)


def pool_torch(x: Tensor, block: int, kinds: Sequence[str]) -> Tensor:
    """`pool` of one tensor in plain torch."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    whole = x.shape[2] // block * block
    blocks = x[:, :, :whole].unflatten(2, (-1, block)) if whole else x[:, :, :0, None]
    rest = x[:, :, whole:]
    pooled = []
    for kind in kinds:
        reduce = {"max": torch.amax, "min": torch.amin}.get(kind, torch.mean)
        parts = [reduce(blocks, 3)] if whole else []
        parts += [reduce(rest, 2, keepdim=True)] if rest.shape[2] else []
        found = torch.cat(parts, 2)
        if kind in PARTS:
            found = found.clamp(min=0) if kind == "positive" else found.clamp(max=0)
        pooled.append(found)
    return torch.cat(pooled, -1)


def dot(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """scale q (B, H, n, D) times k (B, H_kv, m, D) transposed: (B, H, n, m); heads in groups."""
    batch, heads, n, dim = q.shape
    grouped = q.reshape(batch * k.shape[1], -1, dim)
    keys = k.flatten(0, 1).mT
    with torch.autocast(q.device.type, enabled=False):  # which would round the means
        found = torch.baddbmm(grouped.new_empty(()), grouped, keys, beta=0, alpha=scale)
    return found.view(batch, heads, n, k.shape[2])
