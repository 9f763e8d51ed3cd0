"""A mask inside of every packed document, and a mask moved along."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.geometry import interval_runs
from masks.patterns.documents import FAR, Rows, cover, documents, flat, read_both
from masks.registry import canonical, transform
from masks.runs import Bools, Grid, Ints, Runs, expand, quotient
from masks.segments import row_segments
from masks.transforms.base import Transform
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


class Pack(Transform):
    lengths: Rows
    key_lengths: Rows

    def companions(self) -> tuple[Mask, ...]:
        return (documents(self.lengths),)  # which has their number as batch

    def place(self, part: Mask, grid: Grid) -> Placed:
        q, k = Cuts.of(self.lengths), Cuts.of(self.key_lengths)
        cover("documents", grid, int(q.tokens.min()), int(k.tokens.min()))
        if self.lengths == self.key_lengths and part.moves() == Moves(1):  # from any first token
            return (part & documents(self.lengths)).place(grid)
        return Pieces(part, grid, q, k).place()


class Cuts(NamedTuple):
    """One side of attention cut into documents, for all batch entries in turn."""

    start: Ints  # (D,) entry * FAR + first token
    stop: Ints  # (D,) entry * FAR + the token after the last
    tokens: Ints  # (batch,) their sum

    @classmethod
    def of(cls, rows: Rows) -> "Cuts":
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


class Shift(Transform):
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


MAX_TOKENS = 1 << 15  # of a block, so that four numbers up to it fit one int64


class Side(NamedTuple):
    """The queries or the keys of the pieces, (P,) each."""

    start: Ints  # first token
    stop: Ints  # the token after the last
    block: Ints  # the first block of the grid that it meets
    last: Ints  # and the last one
    origin: Ints  # first token of that block, counted from the piece's own token 0
    seen: Bools  # whether it meets the grid
    full_first: Ints  # blocks full_first..full_stop-1 have no tokens of other pieces
    full_stop: Ints

    @classmethod
    def of(cls, cuts: Cuts, origin: int, size: int, first: Ints, last: Ints) -> "Side":
        """Of blocks of `size` tokens from `origin` on; first and last existing tokens."""
        entry = cuts.entry * FAR
        start, stop = cuts.start - entry, cuts.stop - entry
        block = np.maximum(start - origin, 0) // size
        met = np.minimum((stop - 1 - origin) // size, len(first) - 1)
        own_origin = origin + block * size - start
        seen = (block < len(first)) & (own_origin < stop - start) & (start < stop)
        full_first = np.searchsorted(first, start)
        full_stop = np.searchsorted(last, stop - 1, "right")
        return cls(start, stop, block, met, own_origin, seen, full_first, full_stop)


class Pieces:
    """Copies of `part` on a grid: piece i is the mask of its own length, from its first tokens on.

    The pieces follow one another on both sides, and outside of them nothing is allowed. The blocks
    of a piece are those of the grid, for `part` is placed on one whose origin lies before token 0.
    Pieces of one shape share a placement.

    Args:
        grid: with the extents of the whole mask.
        q, k: the pieces of every batch entry, or of the only one that stands for all.
    """

    def __init__(self, part: Mask, grid: Grid, q: Cuts, k: Cuts):
        self.part, self.grid, self.q, self.k = part, grid, q, k
        self.single = len(q.tokens) == 1
        self.entry = q.entry
        self.rows = Side.of(q, grid.q_origin, grid.block_q, grid.q_first, grid.q_last)
        self.cols = Side.of(k, grid.k_origin, grid.block_k, grid.k_first, grid.k_last)
        n_q, n_k = q.stop - q.start, k.stop - k.start
        self.lengths = np.stack([n_q, n_k], axis=1)
        self.seen = self.rows.seen & self.cols.seen
        self.small = (n_q < grid.block_q) & (n_k < grid.block_k)  # they fill no block
        self.large = self.seen & ~self.small
        shapes = np.column_stack([self.lengths, self.rows.origin, self.cols.origin])
        self.shapes, shape = np.unique(shapes, axis=0, return_inverse=True)
        self.shape = shape.ravel()  # of every piece
        self.all_lengths, length = np.unique(self.lengths, axis=0, return_inverse=True)
        self.length = length.ravel()
        self.placements: dict[tuple[int, ...], tuple[Grid, Placed]] = {}

    def place(self) -> Placed:
        return Placed(self.runs(), self.allowed, self.signature)

    def _place(self, n_q: int, n_k: int, q_origin: int, k_origin: int) -> tuple[Grid, Placed]:
        """`part` on the grid of a shape."""
        shape = n_q, n_k, q_origin, k_origin
        if shape not in self.placements:
            block_q, block_k, heads = self.grid.block_q, self.grid.block_k, self.grid.heads
            batch = self.part.batch or 1
            grid = Grid(n_q, n_k, block_q, block_k, batch, heads, q_origin, k_origin)
            self.placements[shape] = grid, self.part.place(grid)
        return self.placements[shape]

    def runs(self) -> Runs:
        intervals = [self._small_intervals()]
        large = np.flatnonzero(self.large)
        intervals += [self._intervals(piece) for piece in large.tolist()]
        return interval_runs(self.grid, *map(np.concatenate, zip(*intervals, strict=True)))

    def _small_intervals(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(line, first, stop, code) of the pieces that fill no block: they need no placement."""
        small = np.flatnonzero(self.seen & self.small)
        of, row = expand(self.rows.block[small], self.rows.last[small] + 1)
        piece = small[of]
        lines = [s * self.grid.rows + row for s in self._slices(piece)]
        first, stop = self.cols.block[piece], self.cols.last[piece] + 1
        first, stop = (np.tile(x, len(lines)) for x in (first, stop))
        return np.concatenate(lines), first, stop, np.full(len(first), rl.MIXED)

    def _slices(self, piece: Ints) -> list[Ints]:
        """Return the slices that pieces lie in; each has as many."""
        if self.single:
            return [np.full_like(piece, s) for s in range(self.grid.slices)]
        return [self.entry[piece] * self.grid.heads + h for h in range(self.grid.heads)]

    def _intervals(self, piece: int) -> tuple[Ints, Ints, Ints, Ints]:
        """(line, first, stop, code) of a piece: full blocks are mixed where others share them."""
        rows, cols = self.rows, self.cols
        s, row, first, stop, code = self._segments(*self.shapes[self.shape[piece]].tolist())
        if not self.single:
            b, h = quotient(s, self.grid.heads)
            entry = self.entry[piece]
            s = np.where((b == entry) | (self.part.batch is None), entry * self.grid.heads + h, -1)
        row, first = row + rows.block[piece], first + cols.block[piece]
        stop = np.minimum(stop + cols.block[piece], self.grid.cols)
        kept = (s >= 0) & (row < self.grid.rows) & (first < stop)
        s, row, first, stop, code = (x[kept] for x in (s, row, first, stop, code))
        line = s * self.grid.rows + row
        full = (code == rl.FULL) & (row >= rows.full_first[piece]) & (row < rows.full_stop[piece])
        full_first = np.maximum(first[full], cols.full_first[piece])
        full_stop = np.maximum(np.minimum(stop[full], cols.full_stop[piece]), full_first)
        codes = np.repeat([rl.MIXED, rl.FULL], [len(line), len(full_first)])
        first, stop = np.append(first, full_first), np.append(stop, full_stop)
        return np.append(line, line[full]), first, stop, codes

    def _segments(self, *shape: int) -> tuple[Ints, ...]:
        """Non-empty runs of a placement, cut where rows end: (slice, row, first, stop, code)."""
        grid, placed = self._place(*shape)
        line, first, length, code = row_segments(grid, *placed.runs, empty=rl.EMPTY)
        s, row = quotient(line, grid.rows)
        return s, row, first, first + length, code.astype(np.int64)

    def _inner_slice(self, s: Ints) -> Ints:
        """Slice of a placement for slice s of the grid."""
        return s if self.part.batch else s % self.grid.heads

    def allowed(self, s: Ints, q: Ints, k: Ints) -> Bools:
        entry = self._entry(s)
        i, j = self.q.find(entry, q), self.k.find(entry, k)
        together = (i == j) & (i >= 0) & (q < self.rows.stop[i]) & (k < self.cols.stop[j])
        if not together.any():
            return together
        s, q, k = self._inner_slice(s), q - self.rows.start[i], k - self.cols.start[j]
        s, q, k, i, j = _aligned(s, q, k, i, j)
        allowed = np.zeros_like(together)
        i, j = self.length[i], self.length[j]
        for length in np.intersect1d(i, j).tolist():
            axes = tuple(range(1, i.ndim))
            met = (i == length).any(axes) & (j == length).any(axes) & together.any(axes)
            at = np.flatnonzero(met)
            own = [x[at] if len(x) > 1 else x for x in (s, q, k, i)]
            inner = self._whole(self.all_lengths[length], *own[:3])
            allowed[at] |= inner & (own[3] == length)
        return allowed & together

    def _whole(self, lengths: Ints, s: Ints, q: Ints, k: Ints) -> Bools:
        """`part` of these lengths, token by token."""
        n_q, n_k = lengths.tolist()
        placed = self._place(n_q, n_k, 0, 0)[1]
        return placed.allowed(s, np.clip(q, 0, n_q - 1), np.clip(k, 0, n_k - 1))

    def signature(self, x: Ints) -> list[Ints]:
        # The signature of a block with tokens of one piece on both sides: where the piece begins
        # and ends, and the signature in the placement of the piece.
        s, row, col = self.grid.split(x)
        entry = self._entry(s)
        first, last = self._met(self.q, entry, self.grid.q_first[row], self.grid.q_last[row])
        k_first, k_last = self._met(self.k, entry, self.grid.k_first[col], self.grid.k_last[col])
        first, last = np.maximum(first, k_first), np.minimum(last, k_last)
        size = max(self.grid.block_q, self.grid.block_k)
        known = np.flatnonzero((first == last) & self.large[last] & (size <= MAX_TOKENS))
        s, row, col, piece = s[known], row[known], col[known], last[known]
        ends = np.zeros(len(known), np.int64)
        for side, token in (
            (self.rows, self.grid.q_token(row)),
            (self.cols, self.grid.k_token(col)),
        ):
            for end in (side.start[piece], side.stop[piece]):
                ends = ends * (size + 1) + np.clip(end - token, 0, size)
        inner = self._inner_signature(s, row, col, piece)
        columns = [np.zeros(len(x), np.int64) for _ in inner]
        for column, values in zip(columns, inner, strict=True):
            column[known] = values
        number = -1 - x
        number[known] = ends
        return [number, *columns]

    def _inner_signature(self, s: Ints, row: Ints, col: Ints, piece: Ints) -> list[Ints]:
        """Columns for blocks that meet one piece."""
        shape = self.shape[piece]
        codes, kind = np.zeros_like(shape), np.full_like(shape, -1)
        columns: list[Ints] = []
        row, col = row - self.rows.block[piece], col - self.cols.block[piece]
        s = self._inner_slice(s)
        for number in np.unique(shape).tolist():
            grid, placed = self._place(*self.shapes[number].tolist())
            at = np.flatnonzero(shape == number)
            x = (s[at] * grid.rows + row[at]) * grid.cols + col[at]
            codes[at] = placed.runs.at(x)
            mixed = codes[at] == rl.MIXED  # the code alone decides the others
            if not mixed.any():
                continue
            at, x = at[mixed], x[mixed]
            kind[at] = number
            for i, values in enumerate(placed.signature(x)):
                if i == len(columns):
                    columns.append(np.zeros_like(shape))
                columns[i][at] = values
        return [codes, kind, *columns]

    def _entry(self, s: Ints) -> Ints:
        return 0 * s if self.single else s // self.grid.heads

    @staticmethod
    def _met(cuts: Cuts, entry: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """First and last piece with tokens among first..last."""
        first = np.searchsorted(cuts.stop, entry * FAR + first, "right")
        return first, cuts.find(entry, last)


def _aligned(*arrays: Ints) -> list[Ints]:
    """With as many axes each."""
    axes = max(array.ndim for array in arrays)
    return [array.reshape((1,) * (axes - array.ndim) + array.shape) for array in arrays]
