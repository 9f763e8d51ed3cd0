"""Device functions that the forward and the backward kernels share."""

import triton
import triton.language as tl

from sparseflash.kernels.common.dropout import (
    KEY_STEP,
    QUERY_STEP,
    group_hash,
    keeps,
    key_of,
    noise,
)  # fmt: skip

# kernel arguments of which every value takes the same compiled kernel
UNSPECIALIZED = (
    "n_q", "n_k", "n_tiles", "heads", "mask_stride_b", "mask_stride_h", "drop_threshold"
)  # fmt: skip


@triton.jit
def split_program(n_tiles):
    """Tile and batch x head of this program.

    The tiles of one head are neighbours, so that they share K and V in L2.
    """
    pid = tl.program_id(0)
    return pid % n_tiles, pid // n_tiles


@triton.jit
def load_tile(
    base, start, stride, n,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Rows start.. of an (n, HEAD_DIM) matrix as [ROWS, BLOCK_D]; what lies outside is 0.

    The offset of the first row is 64-bit, those inside the tile are 32-bit.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + dim[None, :]
    if BOUNDED:
        inside = (start + row < n)[:, None] & (dim < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)  # [ROWS, BLOCK_D]
    elif HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)  # [ROWS, BLOCK_D]
    else:
        return tl.load(pointers)  # [ROWS, BLOCK_D]


@triton.jit
def store_tile(
    base, start, stride, n, values,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store [ROWS, BLOCK_D] values to rows start.. of an (n, HEAD_DIM) matrix, cropped to it."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + dim[None, :]
    inside = (start + row < n)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def matrix_origin(offset, stride, TMA: tl.constexpr):
    """Row and column of the element at `offset` in the matrix that a descriptor sees, whose rows
    are `stride` long.

    Computed once before a loop: no compiler hoists a 64-bit division that might not be executed.
    """
    if TMA:
        return (offset // stride).to(tl.int32), (offset % stride).to(tl.int32)
    else:
        return 0, 0


@triton.jit
def load_full(
    base, desc, row, col, start, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return a tile all of whose rows exist: by the tensor memory accelerator where there is a
    descriptor.

    (row, col) is where this head starts in the matrix that the descriptor sees.
    """
    if TMA:
        return desc.load([row + start, col])
    else:
        return load_tile(base, start, stride, 0, ROWS, HEAD_DIM, BLOCK_D, False)


@triton.jit
def load_rows(
    base, desc, row, col, start, stride, n,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """`load_full` of a full tile, else `load_tile`: [ROWS, BLOCK_D]."""
    if FULL:
        return load_full(base, desc, row, col, start, stride, ROWS, HEAD_DIM, BLOCK_D, TMA)
    else:
        return load_tile(base, start, stride, n, ROWS, HEAD_DIM, BLOCK_D, True)


@triton.jit
def block_list(ptr, mid, row, n, BLOCK: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr):
    """Where the partial and the full blocks of a list begin in its index, and how many kernel tiles
    there are of each. Dense, all tiles within n are full, and one that sticks out is partial.
    """
    if DENSE:
        n_full = n // TILE
        return 0, 0, tl.cdiv(n, TILE) - n_full, n_full
    else:
        first = tl.load(ptr + row)
        middle = tl.load(mid + row)
        n_partial = (middle - first).to(tl.int32) * (BLOCK // TILE)
        n_full = (tl.load(ptr + row + 1) - middle).to(tl.int32) * (BLOCK // TILE)
        return first, middle, n_partial, n_full


@triton.jit
def block_start(idx, t, BLOCK: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr):
    """First token of kernel tile t of a list of mask blocks, BLOCK // TILE tiles to a block."""
    if DENSE:
        return t * TILE
    elif BLOCK == TILE:
        return tl.load(idx + t) * TILE
    else:
        return tl.load(idx + t // (BLOCK // TILE)) * BLOCK + (t % (BLOCK // TILE)) * TILE


@triton.jit
def tile_bits(
    bits, tile, row0, col0, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Bits of queries row0.. and keys col0.. of one bit tile: [BLOCK_M, BLOCK_N] bool, or its
    transpose.
    """
    row = tl.cast(tile, tl.int64) * BLOCK_Q + row0 + tl.arange(0, BLOCK_M)
    return row_bits(bits, row, col0, BLOCK_K, BLOCK_N, TRANSPOSED)


@triton.jit
def row_bits(
    bits, row, col0, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Bits of some rows [BLOCK_M] of the bit tiles and of keys col0..: [BLOCK_M, BLOCK_N] bool, or
    its transpose.

    Every word is loaded once for a query row. Which word a key uses is a compile-time constant of
    its register, so the selects below vanish.
    """
    WORDS: tl.constexpr = (BLOCK_K + 31) // 32
    row = bits + row * WORDS + col0 // 32
    key = tl.arange(0, BLOCK_N)
    shift = (col0 + key) % 32 if BLOCK_N < 32 else key % 32
    if TRANSPOSED:
        word = tl.load(row)[None, :]  # [1, BLOCK_M]
        for i in tl.static_range(1, BLOCK_N // 32):
            word = tl.where((key // 32 == i)[:, None], tl.load(row + i)[None, :], word)
        return ((word >> shift[:, None]) & 1) != 0
    else:
        word = tl.load(row)[:, None]  # [BLOCK_M, 1]
        for i in tl.static_range(1, BLOCK_N // 32):
            word = tl.where((key // 32 == i)[None, :], tl.load(row + i)[:, None], word)
        return ((word >> shift[None, :]) & 1) != 0


@triton.jit
def keep_bits(
    row_head, column_head, q_start, k_start, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which probabilities of a tile dropout keeps: [BLOCK_M, BLOCK_N], or its transpose."""
    q = q_start + tl.arange(0, BLOCK_M)
    k = k_start + tl.arange(0, BLOCK_N)
    q = q[None, :] if TRANSPOSED else q[:, None]
    k = k[:, None] if TRANSPOSED else k[None, :]
    group = group_hash(key_of(q, QUERY_STEP, row_head), key_of(k, KEY_STEP, column_head))
    return keeps(noise(group, q, k), threshold)


@triton.jit
def finished(acc, t):
    """acc, once the product that makes it has ended, in iteration t >= 0 of a loop.

    A product whose result the iteration does not use would run on into the next one. The condition
    is always true, which the compiler finds out later.
    """
    return tl.where(t >= 0, acc, 0.0)
