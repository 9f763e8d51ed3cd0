"""Segments of equal length, and cells that see their neighbours."""

from itertools import chain, pairwise, product
from operator import index
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.geometry import rectangle_runs
from masks.leaves.leaf import ByLength, Leaf
from masks.patterns.bands import causal
from masks.patterns.documents import cover, flat, read_lengths
from masks.predicate.where import Rule
from masks.registry import canonical, pattern
from masks.runs import Bools, Grid, Ints, Runs, distinct, quotient

__all__ = ["block_causal", "block_diagonal", "block_diffusion", "cells", "longnet"]
SECTION = "Segments"  # of the gallery


@pattern(
    "block_diagonal(48)", "chunks that see themselves", "(N // s)*s**2 + (N % s)**2", "", {"s": 48}
)
def block_diagonal(size: int, offset: int = 0) -> Mask:
    """Token blocks that see themselves only: (q + offset) // size == (k + offset) // size.

    This is "local attention" in Long Range Arena (arXiv 2011.04006; there size is 50), and windows
    that do not overlap elsewhere; two of them, the second with offset size // 2, make the shifted
    windows of Swin (arXiv 2103.14030) in one dimension. With `& causal()` a block is causal inside.

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
    with `block_diffusion`. The same as `block_diagonal(size) | causal()`, which is its text.
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
    """Return the training mask of block diffusion (BD3-LM, arXiv 2503.09573).

    The sequence has two halves: a noisy copy, and the clean tokens after it. Both are cut into
    token blocks of `size`, the last of which may be shorter. A noisy block sees itself, and the
    clean blocks strictly before it. The clean half is block-causal, and never sees the noisy one.
    So one pass trains every block. `block_causal` is the mask for one stream.

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
    k % segment leave the remainder `offset` modulo `ratio`. So one head alone leaves 1 - 1/ratio of
    the queries with nothing to see.

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


@pattern(
    "cells((32,) * 8, ((1, 7), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 0)))",
    "cells of a mesh or sphere, or communities of a graph, that see their neighbours",
    "N*3*s",
    "2312.15796",
    {"s": 32},
    digest=True,
)
def cells(sizes: Any, neighbours: Any) -> Mask:
    """Tokens in cells that see themselves and the cells next to them.

    The tokens are sorted by cell: key k is allowed for query q when the cell of k is that of q or
    one of its neighbours. In GenCast (arXiv 2312.15796) a node of an icosahedral mesh attends to
    itself and to the nodes within 32 hops: every cell has one token there, and those nodes are its
    neighbours. Pixels of a sphere in nested order, those of a grid along a space-filling curve, and
    communities of a graph are others. Where cells that are near each other are also near in the
    sequence, there are few blocks.

    Args:
        sizes: tokens of every cell, >= 0, in the order of the tokens; together at least the length
            that is built. From the cell of every token it is `np.bincount(cell)`, after a sort by
            it: `order = np.argsort(cell, kind="stable")`.
        neighbours: for every cell the numbers of those that it sees, or a sparse matrix of SciPy
            in the form CSR, cells x cells. It need not be symmetric.
    """
    rows = read_lengths("sizes", sizes)
    if len(rows) > 1:
        raise ValueError(f"sizes has {len(rows)} lists: give one number for every cell")
    own_sizes = flat(rows)
    count = len(own_sizes)
    lists = _lists(neighbours, count)
    own = np.arange(count)
    cell = np.append(own, np.repeat(own, [*map(len, lists)]))
    seen = np.append(own, np.fromiter(chain.from_iterable(lists), np.int64, len(cell) - count))
    mask = Cells(np.append(0, np.cumsum(own_sizes)), distinct(cell * count + seen))
    return canonical(mask, sizes=own_sizes, neighbours=lists)


def _lists(neighbours: Any, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours of every cell; ValueError where they are none."""
    if getattr(neighbours, "format", "") == "csr":
        ends, numbers = neighbours.indptr.tolist(), neighbours.indices.tolist()
        neighbours = [numbers[first:stop] for first, stop in pairwise(ends)]
    try:
        lists = tuple(tuple(map(index, cells)) for cells in neighbours)
    except TypeError:
        raise ValueError(
            f"neighbours is {type(neighbours).__name__}: give a list of integers for every cell, or"
            " a CSR matrix of SciPy"
        ) from None
    if len(lists) != count:
        raise ValueError(f"neighbours has {len(lists)} lists and sizes {count} cells: give both")
    for cell, numbers in enumerate(lists):
        if numbers and not 0 <= min(numbers) <= max(numbers) < count:
            wrong = next(number for number in numbers if not 0 <= number < count)
            raise ValueError(f"neighbours of cell {cell} have {wrong}: give numbers 0..{count - 1}")
    return lists


class Cells(Leaf):
    """Stretches of the sequence that see some others."""

    start: Ints  # of every cell, and the end
    pairs: Ints  # ascending: number of a cell * cells + that of one it sees

    def _cell(self, token: Ints) -> Ints:
        return np.searchsorted(self.start, token, "right") - 1

    def _sees(self, i: Ints, j: Ints) -> Bools:
        wanted = i * (len(self.start) - 1) + j
        at = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return self.pairs[at] == wanted

    def runs(self, grid: Grid) -> Runs:
        cover("cells", grid, int(self.start[-1]), int(self.start[-1]))
        i, j = quotient(self.pairs, len(self.start) - 1)
        start, stop = self.start[:-1], self.start[1:]
        return rectangle_runs(grid, np.zeros_like(i), start[i], stop[i], start[j], stop[j])

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return self._sees(self._cell(q), self._cell(k))

    def token_kinds(self, side: str, n: int) -> Ints:
        return self._cell(np.arange(n))

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> list[Ints]:
        # Of blocks with one or two cells a side: where they are cut, and which see each other.
        q = self._cell(grid.q_first[row]), self._cell(grid.q_last[row])
        k = self._cell(grid.k_first[col]), self._cell(grid.k_last[col])
        number = np.clip(self.start[q[1]] - grid.q_token(row), 0, grid.block_q)
        cut = np.clip(self.start[k[1]] - grid.k_token(col), 0, grid.block_k)
        number = number * (grid.block_k + 1) + cut
        for i, j in product(q, k):
            number = number * 2 + self._sees(i, j)
        few = (q[1] <= q[0] + 1) & (k[1] <= k[0] + 1)
        others = super().signature(grid, s, row, col)
        return [np.where(few, number, -1), *[np.where(few, 0, column) for column in others]]
