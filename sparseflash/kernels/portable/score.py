"""What a score adds to the portable kernels, beside the functions that `score.by_triton` writes."""

import triton
import triton.language as tl

SPAN = tl.constexpr(128)  # queries and keys of a block that is far from the diagonal, or is not


@triton.jit
def near_keys(q_start, low, high):
    """Return the first key, and the end, of the blocks of SPAN that are near for these queries:
    whose distances are not all up to `low`, or all from `high` on.
    """
    block = q_start // SPAN * SPAN
    first = low - SPAN + block
    end = tl.maximum(high + SPAN + block, 0)
    return tl.where(first < 0, 0, (first // SPAN + 1) * SPAN), tl.cdiv(end, SPAN) * SPAN


@triton.jit
def listed_between(idx, n, first, end, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return which of the n tiles of an ascending list of blocks lie between two keys."""
    STEPS: tl.constexpr = BLOCK_K // BLOCK_N
    before = 0
    until = 0
    for start in tl.range(0, n // STEPS, 128):
        at = start + tl.arange(0, 128)
        key = tl.load(idx + at, mask=at < n // STEPS, other=0) * BLOCK_K
        there = at < n // STEPS
        before += tl.sum((there & (key + BLOCK_K <= first)).to(tl.int32), 0)
        until += tl.sum((there & (key < end)).to(tl.int32), 0)
    return before * STEPS, until * STEPS


@triton.jit
def floor_divide(x, y):
    """Return x // y as Python has it, by a dividend that is not negative: Triton takes quotients of
    neighbours for equal as if it rounded down, and rounds to 0.
    """
    x, y = tl.where(y < 0, -x, x), tl.where(y < 0, -y, y)
    sign = tl.where(x < 0, -1, 0)
    return ((x ^ sign) // y) ^ sign


@triton.jit
def remainder(x, y):
    """Return x % y as Python has it."""
    return x - floor_divide(x, y) * y


@triton.jit
def fixed(x, step):
    """Return x as a number of steps. Sums of these do not depend on their order."""
    return tl.floor(x * (1.0 / step) + 0.5).to(tl.int64)


@triton.jit
def band(first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the distances in a tile and more, from the smallest less one on, for `spread`."""
    WIDTH: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)
    return first - BLOCK_M + tl.arange(0, WIDTH)


@triton.jit
def spread(values, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """Values of the distances of a `band`, at the entries [BLOCK_M, BLOCK_N] of the tile, or its
    transpose.
    """
    query = BLOCK_M - tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    at = key[:, None] + query[None, :] if T else query[:, None] + key[None, :]
    return tl.reshape(tl.gather(values, tl.reshape(at, [BLOCK_M * BLOCK_N]), 0), at.shape)


@triton.jit
def sums_by_distance(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return those of a tile [BLOCK_M, BLOCK_N], at the distances of its `band`."""
    WIDTH: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)
    key = tl.arange(0, WIDTH)[None, :] - BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (key >= 0) & (key < BLOCK_N)  # [BLOCK_M, WIDTH]
    skewed = tl.gather(x, tl.minimum(tl.maximum(key, 0), BLOCK_N - 1), 1)
    return tl.sum(tl.where(inside, skewed, 0.0), 0)  # [WIDTH]


@triton.jit
def places(q_start, k_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """Return the numbers of the queries and keys of a tile, some of them beyond the end."""
    q = (q_start + tl.arange(0, BLOCK_M)).to(tl.int32)
    k = (k_start + tl.arange(0, BLOCK_N)).to(tl.int32)
    return (q[None, :], k[:, None]) if T else (q[:, None], k[None, :])


@triton.jit
def scored(
    s, scale, numbers, b, h, q_start, k_start, n_q, n_k, args,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr,
    SCORE: tl.constexpr,
):  # fmt: skip
    """Return what makes logits of products s [BLOCK_M, BLOCK_N], or their transpose: x, unit and
    add, so that they are x unit + add in base 2, and what `sloped` takes of them.
    """
    q, k = places(q_start, k_start, BLOCK_M, BLOCK_N, T)
    b, h, first = b.to(tl.int32), h.to(tl.int32), k_start - q_start
    return SCORE(s, scale, numbers, b, h, q, k, n_q, n_k, first, args, BLOCK_M, BLOCK_N, T, FAST)


@triton.jit
def sloped(
    s, ds, kept, scale, numbers, b, h, q_start, k_start, n_q, n_k, args, sums,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the scaled products, of that of the logits, and the sums with those
    of this tile.
    """
    q, k = places(q_start, k_start, BLOCK_M, BLOCK_N, T)
    b, h, first = b.to(tl.int32), h.to(tl.int32), k_start - q_start
    far = k_start // SPAN * SPAN - q_start // SPAN * SPAN
    return SLOPE(
        s, scale, ds, kept, numbers, b, h, q, k, n_q, n_k, first, far, args, sums,
        BLOCK_M, BLOCK_N, T, FAST,
    )  # fmt: skip


@triton.jit
def by_distance(
    Out, length, middle, scale, n_q, n_k, heads, args, BANDS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Out (COUNT, B * H, length): the COUNT values of BANDS at the distances from -middle on."""
    bh = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = BANDS(
        scale, bh // heads, bh % heads, at - middle, n_q, n_k, args, BLOCK, BLOCK, False, False
    )
    for i in tl.static_range(COUNT):
        row = Out + (i * tl.num_programs(1) + bh).to(tl.int64) * length
        tl.store(row + at, values[i], mask=at < length)
