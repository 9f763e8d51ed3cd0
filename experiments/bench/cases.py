"""What is measured: a case (one mask at one shape), and the grid of cases for a machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

import masks
from sparseflash.cost import Shape

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EMPTY, FULL = -2, -1  # codes of blocks in masks.BlockMask
DENSE = "dense"
CAUSAL = str(masks.causal())  # the one mask that peers without blocks have kernels for
LAYOUTS = ("head_major", "token_major")


@dataclass(frozen=True)
class Case:
    """One mask at one shape.

    q is (batch, heads, n_q, head_dim), k is (batch, kv_heads, n_k, head_dim), and v has v_dim there
    (None: head_dim). `mask` is the text of a mask; "dense" means that no mask is passed at all, and
    has blocks of 0. `layout` is that of memory: head_major (B, H, N, D) or token_major
    (B, N, H, D), which is passed as a transposed view.
    """

    mask: str
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    dtype: str
    block_q: int
    block_k: int
    v_dim: int | None = None
    layout: str = LAYOUTS[0]

    @property
    def value_dim(self) -> int:
        """The head dim of v and out."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def shape(self) -> Shape:
        """What `sparseflash.cost` takes."""
        extents = self.batch, self.heads, self.kv_heads, self.n_q, self.n_k
        return Shape(*extents, self.head_dim, self.value_dim, DTYPES[self.dtype].itemsize)

    @property
    def causal(self) -> bool:
        """Whether a peer's own causal kernel computes just this mask."""
        return self.mask == CAUSAL and self.n_q == self.n_k

    @cached_property
    def blocks(self) -> masks.BlockMask | None:
        """The mask at this length and block size, None for dense."""
        if self.mask == DENSE:
            return None
        mask = masks.parse(self.mask)
        heads = self.heads if mask.per_head else None
        return mask.build(self.n_q, self.n_k, (self.block_q, self.block_k), heads=heads)

    @property
    def density(self) -> float:
        """Non-empty blocks / all blocks."""
        return 1.0 if self.blocks is None else self.blocks.density

    @cached_property
    def elements(self) -> float:
        """Allowed (query, key) pairs / all pairs."""
        if self.blocks is None:
            return 1.0
        codes = block_codes(self.blocks)
        rows, cols = (
            np.minimum(block, n - block * np.arange(count))
            for block, n, count in zip(
                self.blocks.block_size, (self.n_q, self.n_k), codes.shape[2:], strict=True
            )
        )
        full = np.einsum("bhij,i,j->", codes == FULL, rows, cols, dtype=np.float64)
        in_tile = np.bitwise_count(self.blocks.bits).sum((1, 2), dtype=np.int64)
        pairs = full + in_tile[codes[codes >= 0]].sum()
        return float(pairs / (codes.shape[0] * codes.shape[1] * self.n_q * self.n_k))

    def flops(self, direction: str) -> float:
        """Floating-point operations in the computed blocks: two products, backward five."""
        pairs = self.batch * self.heads * self.n_q * self.n_k * self.density
        d, v = self.head_dim, self.value_dim
        return 2.0 * pairs * (3 * d + 2 * v if direction == "backward" else d + v)

    def allowed(self, batch: int, head: int, rows: np.ndarray) -> np.ndarray:
        """bool (len(rows), n_k): the keys that these queries may attend to.

        Decoded from the run-length code itself, not from the block lists that kernels read.
        """
        if self.blocks is None:
            return np.ones((len(rows), self.n_k), bool)
        blocks, keys = self.blocks, np.arange(self.n_k)
        slice_ = (batch if blocks.batch > 1 else 0) * blocks.heads
        slice_ += head if blocks.heads > 1 else 0
        block_row = slice_ * blocks.rows + rows // self.block_q
        cells = block_row[:, None] * blocks.cols + np.arange(blocks.cols)
        code = blocks.tiles[np.searchsorted(blocks.starts, cells, side="right") - 1]
        code = np.repeat(code, self.block_k, axis=1)[:, : self.n_k]
        allowed = code == FULL
        r, c = np.nonzero(code >= 0)
        in_block = keys[c] % self.block_k
        words = blocks.bits[code[r, c], rows[r] % self.block_q, in_block // 32]
        allowed[r, c] = (words >> (in_block % 32).astype(np.uint32)) & 1
        return allowed


def block_codes(blocks: masks.BlockMask) -> np.ndarray:
    """int32 (batch, heads, rows, cols): EMPTY, FULL, or the number of the block's bit tile."""
    shape = (blocks.batch, blocks.heads, blocks.rows, blocks.cols)
    lengths = np.diff(blocks.starts, append=np.prod(shape))
    return np.repeat(blocks.tiles, lengths).reshape(shape)


@dataclass(frozen=True)
class Grid:
    """Every mask at each shape, and the sweep masks at the sweep lengths of the first shape."""

    shapes: tuple[Case, ...]  # their mask is replaced
    masks: tuple[str, ...]
    sweep_masks: tuple[str, ...] = ()
    sweep_lengths: tuple[int, ...] = ()

    def cases(self) -> list[Case]:
        pairs = [(mask, shape) for shape in self.shapes for mask in self.masks]
        pairs += [
            (mask, replace(self.shapes[0], n_q=n, n_k=n))
            for n in self.sweep_lengths
            for mask in self.sweep_masks
        ]
        return list(dict.fromkeys(_with_mask(shape, mask) for mask, shape in pairs))


def default_grid(device: str) -> Grid:
    """Speed against density, and time against length, at sizes that suit the device."""
    if torch.device(device).type == "cuda":
        shape = Case(DENSE, 2, 16, 16, 16384, 16384, 128, "bfloat16", 128, 128)
        structured = "local:256+butterfly:128+global:128"
        return Grid(
            shapes=(shape, replace(shape, heads=32, kv_heads=32, head_dim=64)),
            masks=(DENSE, *_random(shape, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125), structured),
            sweep_masks=(DENSE, structured),
            sweep_lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
        )
    shape = Case(DENSE, 1, 4, 4, 4096, 4096, 64, "float32", 64, 64)
    structured = "local:256+butterfly:64+global:64"
    return Grid(
        shapes=(shape,),
        masks=(DENSE, *_random(shape, 1, 0.5, 0.25, 0.125, 0.0625), structured),
        sweep_masks=(DENSE, structured),
        sweep_lengths=(512, 1024, 2048, 4096),
    )


def make_grid(
    device: str,
    mask: str | Sequence[str] | None = None,
    seq_len: int | Sequence[int] | None = None,
    block_size: int | Sequence[int] | None = None,
    **shape: int | str | None,
) -> Grid:
    """The default grid with what is given put in its place; the sweep over lengths goes with it.

    shape: batch, heads, kv_heads, head_dim, v_dim, dtype, layout; None leaves the default.
    Raises ValueError for values that no case can have.
    """
    grid = default_grid(device)
    given = {name: value for name, value in shape.items() if value is not None}
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = given["heads"]
    if block_size is not None:
        sizes = [block_size] * 2 if isinstance(block_size, int) else list(block_size)
        if len(sizes) != 2:
            raise ValueError(f"block_size={block_size}: give one size, or [block_q,block_k]")
        given |= {"block_q": sizes[0], "block_k": sizes[1]}
    lengths = [] if seq_len is None else [seq_len] if isinstance(seq_len, int) else list(seq_len)
    shapes = [replace(s, **given) for s in grid.shapes]
    if lengths:
        shapes = [replace(s, n_q=n, n_k=n) for s in shapes for n in lengths]
    for s in shapes:
        _check(s)
    chosen = grid.masks if mask is None else (mask,) if isinstance(mask, str) else tuple(mask)
    keep_sweep = mask is None and not lengths
    return Grid(
        shapes=tuple(shapes),
        masks=tuple(_canonical(m) for m in chosen),
        sweep_masks=tuple(_canonical(m) for m in grid.sweep_masks) if keep_sweep else (),
        sweep_lengths=grid.sweep_lengths if keep_sweep else (),
    )


def _random(shape: Case, *densities: float) -> Iterable[str]:
    """Random masks whose blocks are those of the shape."""
    return (f"random:{density}:block={shape.block_q}" for density in densities)


def _canonical(mask: str) -> str:
    """The mask's own text, so that one mask has one name in every row."""
    return DENSE if mask == DENSE else str(masks.parse(mask))


def _with_mask(shape: Case, mask: str) -> Case:
    if mask == DENSE:  # which has no blocks
        return replace(shape, mask=mask, block_q=0, block_k=0)
    return replace(shape, mask=mask)


def _check(case: Case) -> None:
    for name in ("batch", "heads", "kv_heads", "n_q", "n_k", "head_dim", "block_q", "block_k"):
        value = getattr(case, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number above 0")
    if case.value_dim < 1:
        raise ValueError(f"v_dim={case.v_dim!r}: give a whole number above 0")
    if case.layout not in LAYOUTS:
        raise ValueError(f"layout={case.layout!r}: choose from {', '.join(LAYOUTS)}")
    if case.dtype not in DTYPES:
        raise ValueError(f"dtype={case.dtype!r}: choose from {', '.join(DTYPES)}")
    if case.heads % case.kv_heads:
        raise ValueError(
            f"heads={case.heads} is not a multiple of kv_heads={case.kv_heads}; change one of them"
        )
