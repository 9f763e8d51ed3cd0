"""`table`: an array that a predicate may look up, as in ids[q], and its range over any interval."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks.predicate.expression import BOOL, INT, REAL, Expression, entry

__all__ = ["table"]

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

    @cached_property
    def digest(self) -> int:
        """A number that tells tables apart."""
        return hash(self.data.tobytes())

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
        """Return the least and the greatest entry of each interval low..high, both included.

        0 <= low <= high < len.
        """
        size, data = len(self) + 1, self.data.view(np.uint8) if self.kind == BOOL else self.data
        low, high = np.broadcast_arrays(low, high)
        intervals, which = np.unique(low * size + high, return_inverse=True)
        ends = np.stack([intervals // size, intervals % size + 1], axis=1).ravel()
        padded, which = np.append(data, data[-1:]), which.reshape(low.shape)
        least, most = (f.reduceat(padded, ends)[::2] for f in (np.minimum, np.maximum))
        return least[which], most[which]
