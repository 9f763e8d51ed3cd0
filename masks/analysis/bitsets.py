"""Rows of bits as 64-bit words, and the union of ranges of rows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.runs import Bools, Ints

Words = NDArray[np.uint64]

ROWS_AT_ONCE = 128  # so that what they gather stays in the cache


class _Piece(NamedTuple):
    """Ranges of some rows: those of row[i] are begins[i] and the ones after it."""

    row: Ints
    begins: Ints
    first: Ints
    second: Ints


class Ranges:
    """out[row] = the union of the rows first..stop - 1, for many (row, first, stop); rows ascend.

    The cost grows with the number of ranges, not with their lengths: a range of 2**k rows, or up to
    twice as many, is the union of two ranges of 2**k rows, which may overlap.
    """

    def __init__(self, row: Ints, first: Ints, stop: Ints, rows: int):
        self.rows = rows
        self.levels: list[list[_Piece]] = []
        exponent = np.frexp(stop - first)[1] - 1
        for k in range(int(exponent.max(initial=-1)) + 1):
            here = exponent == k
            r, one, two = row[here], first[here], stop[here] - (1 << k)
            begins = np.flatnonzero(np.diff(r, prepend=-1))
            self.levels.append([])
            for i in range(0, len(begins), ROWS_AT_ONCE):
                own = begins[i : i + ROWS_AT_ONCE]
                part = slice(own[0], np.append(begins, len(r))[i + len(own)])
                self.levels[k].append(_Piece(r[own], own - own[0], one[part], two[part]))

    def union(self, words: Words) -> Words:
        """(rows, W) from the rows of `words` (N, W)."""
        out = np.zeros((self.rows, words.shape[1]), np.uint64)
        for k, pieces in enumerate(self.levels):
            if k:  # words[i] now is the union of 2**k rows from i on
                half = 1 << (k - 1)
                words = words[:-half] | words[half:]
            for row, begins, first, second in pieces:
                part = words.take(first, axis=0)
                if k:
                    part |= words.take(second, axis=0)
                out[row] |= np.bitwise_or.reduceat(part, begins, axis=0)
        return out


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
    return bits != 0


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
