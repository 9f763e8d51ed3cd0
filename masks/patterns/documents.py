"""Documents packed into one sequence, and cells that see their neighbours."""

from functools import cached_property
from itertools import chain, pairwise, product
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.geometry import by_pairs, rectangle_runs
from masks.leaves.leaf import Leaf
from masks.leaves.lengths import FAR, Cuts, Lengths, batch_extent, flat, read_both, read_lengths
from masks.registry import canonical, pattern
from masks.runs import Bools, Grid, Ints, Runs, distinct, expand, quotient
from masks.types import Changes

__all__ = ["cells", "documents", "documents_from_ids", "documents_from_offsets", "shared_prefix"]
SECTION = "Segments"  # of the gallery

MAX_PAIRS = 1 << 24  # of pieces of documents that see each other
MAX_TOKENS = 512  # of a block, so that its signature fits one int64


@pattern("documents((60, 100, 96))", "a packed batch", "60**2 + 100**2 + 96**2", digest=True)
def documents(lengths: Any, key_lengths: Any = None) -> Mask:
    """Documents that follow one another and see themselves only: id[q] == id[k].

    With `& causal()` it is the mask of packed causal training (arXiv 2107.02027 packs like this);
    documents of whole blocks, of a, b, .. blocks, allow a*a + b*b + .. blocks, all full.

    Args:
        lengths: tokens of every document, >= 0, as a list, array or tensor; or one such list for
            every batch entry, and the mask then has their number as `batch`. Their sum must be at
            least the length that is built; tokens after it are cut off.
        key_lengths: the same for the keys, where they are others (cross attention of packed
            sequences, like the two `cu_seqlens` of FlashAttention's varlen functions).

    The text holds up to 64 lengths; a longer list shows as a digest, which `parse` cannot read.
    """
    rows, key_rows = read_both(lengths, key_lengths)
    own = np.arange(sum(map(len, rows)))
    mask = Cells.of(rows, key_rows, own, own)
    other = None if key_rows == rows else flat(key_rows)
    return canonical(mask, lengths=flat(rows), key_lengths=other)


@pattern(
    "documents_from_offsets((0, 60, 160, 256))",
    "the same from `cu_seqlens`",
    "60**2 + 100**2 + 96**2",
)
def documents_from_offsets(offsets: Any, key_offsets: Any = None) -> Mask:
    """`documents` from the token where each begins, and the end: [0, 3, 8] means lengths 3 and 5.

    These are the `cu_seqlens` of FlashAttention's varlen functions: ascending from 0.
    """
    key_lengths = None if key_offsets is None else _differences("key_offsets", key_offsets)
    return documents(_differences("offsets", offsets), key_lengths)


