"""`table`: an array that a predicate may look up, as in ids[q], and its range over any interval."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks.predicate.expression import BOOL, INT, REAL, Expression, entry

__all__ = ["table"]

CHUNK = 16  # entries; shorter intervals get the range of their chunk
_KINDS = {"b": BOOL, "i": INT, "u": INT, "f": REAL}


def table(array: ArrayLike) -> "Table":
    """Return data by token (or head) number for `where`: `ids = masks.table(ids)`, then `ids[q]`.

    Args:
        array: (n,) integers, booleans or finite floats; it is copied. A mask that looks up ids[q]
            builds for n_q <= n only, and so with k.
    """
    return Table(array)


class Table:
    """See `table`. Indexed by an array it gives an array, by an expression an expression."""

    def __init__(self, array: ArrayLike):
        data = np.array(array)
        kind = _KINDS.get(data.dtype.kind)
        if kind is None or data.ndim != 1 or data.size == 0:
            raise ValueError(
                f"the table is {data.dtype} of shape {data.shape}: give a 1-D array of integers, "
                "booleans or floats with at least one entry. Rows of n entries go one after "
                "another: ids = masks.table(array.ravel()), then ids[b * n + q]"
            )
        if kind == INT and data.dtype == np.uint64 and data.max() >= 1 << 63:
            raise ValueError(f"the table has {data.max()}: give numbers below 2**63")
        if kind == REAL and not np.isfinite(data).all():
            raise ValueError("the table has entries that are not finite: give finite numbers")
        self.kind = kind
        self.data = data.astype({INT: np.int64, REAL: np.float64, BOOL: bool}[kind])
        self.data.flags.writeable = False

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Expression):
            return entry(self, index)
        index = np.asarray(index)
        if index.size:
            self.check(int(index.min()), int(index.max()))
        return self.data[index]

    def check(self, low: int, high: int) -> None:
        """ValueError unless entries low..high exist."""
        if low < 0 or high >= len(self):
            wrong = low if low < 0 else high
            raise ValueError(
                f"entry {wrong} of a table of {len(self)} is looked up: give an entry for every "
                "token, or build for fewer tokens"
            )

    def range(self, low: NDArray, high: NDArray) -> tuple[NDArray, NDArray]:
        """(least, greatest) entry of each interval low..high, both ends included.

        Exact for intervals that meet more than one chunk of CHUNK entries; others get the range of
        their chunk. 0 <= low <= high < len.
        """
        first, last = low // CHUNK, high // CHUNK
        found = []
        for extreme, (to_left, to_right, levels) in zip(
            (np.minimum, np.maximum), self._ranges, strict=True
        ):
            within = levels[0][first]
            ends = extreme(to_right[low], to_left[high])
            count = np.maximum(last - first - 1, 0)  # whole chunks between the two ends
            level = np.frexp(np.maximum(count, 1))[1] - 1
            values = ends
            for number in np.unique(level[count > 0]).tolist():
                mine = (level == number) & (count > 0)
                row = levels[number]
                a, b = row[(first + 1)[mine]], row[last[mine] - (1 << number)]
                values[mine] = extreme(values[mine], extreme(a, b))
            found.append(np.where(first == last, within, values))
        return found[0], found[1]

    @cached_property
    def _ranges(self) -> list[tuple[NDArray, NDArray, list[NDArray]]]:
        """For min and max: from the chunk's start to an entry, from it to the chunk's end, and
        levels[l][c], the extreme of 2**l chunks from c on."""
        data = self.data.view(np.uint8) if self.kind == BOOL else self.data
        chunks = np.pad(data, (0, -len(data) % CHUNK), mode="edge").reshape(-1, CHUNK)
        ranges = []
        for extreme in (np.minimum, np.maximum):
            to_left = extreme.accumulate(chunks, axis=1).ravel()
            to_right = extreme.accumulate(chunks[:, ::-1], axis=1)[:, ::-1].ravel()
            levels = [extreme.reduce(chunks, axis=1)]
            while 2 << (len(levels) - 1) <= len(chunks):
                half = 1 << (len(levels) - 1)
                levels.append(extreme(levels[-1][:-half], levels[-1][half:]))
            ranges.append((to_left, to_right, levels))
        return ranges
