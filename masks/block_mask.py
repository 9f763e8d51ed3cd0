"""BlockMask: the exact mask of one length, as runs over the block grid and distinct bit tiles."""

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks import files
from masks.analysis.partition import Partition, partition
from masks.analysis.reach import Reach, reach
from masks.analysis.stats import Stats, stats
from masks.checks import block_sizes, layout_extents, read_array, to_numpy
from masks.draw import draw
from masks.registry import Keyed, remember
from masks.runs import Bools, Grid, Ints, compact
from masks.segments import BlockLists, Segments, block_lists
from masks.tiles import EMPTY, FULL, Tiles, edge_tiles, ordered, pack_bits, unpack_bits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIGEST = 1  # version of what `key` is computed from
_ARRAYS = {"starts": np.int64, "tiles": np.int32, "bits": np.uint32}


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Keyed):
    """Which (query, key) pairs may attend, for n_q x n_k tokens cut into blocks.

    Block (b, h, I, J) lies at x = ((b * heads + h) * rows + I) * cols + J. It is FULL when every
    pair of *existing* tokens in it is allowed (so a ragged block at the end can be FULL), and EMPTY
    when none is.

    Attributes:
        n_q, n_k: tokens.
        block_size: (block_q, block_k), each a multiple of 16 between 16 and 256.
        batch, heads: extents; 1 means the same for all.
        starts: int64 (R,), the first x of every run; starts[0] == 0.
        tiles: int32 (R,), the code of every run: EMPTY = -2, FULL = -1, or t >= 0 for partial
            blocks with the bits `bits[t]`. Neighbouring runs differ.
        bits: uint32 (T, block_q, ceil(block_k / 32)), all different, numbered in the order of x;
            bit j of word w is key column 32 * w + j of the block, and 0 outside n_q x n_k.
        text: the expression it was built from, for pictures; no part of equality.
        key: sha256 of the content, hex, the same on every platform; equality and hash go by it.
    """

    n_q: int
    n_k: int
    block_size: tuple[int, int]
    batch: int
    heads: int
    starts: Ints
    tiles: NDArray[np.int32]
    bits: NDArray[np.uint32]
    text: str = ""
    key: str = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "block_size", block_sizes(self.block_size))
        for name, dtype in _ARRAYS.items():
            array = np.asarray(getattr(self, name))
            if array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype}: give {np.dtype(dtype).name}")
            array = np.ascontiguousarray(array).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        self._check_runs()
        object.__setattr__(self, "key", self._digest())
        remember(self)

    def _check_runs(self) -> None:
        starts, tiles, bits = self.starts, self.tiles, self.bits
        tile_shape = (self.block_size[0], -(-self.block_size[1] // 32))
        if bits.ndim != 3 or bits.shape[1:] != tile_shape:
            raise ValueError(f"bits have shape {bits.shape}: give (T, *{tile_shape})")
        if starts.ndim != 1 or starts.shape != tiles.shape or not len(starts):
            raise ValueError(f"starts {starts.shape}, tiles {tiles.shape}: give (R,) twice, R >= 1")
        if starts[0] != 0 or starts[-1] >= self.grid.size or (starts[1:] <= starts[:-1]).any():
            raise ValueError(f"starts must ascend from 0 and stay below {self.grid.size}")
        if tiles.min() < EMPTY or tiles.max() >= len(bits):
            raise ValueError(f"tiles must lie between {EMPTY} and {len(bits) - 1}")
        if (tiles[1:] == tiles[:-1]).any():
            raise ValueError("neighbouring runs have equal tiles: join them")

    @classmethod
    def of(
        cls, grid: Grid, starts: Ints, codes: NDArray, bits: NDArray, text: str = ""
    ) -> "BlockMask":
        """Return the block mask of the tokens of a grid, from runs whose codes number `bits`."""
        bits = ordered(bits, codes)  # numbers the codes again
        n_q, n_k = grid.n_q - grid.q_origin, grid.n_k - grid.k_origin
        sizes = grid.block_q, grid.block_k
        return cls(n_q, n_k, sizes, grid.batch, grid.heads, starts, codes, bits, text)

    @classmethod
    def of_blocks(
        cls, tiles: Tiles, x: Ints, codes: NDArray[np.int32], text: str = ""
    ) -> "BlockMask":
        """Return the block mask with codes[i] of `tiles` on block x[i], ascending; else EMPTY."""
        starts, codes = _runs(x, codes, tiles.grid.size)
        return cls.of(tiles.grid, starts, codes, tiles.bits, text)

    @classmethod
    def of_segments(
        cls,
        blocks: Segments,
        n_q: int,
        n_k: int,
        cut: Ints | None = None,
        slices: tuple[int, int] | None = None,
    ) -> "BlockMask":
        """Return the mask of n_q queries and n_k keys with blocks that were moved.

        Args:
            blocks: of `Segments.blocks`, with new rows and columns, in any order, no place twice.
            n_q, n_k: tokens. A block that the new end cuts must have been cut so before.
            cut: (nnz,), how many of its keys a block has; all of them where None. A full block with
                fewer keys becomes a partial one, so that it may lie anywhere.
            slices: (batch, heads) of the new mask, whose slices the blocks have; as before by
                default.
        """
        old, (block_q, block_k) = blocks.grid, (blocks.grid.block_q, blocks.grid.block_k)
        grid = Grid(n_q, n_k, block_q, block_k, *(slices or (old.batch, old.heads)))
        tile, bits = blocks.tile.astype(np.int64), blocks.bits
        if cut is not None and (short := blocks.full & (cut < block_k)).any():
            for width in np.unique(cut[short]).tolist():
                edge = edge_tiles(block_q, width, (block_q, block_k))[-1:]
                same = np.flatnonzero((bits == edge).all((1, 2)))
                tile[short & (cut == width)] = same[0] if len(same) else len(bits)
                bits = bits if len(same) else np.concatenate([bits, edge])
        x = (blocks.s * grid.rows + blocks.row) * grid.cols + blocks.col
        order = np.argsort(x, kind="stable")
        x, tile = x[order], tile[order]
        return cls.of(grid, *_runs(x, tile, grid.size), bits)

    @classmethod
    def from_dense(cls, array: ArrayLike, block_size: int | tuple[int, int] = 128) -> "BlockMask":
        """Return the block mask of a boolean array or tensor; see `mask_from`."""
        data, text = read_array(array)
        batch, heads, n_q, n_k = data.shape
        grid = Grid(n_q, n_k, *block_sizes(block_size), batch, heads)
        tiles, codes = Tiles(grid), []
        for line in range(grid.slices * grid.rows):
            s, row = divmod(line, grid.rows)
            tokens = data[s // heads, s % heads, grid.q_first[row] : grid.q_last[row] + 1]
            padded = np.zeros((grid.block_q, grid.cols * grid.block_k), bool)
            padded[: len(tokens), :n_k] = tokens
            blocks = padded.reshape(grid.block_q, grid.cols, grid.block_k).swapaxes(0, 1)
            col = np.arange(grid.cols)
            codes.append(tiles.codes(pack_bits(blocks), grid.cut(np.full_like(col, row), col)))
        return cls.of_blocks(tiles, np.arange(grid.size), np.concatenate(codes), text)

    @classmethod
    def from_layout(
        cls,
        layout: ArrayLike,
        block_size: int | tuple[int, int] = 128,
        *,
        n_q: int | None = None,
        n_k: int | None = None,
    ) -> "BlockMask":
        """Return the block mask of whole blocks that a map of blocks gives.

        Args:
            layout: an array or tensor (rows, cols), (heads, rows, cols) or (batch, heads, rows,
                cols) of booleans or integers. 0 is an empty block; any other value allows every
                pair of the block. So this inverts `layout()` for a mask without partial blocks.
            block_size: tokens, one size or (block_q, block_k).
            n_q, n_k: tokens; rows * block_q and cols * block_k by default. The last block of a row
                or column may be cut.
        """
        data = to_numpy(layout)
        if data.dtype != bool and not np.issubdtype(data.dtype, np.integer):
            raise ValueError(
                f"layout is {data.dtype}: give booleans or integers, 0 for an empty block"
            )
        if not data.size:
            raise ValueError(f"layout has shape {data.shape}: give at least one block")
        batch, heads, n_q, n_k, *sizes = layout_extents(data.shape, block_size, n_q, n_k)
        grid = Grid(n_q, n_k, sizes[0], sizes[1], batch, heads)
        codes = np.where(data.ravel() != 0, FULL, EMPTY).astype(np.int32)
        return cls.of_blocks(Tiles(grid), np.arange(grid.size), codes)

    @cached_property
    def grid(self) -> Grid:
        """The block geometry."""
        return Grid(self.n_q, self.n_k, *self.block_size, self.batch, self.heads)

    @property
    def rows(self) -> int:
        """Query blocks."""
        return self.grid.rows

    @property
    def cols(self) -> int:
        """Key blocks."""
        return self.grid.cols

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.starts.nbytes + self.tiles.nbytes + self.bits.nbytes

    @cached_property
    def nnz(self) -> int:
        """Non-empty blocks in all slices."""
        return int(self._lengths()[self.tiles != EMPTY].sum())

    @property
    def density(self) -> float:
        """Non-empty blocks / all blocks."""
        return self.nnz / self.grid.size

    def codes(self) -> NDArray[np.int32]:
        """(batch, heads, rows, cols): EMPTY = -2, FULL = -1, or the number of the bit tile."""
        return self._by_block(self.tiles)

    def layout(self) -> NDArray[np.uint8]:
        """(batch, heads, rows, cols): 0 empty, 1 partial, 2 full."""
        kinds = np.select([self.tiles == EMPTY, self.tiles == FULL], [0, 2], 1)
        return self._by_block(kinds.astype(np.uint8))

    def to_dense(self) -> Bools:
        """(batch, heads, n_q, n_k), True where allowed. N x N memory: for small lengths."""
        block_q, block_k = self.block_size
        tiles = unpack_bits(self.bits, block_k)
        shape = (1, block_q, block_k)
        tiles = np.concatenate([tiles, np.zeros(shape, bool), np.ones(shape, bool)])  # -2, -1
        blocks = tiles[self.codes().ravel()]
        dense = blocks.reshape(self.batch, self.heads, self.rows, self.cols, block_q, block_k)
        dense = dense.swapaxes(3, 4).reshape(
            self.batch, self.heads, self.rows * block_q, self.cols * block_k
        )
        return np.ascontiguousarray(dense[:, :, : self.n_q, : self.n_k])

    def csr(self) -> BlockLists:
        """Return the non-empty key blocks of every (slice, query block)."""
        return block_lists(Segments.of(self), by_row=True)

    def csc(self) -> BlockLists:
        """Return the non-empty query blocks of every (slice, key block)."""
        return block_lists(Segments.of(self), by_row=False)

    def stats(self, *, batch: int | None = None, head: int | None = None) -> Stats:
        """Densities, loads, holes and distances; see `masks.analysis.stats.stats`."""
        return stats(self, batch=batch, head=head)

    def reach(self, layers: int | None = None, **options: Any) -> Reach:
        """Return what is seen after 1, 2, .. layers; see `masks.analysis.reach.reach`."""
        return reach(self, layers, **options)

    def draw(
        self,
        path: Any = None,
        ax: "Axes | None" = None,
        *,
        batch: int = 0,
        head: int = 0,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
    ) -> "Axes":
        """Picture of slice (batch, head) at block level; needs matplotlib, but no display.

        Args:
            path: where to save the figure; the suffix sets the format. Or an open file.
            ax: axes to draw into; a new figure by default (`ax.figure` of the result).
            rows, cols: first and last query and key to show; token by token where few are.
        """
        return draw(self, path, ax, batch=batch, head=head, rows=rows, cols=cols)

    def take(self, rows: ArrayLike, cols: ArrayLike) -> "BlockMask":
        """Return the block mask of some block rows and block columns, in the order given.

        Args:
            rows, cols: (R,) and (C,) different numbers of block rows and block columns. A last
                block with fewer tokens has to stay the last one.
        """
        blocks, tokens, places = Segments.of(self).blocks(), [], []
        for name, given, n, size, count in (
            ("rows", rows, self.n_q, self.block_size[0], self.rows),
            ("cols", cols, self.n_k, self.block_size[1], self.cols),
        ):
            chosen = np.asarray(given)
            if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer):
                raise ValueError(f"{name} is {chosen!r}: give (R,) numbers of blocks, at least one")
            if chosen.min() < 0 or chosen.max() >= count or len(np.unique(chosen)) < len(chosen):
                raise ValueError(f"{name} must be different numbers from 0 to {count - 1}")
            widths = np.minimum((chosen + 1) * size, n) - chosen * size
            if (widths[:-1] < size).any():
                raise ValueError(
                    f"{name}: the last block has {n % size} tokens, it must stay the last"
                )
            place = np.full(count, -1)
            place[chosen] = np.arange(len(chosen))
            tokens.append(int(widths.sum()))
            places.append(place)
        row, col = places[0][blocks.row], places[1][blocks.col]
        kept = blocks.at(row, col).where((row >= 0) & (col >= 0))
        return BlockMask.of_segments(kept, *tokens)

    def partition(self, ranks: int, **options: Any) -> "Partition":
        """Return what devices that share the sequence do; see `masks.analysis.partition`."""
        return partition(self, ranks, **options)

    def save(self, path: str | Path) -> None:
        """Write an .npz file, without pickle, to exactly `path`; ValueError for what is none."""
        files.write(path, {name: getattr(self, name) for name in files.FIELDS}, self.key)

    @classmethod
    def load(cls, path: str | Path) -> "BlockMask":
        """Read a file that `save` wrote.

        Raises:
            ValueError: the file is damaged, changed, or something else; the message names it.
        """
        return files.read(path, cls)

    def _by_block(self, values: NDArray) -> NDArray:
        """(batch, heads, rows, cols), from a value for every run."""
        flat = np.repeat(values, self._lengths())
        return flat.reshape(self.batch, self.heads, self.rows, self.cols)

    def _lengths(self) -> Ints:
        """Blocks of every run, (R,)."""
        return np.diff(self.starts, append=self.grid.size)

    def _digest(self) -> str:
        header = [DIGEST, self.n_q, self.n_k, *self.block_size, self.batch, self.heads]
        header += [len(self.starts), len(self.bits)]
        digest = hashlib.sha256(np.array(header, "<i8").data)
        for array in (self.starts, self.tiles, self.bits):
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()

    def __reduce__(self):
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __repr__(self) -> str:
        return (
            f"BlockMask({self.text or self.key[:12]}: {self.n_q} x {self.n_k} tokens, block size "
            f"{self.block_size}, batch {self.batch}, heads {self.heads}, "
            f"density {self.density:.4g})"
        )


def _runs(x: Ints, codes: NDArray, size: int) -> tuple[Ints, NDArray]:
    """Return (starts, codes) of runs with codes[i] on block x[i], EMPTY elsewhere; x ascends."""
    starts = np.append(0, np.stack([x, x + 1], axis=1))
    both = np.append(EMPTY, np.stack([codes, np.full_like(codes, EMPTY)], axis=1))
    return compact(starts, both.astype(np.int32), size)
