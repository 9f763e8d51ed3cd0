"""Cells that see their neighbours: meshes, pixels of a sphere, communities of a graph."""

from itertools import chain, pairwise
from operator import index
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.leaves.lengths import Cuts, read_lengths
from masks.patterns.documents import Documents
from masks.registry import canonical, pattern
from masks.runs import Bools, Ints, distinct, quotient

__all__ = ["cells"]
SECTION = "Segments"  # of the gallery


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
    neighbours. The cells of HEALPix in nested order, those of a grid along a space-filling curve,
    and communities of a graph are others. Where cells that are near each other are also near in the
    sequence, there are few blocks.

    Cell i of m_i tokens allows m_i * (m_i + the sum of m_j over its neighbours j) pairs.

    Args:
        sizes: tokens of every cell, >= 0, in the order of the tokens; together at least the length
            that is built. From the cell of every token it is `np.bincount(cell)`, after a sort by
            it: `order = np.argsort(cell, kind="stable")`.
        neighbours: for every cell the numbers of those that it sees, or a sparse matrix of SciPy
            in the form CSR, cells x cells. It need not be symmetric.

    The text holds up to 64 numbers; more show as a digest, which `parse` cannot read.
    """
    rows = read_lengths("sizes", sizes)
    if len(rows) > 1:
        raise ValueError(f"sizes has {len(rows)} lists: give one number for every cell")
    count = len(rows[0])  # pyright: ignore[reportGeneralTypeIssues]
    lists = _lists(neighbours, count)
    cell = np.repeat(np.arange(count), [*map(len, lists)])
    seen = np.fromiter(chain.from_iterable(lists), np.int64, len(cell))
    own = np.arange(count) * (count + 1)
    cuts, label = Cuts.of(rows), np.arange(count)
    pairs = distinct(np.append(cell * count + seen, own))
    mask = Cells(cuts, cuts, label, label, False, pairs)
    return canonical(mask, sizes=rows[0], neighbours=lists)  # pyright: ignore


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


class Cells(Documents):
    """Documents that see some others."""

    pairs: Ints  # ascending: number of a cell * cells + that of one that it sees
    _in_order = False  # pyright: ignore[reportAssignmentType]

    def _sees(self, q_label: Ints, k_label: Ints) -> Bools:
        wanted = q_label * len(self.q_label) + k_label
        at = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return self.pairs[at] == wanted

    def _pairs(self) -> tuple[Ints, Ints]:
        return quotient(self.pairs, len(self.q_label))
