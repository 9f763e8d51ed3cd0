"""A mask inside of every packed document, and a mask moved along."""

from dataclasses import replace
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.lengths import FAR, Cuts, Lengths, flat, read_both
from masks.patterns.documents import documents
from masks.registry import canonical, transform
from masks.runs import Grid
from masks.transforms.base import Placing
from masks.transforms.pieces import Pieces
from masks.types import Moves, Placed, Repeats

__all__ = ["packed", "shift"]

MOST = FAR // 4  # so that tokens that are moved stay apart from those of other batch entries


@transform("strided(16) >> packed((60, 100, 96))", "the mask once in every document", digest=True)
def packed(lengths: Any, key_lengths: Any = None) -> "Pack":
    """Lay the mask into every one of the documents that are packed into a sequence.

    Documents do not see each other. Within one, key k is allowed for query q when the mask, for
    that document's own length, allows k - start for q - start, so that windows, strides and global
    tokens count from the document's first token. `mask >> packed(lengths)` differs from
    `mask & documents(lengths)`, where they count from the first token of all.

    Args:
        lengths, key_lengths: as for `documents`, with the same errors; its `documents_from_offsets`
            shows how to get them from `cu_seqlens`. The mask of a document has the whole
            length, also where the sequence that is built ends inside of it.
    """
    rows, key_rows = read_both(lengths, key_lengths)
    other = None if key_rows == rows else flat(key_rows)
    return canonical(Pack(rows, key_rows), lengths=flat(rows), key_lengths=other)


class Pack(Placing):
    lengths: Lengths
    key_lengths: Lengths

    def companions(self) -> tuple[Mask, ...]:
        return (documents(self.lengths),)  # which has their number as batch

    def place(self, part: Mask, grid: Grid) -> Placed:
        q, k = Cuts.of(self.lengths), Cuts.of(self.key_lengths)
        q.cover("n_q", grid.n_q)
        k.cover("n_k", grid.n_k)
        if self.lengths == self.key_lengths and part.moves() == Moves(1):  # from any first token
            return (part & documents(self.lengths)).place(grid)
        return Pieces(part, grid, q, k).place()


@transform("sliding(48) >> shift(64)", "64 tokens later", written=2)
def shift(q: int, k: int | None = None) -> "Shift":
    """Move a mask `q` queries down and `k` keys to the right: (i, j) comes from (i - q, j - k).

    The new rows and columns at the upper left are empty. The moved mask has q queries and k keys
    less than the one that is built (more, for negative numbers): both end with the same tokens.

    Args:
        q, k: integers, k defaults to q. `mask >> shift(8)` makes room for 8 tokens before a mask,
            `mask >> shift(-8)` drops its first 8 tokens, `mask >> shift(0, 8)` puts 8 keys before.
    """
    q = integer("q", q, min=-MOST, max=MOST)
    k = q if k is None else integer("k", k, min=-MOST, max=MOST)
    return canonical(Shift(q, k), k=None if k == q else k)


class Shift(Placing):
    q: int
    k: int

    def repeats(self, part: Mask, grid: Grid) -> Repeats | None:
        # Rows and columns before the moved mask, or with its beginning, are kinds of their own.
        q, k = self.q - grid.q_origin, self.k - grid.k_origin
        row, col = max(q, 0) // grid.block_q, max(k, 0) // grid.block_k
        if grid.n_q <= self.q or grid.n_k <= self.k:
            return None
        origins = {"q_origin": row * grid.block_q - q, "k_origin": col * grid.block_k - k}
        lengths = {"n_q": grid.n_q - self.q, "n_k": grid.n_k - self.k}
        repeats = part.repeats(replace(grid, **lengths, **origins))
        if repeats is None:
            return None
        own = np.arange(row + (origins["q_origin"] < 0))
        kind = np.append(own, repeats.kind[len(own) - row :] - repeats.kind.min() + len(own))
        move = repeats.move
        move = None if move is None else np.append(own, move[len(own) - row :])
        return Repeats(kind, move, col + max(repeats.head, int(origins["k_origin"] < 0)))

    def place(self, part: Mask, grid: Grid) -> Placed:
        return Pieces(part, grid, _piece(self.q, grid.n_q), _piece(self.k, grid.n_k)).place()


def _piece(start: int, stop: int) -> Cuts:
    """Return the tokens from `start` to the end."""
    return Cuts(np.array([start]), np.array([stop]), np.array([stop]))
