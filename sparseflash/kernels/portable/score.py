"""What a score adds to the portable kernels, beside the functions that `score.by_triton` writes."""

import triton
import triton.language as tl


@triton.jit
def floor_divide(x, y):
    """x // y as Python has it."""
    rest = x % y
    return (x - rest) // y - ((rest != 0) & ((rest < 0) != (y < 0))).to(tl.int32)


@triton.jit
def remainder(x, y):
    """Return x % y as Python has it."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def fixed(x, unit):
    """Return x as an integer in units of 1 / unit. Sums of these do not depend on their order."""
    return tl.floor(x * unit + 0.5).to(tl.int64)


@triton.jit
def places(
    q_start, k_start, n_q, n_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):
    """Return the numbers of the queries and keys of a tile, for those beyond the end the last."""
    q = tl.minimum(q_start + tl.arange(0, BLOCK_M), n_q - 1).to(tl.int32)
    k = tl.minimum(k_start + tl.arange(0, BLOCK_N), n_k - 1).to(tl.int32)
    return (q[None, :], k[:, None]) if T else (q[:, None], k[None, :])


@triton.jit
def scored(
    s, scale, b, h, q_start, k_start, n_q, n_k, args,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr,
    SCORE: tl.constexpr,
):  # fmt: skip
    """Return the logits of products s [BLOCK_M, BLOCK_N], or their transpose, and what `sloped`
    takes of them.
    """
    q, k = places(q_start, k_start, n_q, n_k, BLOCK_M, BLOCK_N, T)
    b, h, first = b.to(tl.int32), h.to(tl.int32), k_start - q_start
    return SCORE(
        s * scale, b, h, q, k, n_q, n_k, first, args, BLOCK_M, BLOCK_N, T, FAST
    )  # fmt: skip


@triton.jit
def sloped(
    s, ds, kept, scale, b, h, q_start, k_start, n_q, n_k, args, sums,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the scaled products, of that of the logits, and the sums with those
    of this tile.
    """
    q, k = places(q_start, k_start, n_q, n_k, BLOCK_M, BLOCK_N, T)
    b, h, first = b.to(tl.int32), h.to(tl.int32), k_start - q_start
    return SLOPE(
        s * scale, ds, kept, b, h, q, k, n_q, n_k, first, args, sums, BLOCK_M, BLOCK_N, T, FAST
    )  # fmt: skip


@triton.jit
def by_distance(
    Out, length, middle, n_q, n_k, heads, args, BANDS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Out (COUNT, B * H, length): the COUNT values of BANDS at the distances from -middle on."""
    bh = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = BANDS(
        bh // heads, bh % heads, at - middle, n_q, n_k, args, BLOCK, BLOCK, False, False
    )  # fmt: skip
    for i in tl.static_range(COUNT):
        row = Out + (i * tl.num_programs(1) + bh).to(tl.int64) * length
        tl.store(row + at, values[i], mask=at < length)