@pattern(
    "documents_from_ids((0,) * 60 + (1,) * 100 + (0,) * 96)",
    "the same from a number for every token; a document may have several pieces",
    "156**2 + 100**2",
    digest=True,
)
def documents_from_ids(ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """`documents` from the number of every token's document: key k is allowed when id[q] == id[k].

    Args:
        ids: integers, (n,), or (batch, n). They need not be sorted: a document may have several
            pieces.
        key_ids: the same for the keys, where they are others.

    Raises:
        ValueError: the pieces are so small and so many that no mask of blocks helps.
    """
    rows = _read_ids("ids", ids)
    key_rows = rows if key_ids is None else _read_ids("key_ids", key_ids)
    if len(rows) != len(key_rows):
        raise ValueError(f"ids has {len(rows)} rows and key_ids {len(key_rows)}: give as many")
    names = np.unique(np.append(rows, key_rows))
    lengths, q_label = _pieces(rows, names)
    key_lengths, k_label = _pieces(key_rows, names)
    in_order = np.array_equal(q_label, k_label) and len(np.unique(q_label)) == len(q_label)
    if in_order:
        return documents(lengths, None if key_ids is None else key_lengths)
    order = np.argsort(k_label, kind="stable")
    left, right = (np.searchsorted(k_label[order], q_label, side) for side in ("left", "right"))
    if (pairs := int((right - left).sum())) > MAX_PAIRS:
        raise ValueError(
            f"the ids make {pairs} pairs of pieces that see each other: sort the tokens by id"
        )
    i, j = expand(left, right)
    mask = Cells.of(lengths, key_lengths, i, order[j])
    other = None if key_ids is None else flat(key_rows.tolist())
    return canonical(mask, ids=flat(rows.tolist()), key_ids=other)


@pattern("shared_prefix(32, (100, 124))", "several continuations of one prompt", digest=True)
def shared_prefix(prefix: int, lengths: Any) -> Mask:
    """Return a prefix that all see, and documents after it that see the prefix and themselves.

    The prefix sees itself only. With `& causal()` it is one prompt with several continuations, as
    in attention-gym's `generate_shared_prefix_mask_mod` and Hydragen (arXiv 2402.05099).

    Args:
        prefix: its tokens, >= 0.
        lengths: tokens of the documents, as for `documents`; with the prefix, at least the
            length that is built.
    """
    prefix = integer("prefix", prefix, min=0)
    rows = read_lengths("lengths", lengths)
    whole = tuple((prefix, *row) for row in rows)
    counts = np.array([len(row) for row in whole])
    own, first = np.arange(counts.sum()), np.repeat(np.cumsum(counts) - counts, counts)
    mask = Cells.of(whole, whole, np.append(own, own), np.append(own, first))
    return canonical(mask, lengths=flat(rows))


def _differences(name: str, offsets: Any) -> list[list[int]]:
    rows = []
    for row in read_lengths(name, offsets):
        if row[0] != 0 or any(b < a for a, b in pairwise(row)):
            raise ValueError(f"{name} must ascend from 0, not go {row[:8]}: give cumulative sums")
        rows.append([b - a for a, b in pairwise(row)])
    return rows


def _read_ids(name: str, ids: ArrayLike) -> NDArray[np.integer]:
    data = np.asarray(ids)
    if data.dtype.kind not in "iu" or data.ndim not in (1, 2) or data.size == 0:
        raise ValueError(
            f"{name} are {data.dtype} of shape {data.shape}: give integers (n,) or (batch, n)"
        )
    return np.atleast_2d(data)


def _pieces(rows: NDArray[np.integer], names: NDArray[np.integer]) -> tuple[Lengths, Ints]:
    """Return the stretches of equal ids: their lengths by entry, and their labels."""
    lengths, labels = [], []
    for entry, row in enumerate(rows):
        first = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        lengths.append(tuple(np.diff(first, append=len(row)).tolist()))
        labels.append(entry * FAR + np.searchsorted(names, row[first]))
    return tuple(lengths), np.concatenate(labels)


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
    own = np.arange(count)
    mask = Cells.of(rows, rows, np.append(cell, own), np.append(seen, own))
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


class Cells(Leaf):
    """Pieces of the sequence that see some others."""

    q: Cuts
    k: Cuts
    pairs: Ints  # ascending: number of a piece of queries * pieces of keys + that of one it sees

    @classmethod
    def of(cls, rows: Lengths, key_rows: Lengths, i: Ints, j: Ints) -> "Cells":
        """Return the mask of pieces of these lengths, of which piece i[x] sees piece j[x]."""
        q, k = Cuts.of(rows), Cuts.of(key_rows)
        return cls(q, k, distinct(i * len(k.start) + j))

    @property
    def batch(self) -> int | None:  # type: ignore[override]
        return batch_extent(self.q.tokens)

    @cached_property
    def _alone(self) -> bool:
        """Whether piece i of the queries sees piece i of the keys, and nothing else."""
        return np.array_equal(self.pairs, np.arange(len(self.q.start)) * (len(self.k.start) + 1))

    def _sees(self, i: Ints, j: Ints) -> Bools:
        wanted = i * len(self.k.start) + j
        at = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return self.pairs[at] == wanted

    def runs(self, grid: Grid) -> Runs:
        self.q.cover("n_q", grid.n_q)
        self.k.cover("n_k", grid.n_k)
        i, j = quotient(self.pairs, len(self.k.start))
        entry = self.q.start[i] // FAR
        sides = (self.q.start[i], self.q.stop[i], self.k.start[j], self.k.stop[j])
        return rectangle_runs(grid, entry, *[token - entry * FAR for token in sides])

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        i, j = self.q.find(s, q), self.k.find(s, k)
        return i == j if self._alone else by_pairs(self._sees, i, j)

    def changes(self, grid: Grid) -> tuple[Changes, Changes]:
        def of(cuts: Cuts, n: int) -> Changes:
            begins = np.zeros((len(cuts.tokens), n), bool)
            entry, token = quotient(cuts.start, FAR)
            here = token < n
            begins[entry[here], token[here]] = True
            return lambda s, token: begins[s, token]

        return of(self.q, grid.n_q), of(self.k, grid.n_k)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        # The signature of a block of at most two pieces a side is where they are cut, and which of
        # them see each other. Documents see themselves, so only those on both sides count.
        if max(grid.block_q, grid.block_k) > MAX_TOKENS:
            return super().signature(grid, s, row, col)
        q_low, q_high = self.q.find(s, grid.q_first[row]), self.q.find(s, grid.q_last[row])
        k_low, k_high = self.k.find(s, grid.k_first[col]), self.k.find(s, grid.k_last[col])
        if self._alone:
            q_low = k_low = np.maximum(q_low, k_low)
            q_high = k_high = np.minimum(q_high, k_high)
        number = np.zeros(len(s), np.int64)
        for cuts, low, high, token, block in (
            (self.q, q_low, q_high, s * FAR + grid.q_token(row), grid.block_q),
            (self.k, k_low, k_high, s * FAR + grid.k_token(col), grid.block_k),
        ):
            for cut in (cuts.start[low], cuts.start[high], cuts.stop[high]):
                number = number * (block + 1) + np.clip(cut - token, 0, block)
        for i, j in product((q_low, q_high), (k_low, k_high)):
            number = number * 2 + self._sees(i, j)
        few = (q_high <= q_low + 1) & (k_high <= k_low + 1)
        return np.where(few, number, -1 - super().signature(grid, s, row, col))
