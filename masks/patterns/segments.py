"""Segments of equal length: block-diagonal, block-causal, block diffusion, LongNet."""

from typing import Any

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.leaf import ByLength
from masks.patterns.bands import causal
from masks.predicate.where import Rule
from masks.registry import pattern
from masks.runs import Grid

__all__ = ["block_causal", "block_diagonal", "block_diffusion", "longnet"]
SECTION = "Segments"  # of the gallery


@pattern(
    "block_diagonal(48)", "chunks that see themselves", "(N // s)*s**2 + (N % s)**2", "", {"s": 48}
)
def block_diagonal(size: int, offset: int = 0) -> Mask:
    """Token blocks that see themselves only: (q + offset) // size == (k + offset) // size.

    This is "local attention" in Long Range Arena (arXiv 2011.04006; there size is 50), and windows
    that do not overlap elsewhere; two of them, the second with offset size // 2, make the shifted
    windows of Swin (arXiv 2103.14030) in one dimension. With `& causal()` a block is causal inside.
    With blocks of `size` tokens and no offset, n of n x n are allowed.

    Args:
        size: tokens of a token block, >= 1.
        offset: tokens that the first token block is short of, 0 <= offset < size.
    """
    size = integer("size", size, min=1)
    offset = integer("offset", offset, min=0, max=size - 1)
    return Rule(lambda q, k: (q + offset) // size == (k + offset) // size)


@pattern(
    "block_causal(32)",
    "chunks that see themselves and those before",
    "N*(N + s)/2",
    "2503.09573",
    {"s": 32},
)
def block_causal(size: int) -> Mask:
    """Token blocks that see themselves and all before them: k // size <= q // size.

    This is the mask of block diffusion (arXiv 2503.09573) in one stream, as it samples; it trains
    with `block_diffusion`. The same as `block_diagonal(size) | causal()`, which is its text. With
    blocks of `size` tokens, n(n+1)/2 of n x n are allowed, all of them full.
    """
    return block_diagonal(size) | causal()


@pattern(
    "block_diffusion(16)",
    "training of block diffusion: the noisy sequence, and the clean one after it",
    "N/2*(N/2 + s)",
    "2503.09573",
    {"s": 16},
)
def block_diffusion(size: int) -> Mask:
    """Return the training mask of block diffusion (BD3-LM, arXiv 2503.09573), for [noisy; clean]
    tokens.

    The sequence has two halves: a noisy copy, and the clean tokens after it. Both are cut into
    token blocks of `size`, the last of which may be shorter. A noisy block sees itself, and the
    clean blocks strictly before it. The clean half is block-causal, and never sees the noisy one.
    So one pass trains every block. `block_causal` is the mask for one stream.

    With halves of m tokens, which `size` divides, m(m + size) of 2m x 2m pairs are allowed.

    Args:
        size: tokens of a token block, >= 1.

    Raises:
        ValueError: at `build`, an odd length, or other queries than keys.
    """
    size = integer("size", size, min=1)

    def at(grid: Grid) -> Rule:
        if grid.n_q != grid.n_k or grid.n_q % 2:
            raise ValueError(
                f"n_q is {grid.n_q} and n_k {grid.n_k}, but block_diffusion({size}) has two halves,"
                " noisy and clean: give one even number for both"
            )
        half = grid.n_q // 2

        def rule(q: Any, k: Any) -> Any:
            q_block, k_block = q % half // size, k % half // size
            own = ((q < half) == (k < half)) & (q_block == k_block)
            return own | ((k >= half) & (k_block < q_block))

        return Rule(rule)

    return ByLength(at)


@pattern(
    "longnet(64, 4)", "every 4th token of a segment", "N*w/r**2", "2307.02486", {"w": 64, "r": 4}
)
def longnet(segment: int, ratio: int, offset: int = 0, *, per_head: bool = False) -> Mask:
    """Every `ratio`-th token of a segment sees the others of its segment that are chosen with it.

    Key k is allowed for query q when q // segment == k // segment and both q % segment and
    k % segment leave the remainder `offset` modulo `ratio`. So n * segment / ratio**2 pairs of
    n x n are allowed where ratio divides segment and segment divides n, and one head alone leaves
    1 - 1/ratio of the queries with nothing to see.

    The paper runs several (segment, ratio) and adds the outputs weighted by their softmax sums. A
    union of masks is not quite that: the paper counts a pair twice that two of them allow.

    Args:
        segment: tokens of a segment, >= 1.
        ratio: dilation, >= 1; 1 gives `block_diagonal(segment)`.
        offset: 0 <= offset < ratio.
        per_head: head h has offset (offset + h) % ratio instead, so that `ratio` heads cover every
            query; `build` takes heads=ratio unless it is given a multiple of that.
    """
    segment, ratio = integer("segment", segment, min=1), integer("ratio", ratio, min=1)
    offset = integer("offset", offset, min=0, max=ratio - 1)

    def rule(h: Any, q: Any, k: Any) -> Any:
        chosen = (offset + h) % ratio
        both = (q % segment % ratio == chosen) & (k % segment % ratio == chosen)
        return (q // segment == k // segment) & both

    if flag("per_head", per_head) and ratio > 1:
        return Rule(rule, "hqk", ratio)
    return Rule(lambda q, k: rule(0, q, k))
