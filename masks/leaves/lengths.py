"""Sequences packed one after the other: how their lengths are given, written and looked up."""

from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from masks.checks import integer
from masks.registry import plain
from masks.runs import Ints

Rows = tuple[tuple[int, ...], ...]  # numbers for every batch entry
Lengths = Rows  # of documents

FAR = 1 << 40  # tokens between the origins of two batch entries


def read_rows(name: str, numbers: Any) -> Rows:
    """Integers >= 0 given as one, several, or several for every batch entry."""
    nested = plain(numbers)
    if not isinstance(nested, tuple):
        nested = (nested,)
    if not any(isinstance(entry, tuple) for entry in nested):
        nested = (nested,)
    if not all(isinstance(entry, tuple) for entry in nested):
        raise ValueError(f"{name} mixes numbers and lists: give one list, or one per batch entry")
    return tuple(
        tuple(integer(f"a number in {name}", n, min=0, max=FAR) for n in entry) for entry in nested
    )


def read_lengths(name: str, lengths: Any) -> Lengths:
    """Lengths of documents, given in the same ways; every batch entry has a token."""
    rows = read_rows(name, lengths)
    for row in rows:
        if not 0 < sum(row) < FAR:
            raise ValueError(f"{name} has {sum(row)} tokens in a row: give 1 to {FAR - 1}")
    return rows


def read_both(lengths: Any, key_lengths: Any) -> tuple[Lengths, Lengths]:
    """Lengths of documents among queries and keys, the same where `key_lengths` is None."""
    rows = read_lengths("lengths", lengths)
    key_rows = rows if key_lengths is None else read_lengths("key_lengths", key_lengths)
    counts, key_counts = ([len(row) for row in side] for side in (rows, key_rows))
    if counts != key_counts:
        raise ValueError(
            f"lengths has {counts} documents and key_lengths {key_counts}: give every document "
            "both, 0 where it has no keys"
        )
    return rows, key_rows


def flat(rows: Sequence[Sequence[int]]) -> Sequence[Any]:
    """Return the numbers of the only batch entry, or of all of them."""
    return rows[0] if len(rows) == 1 else rows


def batch_extent(rows: Sized) -> int | None:
    """Return the number of batch entries, or None for 1, which fits any."""
    return None if len(rows) == 1 else len(rows)


class Cuts(NamedTuple):
    """One side of attention cut into documents, for all batch entries in turn."""

    start: Ints  # (D,) entry * FAR + first token
    stop: Ints  # (D,) entry * FAR + the token after the last
    tokens: Ints  # (batch,) their sum

    @classmethod
    def of(cls, rows: Lengths) -> "Cuts":
        """Of documents that follow one another from token 0 on."""
        base = np.repeat(np.arange(len(rows)) * FAR, [len(row) for row in rows])
        ends = [np.cumsum(row, dtype=np.int64) for row in rows]
        stop = base + np.concatenate(ends)
        lengths = np.concatenate([np.array(row, np.int64) for row in rows])
        return cls(stop - lengths, stop, np.array([end[-1] for end in ends]))

    @property
    def entry(self) -> Ints:
        """(D,) batch entry of every document."""
        return np.maximum(self.start, self.stop - 1) // FAR

    def find(self, entry: Ints, token: Ints) -> Ints:
        """Return the number of the document with a token, among all batch entries."""
        return np.searchsorted(self.start, entry * FAR + token, "right") - 1

    def cover(self, name: str, n: int) -> None:
        """Raise where the documents end before token `n`."""
        short = int(self.tokens.min())
        if short < n:
            raise ValueError(
                f"the documents have {short} tokens together, but {name} is {n}: give lengths that "
                "reach it (padding can be a document of its own)"
            )
