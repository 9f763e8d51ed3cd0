"""Rows of bits as 64-bit words, and the union of ranges of rows."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.runs import Bools, Ints

Words = NDArray[np.uint64]

FEW = 32  # rows: fewer are not worth a vectorised step


class _Level(NamedTuple):
    """Ranges of 2**k to 2**(k+1) - 1 rows: the union of two ranges of 2**k that may overlap."""

    steps: list[tuple[Ints, Ints, Ints]]  # (row, first, second): no row twice in a step
    busy: list[tuple[int, Ints]]  # (row, starts): what many ranges go to


class Ranges:
    """out[row] = the union of the rows first..stop - 1, for many (row, first, stop).

    The cost goes with the number of ranges, not with their lengths.
    """

    def __init__(self, row: Ints, first: Ints, stop: Ints, rows: int):
        self.rows = rows
        self.levels: list[_Level] = []
        exponent = np.frexp(stop - first)[1] - 1
        for k in range(int(exponent.max(initial=-1)) + 1):
            here = exponent == k
            self.levels.append(_level(row[here], first[here], stop[here] - (1 << k), rows))

    def union(self, words: Words) -> Words:
        """(rows, W) from the rows of `words` (N, W)."""
        out = np.zeros((self.rows, words.shape[1]), np.uint64)
        for k, level in enumerate(self.levels):
            if k:  # words[i] now is the union of 2**k rows from i on
                half = 1 << (k - 1)
                words = words[:-half] | words[half:]
            for row, first, second in level.steps:
                part = words.take(first, axis=0)
                if k:
                    part |= words.take(second, axis=0)
                if len(row) == self.rows:
                    out |= part
                else:
                    out[row] |= part
            for row, starts in level.busy:
                out[row] |= np.bitwise_or.reduce(words.take(starts, axis=0), axis=0)
        return out


def _level(row: Ints, first: Ints, second: Ints, rows: int) -> _Level:
    order = np.argsort(row, kind="stable")
    row, first, second = row[order], first[order], second[order]
    counts = np.bincount(row, minlength=rows)
    begin = np.cumsum(counts) - counts
    rank = np.arange(len(row)) - begin[row]
    sizes = np.bincount(rank)  # rows that have so many ranges, or more; descending
    n_steps = int(np.count_nonzero(sizes >= FEW)) if rows >= FEW else len(sizes)
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.cumsum(np.append(0, sizes[:n_steps]))
    steps = [
        (row[i], first[i], second[i]) for i in (by_rank[a:b] for a, b in pairwise(bounds.tolist()))
    ]
    busy = []
    for r in np.flatnonzero(counts > n_steps).tolist():
        i = slice(begin[r] + n_steps, begin[r] + counts[r])
        busy.append((r, np.concatenate([first[i], second[i]])))
    return _Level(steps, busy)


def prefixes(lengths: Ints, begin: int, stop: int) -> Words:
    """(N, W): bits begin..stop - 1 (multiples of 64) of rows whose first `lengths` bits are 1."""
    bits = np.clip(lengths[:, None] - np.arange(begin, stop, 64), 0, 64).astype(np.uint64)
    ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    return np.where(bits == 0, np.uint64(0), ones >> (np.uint64(64) - np.maximum(bits, 1)))


def ranges_of_ones(first: Ints, stop: Ints, begin: int, end: int) -> Words:
    """(N, W): bits begin..end - 1 of rows with ones from first to stop - 1."""
    return prefixes(stop, begin, end) & ~prefixes(first, begin, end)


def count_ones(words: Words) -> Ints:
    """(N,): ones in every row."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return _ONES[words.view(np.uint8)].sum(axis=1, dtype=np.int64)  # NumPy 1


def unpack(words: Words) -> Bools:
    """(N, 64 W), least bit first."""
    bits = np.unpackbits(words.astype("<u8", copy=False).view(np.uint8), axis=1, bitorder="little")
    return bits.view(np.bool_)


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
