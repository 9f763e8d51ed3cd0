"""Triton kernels of the selectors: the choice of blocks by scores, and of chunks by each query.

Each launch names its counterpart in plain torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.launch import launch
from sparseflash.select.base import Candidates, Rule
from sparseflash.select.pool_kernels import pool_blocks

INF = tl.constexpr(float("inf"))
LARGE = tl.constexpr(3.0e38)
EMPTY = tl.constexpr(-2)


def shared_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of batch and heads, 0 where one entry is the same for all."""
    return tuple(x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))


@triton.jit
def clamped(score):
    """Return finite scores; NaN becomes the lowest."""
    score = tl.where(score == score, score, -LARGE)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 counts as 0.0
    return tl.minimum(tl.maximum(score, -LARGE), LARGE)


@triton.jit
def sortable(x):
    """float32 as uint32 in the same order; 0 is less than all of them."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def best(key, candidate, count, WIDTH: tl.constexpr):
    """Return the `count` highest candidates of every row, all where there are fewer, and none for 0
    or less; among equals the first come first. key: uint32 (rows, WIDTH), 0 where there is no
    candidate.

    Halves an interval of thresholds until one leaves `count` above it, or none is left to try.
    """
    candidates = tl.sum(candidate.to(tl.int32), 1)
    count = tl.minimum(count, candidates)
    nothing = tl.full(count.shape, 0xFFFFFFFF, tl.uint32)
    low = tl.min(tl.where(candidate, key, 0xFFFFFFFF), 1)  # at least `count` keys reach this
    high = tl.max(key, 1)  # and a higher threshold cannot be
    low = tl.where(count > 0, low, nothing)
    high = tl.where(count > 0, tl.where(count == candidates, low, high), nothing)
    wide = tl.max((low < high).to(tl.int32), 0)
    while wide != 0:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        reached = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        high = tl.where(reached == count, middle, tl.where(reached > count, high, middle - 1))
        low = tl.where(reached >= count, middle, low)
        wide = tl.max((low < high).to(tl.int32), 0)
    reached = tl.sum((key >= low[:, None]).to(tl.int32), 1)
    excess = tl.maximum(reached - tl.maximum(count, 0), 0)  # of those equal to the threshold
    end = tl.full(count.shape, WIDTH, tl.int32)
    column = tl.arange(0, WIDTH)[None, :]
    if tl.max(excess, 0) > 0:
        tie = key == low[:, None]
        kept = tl.sum(tie.to(tl.int32), 1) - excess
        end = tl.zeros_like(count)  # ties from this column on are left out
        step = WIDTH
        while step > 0:
            further = end + step
            enough = tl.sum((tie & (column < further[:, None])).to(tl.int32), 1) <= kept
            end = tl.where(enough & (further <= WIDTH), further, end)
            step = step // 2
    return (key > low[:, None]) | ((key == low[:, None]) & (column < end[:, None]))


def choose_blocks(
    scores: Tensor, candidates: Candidates, rule: Rule, probabilities: bool
) -> Tensor:
    """`choose.choose_torch`, one program a row."""
    scores = scores.float().contiguous()
    batch, heads, rows, cols = scores.shape
    codes, forced, low = candidates.codes, candidates.forced, candidates.low
    out = torch.empty_like(scores, dtype=codes.dtype)
    width = triton.next_power_of_2(cols)
    launch(
        _choose, (batch * heads * rows,),
        scores, codes, forced, low, candidates.high, out, *shared_strides(codes),
        *((0, 0) if forced is None else shared_strides(forced)), *shared_strides(low),
        heads, rows, cols, float(rule.value),
        WIDTH=width, KIND="count" if rule.fixed else rule.kind, SOFTMAX=not probabilities,
        FORCED=forced is not None, num_warps=max(1, min(8, width // 256)),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("heads", "rows", "cols", "value"))
def _choose(
    Scores, Codes, Forced, Low, High, Out, codes_b, codes_h, forced_b, forced_h, low_b, low_h,
    heads, rows, cols, value,
    WIDTH: tl.constexpr, KIND: tl.constexpr, SOFTMAX: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Choose the best of a row: those from a threshold upwards, which is found by halving."""
    pid = tl.program_id(0).to(tl.int64)
    b, h, row = pid // rows // heads, pid // rows % heads, pid % rows
    col = tl.arange(0, WIDTH)
    there = col < cols
    code = tl.load(Codes + b * codes_b + h * codes_h + row * cols + col, mask=there, other=EMPTY)
    candidate = code != EMPTY
    score = tl.load(Scores + pid * cols + col, mask=there, other=0.0)
    score = clamped(score)
    order = score
    if FORCED:
        forced = tl.load(
            Forced + b * forced_b + h * forced_h + row * cols + col, mask=there, other=0
        )
        order = tl.where(candidate & (forced != 0), INF, order)
    key = tl.where(candidate, sortable(order), 0)

    low = tl.load(Low + b * low_b + h * low_h + row)
    count = low
    if KIND != "count":
        if SOFTMAX:
            top = tl.max(tl.where(candidate, score, -LARGE), 0)
            weight = tl.where(candidate, tl.exp(score - top), 0.0)
        else:
            weight = tl.where(candidate, tl.maximum(score, 0.0), 0.0)
        p = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
        if KIND == "mass":
            threshold = tl.min(tl.where(candidate, key, 0xFFFFFFFF), 0)
            highest = tl.max(key, 0)  # the threshold that leaves `value` lies from one to the other
            while threshold < highest:
                higher = threshold + ((highest - threshold) >> 1) + ((highest - threshold) & 1)
                enough = tl.sum(tl.where(key >= higher, p, 0.0), 0) >= value
                threshold = tl.where(enough, higher, threshold)
                highest = tl.where(enough, highest, higher - 1)
            above = key > threshold
            missing = value - tl.sum(tl.where(above, p, 0.0), 0)
            each = tl.max(tl.where(key == threshold, p, 0.0), 0)
            ties = tl.ceil(missing / tl.maximum(each, 1e-30))
            count = tl.sum(above.to(tl.int32), 0)
            count += tl.minimum(tl.maximum(ties, 1.0), 1.0 * cols).to(tl.int32)
        else:
            count = tl.sum((candidate & (p >= value)).to(tl.int32), 0)
        count = tl.minimum(tl.maximum(count, low), tl.load(High + b * low_b + h * low_h + row))

    counts = tl.zeros([1], tl.int32) + count
    taken = tl.reshape(best(key[None, :], candidate[None, :], counts, WIDTH), [WIDTH])
    tl.store(Out + pid * cols + col, tl.where(taken & candidate, code, EMPTY), mask=there)


MAX_CHUNKS = 2048  # whose scores a program holds
NARROW = 32  # chunks of the narrowest tiles


def pick_chunks(
    q: Tensor, k: Tensor, chunk: int, count: int, first: int, own: int, padded: int, *, nsa: bool
) -> Tensor:
    """`tokens.pick_torch`: int16 (B, heads, padded / 16, chunks).

    One program scores a tile of queries against all chunks, on the tensor cores, and keeps the
    scores to itself.
    """
    q, k = q.detach(), k.detach()
    q = q if q.stride(-1) == 1 else q.contiguous()
    batch, q_heads, n, dim = q.shape
    group = q_heads // k.shape[1]
    heads, members, sharing = (k.shape[1], group, 1) if nsa else (q_heads, 1, group)
    exact = q.dtype == torch.bfloat16  # products of bfloat16 are exact in float32
    (mean,) = pool_blocks((k, chunk, ("high", "middle", "low") if exact else ("mean",)))
    chunks = mean.shape[2]
    # zero, as a narrow tile writes only the chunks that it holds
    words = torch.zeros(batch, heads, padded // 16, chunks, dtype=torch.int16, device=q.device)
    offset = k.shape[2] - n  # the last query stands at the last key
    sizes = (n, offset, padded // 16, chunks)
    begin = 0
    while begin < chunks:  # the first queries see few chunks: narrow tiles do for them
        width = min(NARROW, triton.next_power_of_2(chunks)) if begin == 0 else 2 * begin
        rows, step, warps = tile(max(width, 16), dim, members)
        # queries that two widths have both in a tile are written by the wider one at last
        tile0 = max(begin * chunk - offset, 0) // rows
        end = padded if width >= chunks else min(width * chunk - offset, padded)
        tiles, begin = -(-end // rows) - tile0, width
        if tiles <= 0:
            continue
        launch(
            _pick, (tiles * batch * heads,),
            q, mean, words, *q.stride()[:3], *sizes, tile0, tiles, heads,
            count, first, own, dim**-0.5, MEMBERS=members, SHARING=sharing, CHUNK=chunk,
            HEAD_DIM=dim, STEP=step, PLANES=3 if exact else 1, ROWS=rows, WIDTH=max(width, 16),
            NSA=nsa, num_warps=warps, num_stages=2,
        )  # fmt: skip
    return words


def tile(width: int, dim: int, members: int) -> tuple[int, int, int]:
    """Return queries of a program, dimensions at a time, and warps, by registers."""
    rows = 64 if width <= 64 else 32 if width <= 256 else 16
    warps = max(4, min(16, rows * width // 2048))
    return rows, min(64 if width <= 128 else 32 if width <= 1024 else 16, _power(dim)), warps


def _power(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


@triton.jit(do_not_specialize=(
    "n", "offset", "groups", "chunks", "tile0", "tiles", "heads", "count", "first", "own"
))  # fmt: skip
def _pick(
    Q, Mean, Words, stride_b, stride_h, stride_n, n, offset, groups, chunks, tile0, tiles, heads,
    count, first, own, scale,
    MEMBERS: tl.constexpr, SHARING: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STEP: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    NSA: tl.constexpr,
):  # fmt: skip
    """Pick the chunks of each of ROWS queries, as words of 16 queries a chunk.

    A word's bit i stands for query i of its 16. In NSA the MEMBERS query heads of a KV head share
    what they pick; in MoBA every query head picks for itself, and SHARING of them have one KV head.
    """
    pid = tl.program_id(0)
    tile, bh = tile0 + pid % tiles, (pid // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    token = tile * ROWS + tl.arange(0, ROWS)
    position = token + offset
    chunk = tl.arange(0, WIDTH)
    last = tl.minimum(tile * ROWS + ROWS, n) - 1 + offset  # position of a query that exists
    means = Mean + (b * (heads // SHARING) + h // SHARING) * chunks * (PLANES * HEAD_DIM)
    near = chunk <= last // CHUNK  # no query of the tile sees the others
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for member in range(MEMBERS):
        queries = Q + b * stride_b + (h * MEMBERS + member) * stride_h
        score = _products(
            queries, means, token, chunk, near, stride_n, n, HEAD_DIM, STEP, PLANES, ROWS, WIDTH
        )
        if NSA:  # softmax over the chunks that lie before the query whole
            before = (chunk + 1)[None, :] * CHUNK <= position[:, None] + 1
            score = tl.where(before, score * scale, -INF)
            top = tl.max(score, 1)
            top = tl.where(top == -INF, 0.0, top)
            weight = tl.exp(score - top[:, None])
            score = weight / tl.maximum(tl.sum(weight, 1), 1e-30)[:, None]
        if MEMBERS == 1:
            total = score
        else:
            total += score
    mine = tl.where((token < n) & (position >= 0), position // CHUNK, -1)[:, None]
    seen = chunk[None, :] <= mine
    forced = seen & ((chunk[None, :] > mine - own) | (chunk[None, :] < first))
    left = count - tl.sum(forced.to(tl.int32), 1)
    rest = seen & (forced == 0)
    taken = forced | best(tl.where(rest, sortable(clamped(total)), 0), rest, left, WIDTH)
    bits = tl.reshape(taken.to(tl.int32), [ROWS // 16, 16, WIDTH])
    bits = tl.sum(bits << tl.arange(0, 16)[None, :, None], 1)
    at = tile * (ROWS // 16) + tl.arange(0, ROWS // 16)
    to = Words + (bh * groups + at[:, None]) * chunks + chunk[None, :]
    tl.store(to, bits.to(tl.int16), mask=(at < groups)[:, None] & (chunk < chunks)[None, :])


@triton.jit
def _products(
    Q, Means, token, chunk, near, stride_n, n,
    HEAD_DIM: tl.constexpr, STEP: tl.constexpr, PLANES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Multiply queries and means, to float32: a mean comes in three parts in bfloat16, or in
    float32.
    """
    score = tl.zeros([ROWS, WIDTH], tl.float32)
    q_at = Q + token[:, None].to(tl.int64) * stride_n
    mean_at = Means + chunk[None, :] * (PLANES * HEAD_DIM)
    for start in tl.range(0, HEAD_DIM, STEP):
        dim = start + tl.arange(0, STEP)
        inside = dim < HEAD_DIM
        there = (token < n)[:, None] & inside[None, :]
        q = tl.load(q_at + dim[None, :], mask=there, other=0.0)
        wanted = near[None, :] & inside[:, None]
        if PLANES == 3:
            high = tl.load(mean_at + dim[:, None], mask=wanted, other=0.0)
            middle = tl.load(mean_at + HEAD_DIM + dim[:, None], mask=wanted, other=0.0)
            low = tl.load(mean_at + 2 * HEAD_DIM + dim[:, None], mask=wanted, other=0.0)
            score = tl.dot(q, low, score)
            score = tl.dot(q, middle, score)
            score = tl.dot(q, high, score)
        else:
            mean = tl.load(mean_at + dim[:, None], mask=wanted, other=0.0)
            score = tl.dot(q.to(tl.float32), mean, score, input_precision="tf32x3")
    return score


def union_of_picks(
    words: Tensor, codes: Tensor, heads: int, per_row: int, per_chunk: int
) -> Tensor:
    """`tokens.union_torch`: one program a row, 1024 of its blocks at a time."""
    batch, own_heads, groups, chunks = words.shape
    rows, cols = codes.shape[2:]
    out = torch.empty(batch, heads, rows, cols, dtype=torch.int32, device=words.device)
    launch(
        _union, (batch * heads * rows,),
        words, codes, out, *shared_strides(codes), heads, own_heads, rows, cols, groups,
        chunks, per_chunk, PER_ROW=per_row, WIDTH=min(1024, triton.next_power_of_2(cols)),
        num_warps=1 if cols <= 256 else 4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=(
    "heads", "own_heads", "rows", "cols", "groups", "chunks", "per_chunk"
))  # fmt: skip
def _union(
    Words, Codes, Out, codes_b, codes_h, heads, own_heads, rows, cols, groups, chunks, per_chunk,
    PER_ROW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    b, h, row = pid // rows // heads, pid // rows % heads, pid % rows
    own = b * own_heads + h // (heads // own_heads)
    for start in range(0, cols, WIDTH):
        col = start + tl.arange(0, WIDTH)
        there = col < cols
        at = Words + (own * groups + row * PER_ROW) * chunks + col // per_chunk
        picked = tl.zeros([WIDTH], tl.int16)
        for group in tl.static_range(PER_ROW):
            picked |= tl.load(at + group * chunks, mask=there, other=0)
        code = tl.load(
            Codes + b * codes_b + h * codes_h + row * cols + col, mask=there, other=EMPTY
        )
        tl.store(Out + pid * cols + col, tl.where(picked != 0, code, EMPTY), mask=there)
