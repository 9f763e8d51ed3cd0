"""The Triton kernels of sums along antidiagonals."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.device import on
from sparseflash.kernels.common.launch import launch
from sparseflash.select.kernels.common import INF, shared_strides

ROWS, COLS = 128, 256  # squares of a tile
MASKED_COLS = 128  # a mask takes registers
LOOK = tl.constexpr(64)


def antidiagonal_sums(
    q: Tensor,
    k: Tensor,
    stride: int,
    block_size: tuple[int, int],
    allowed: Tensor | None,
    at_once: int,
) -> Tensor:
    """`antidiagonals.block_sums_torch`.

    The scores of squares never leave the chip: what is written is the logarithm of the sum of
    their exponentials, for every row of squares and key block, `at_once` numbers at a time.

    allowed: bool, broadcastable to (B, H, squares of queries, squares of keys), or None for all
        that exist.
    """
    q, k = (x.detach() for x in (q, k))
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, heads, n_q, dim = q.shape
    rows, cols = -(-n_q // block_size[0]), -(-k.shape[2] // block_size[1])
    per_row, per_col = block_size[0] // stride, block_size[1] // stride
    each = max(1, min(rows, at_once // (batch * heads * per_row * cols)))  # block rows in a part
    logs = torch.empty(batch, heads, each * per_row, cols, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, rows, cols, dtype=torch.float32, device=q.device)
    held = triton.next_power_of_2(per_col)  # squares of a key block, in a tile
    width = max(held, COLS if allowed is None else MASKED_COLS)
    row_tiles, col_tiles = -(-each * per_row // ROWS), -(-cols // (width // held))
    strides = (0, 0, 0, 0) if allowed is None else shared_strides(allowed, (0, 1, 2, 3))
    with on(q.device):
        for first in range(0, rows, each):
            launch(
                _log_sums, (row_tiles * col_tiles * batch * heads,),
                q, k, allowed, logs, *q.stride()[:3], *k.stride()[:3], *strides,
                n_q, k.shape[2], first * per_row, each * per_row, cols, heads,
                heads // k.shape[1], row_tiles, col_tiles, dim**-0.5 / stride,
                STRIDE=stride, PER_COL=per_col, HELD=held, HEAD_DIM=dim,
                STEP=max(16, min(128 // q.element_size(), triton.next_power_of_2(dim))),
                MASKED=allowed is not None, ROWS=ROWS, COLS=width, num_warps=8, num_stages=3,
            )  # fmt: skip
            count = min(each, rows - first)
            launch(
                _probabilities, (count * batch * heads,),
                logs, out, first, count, each * per_row, rows, cols, PER_ROW=per_row,
                WIDTH=triton.next_power_of_2(cols), num_warps=1 if cols <= 512 else 8,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=(
    "n_q", "n_k", "first", "lines", "cols", "heads", "sharing", "row_tiles", "col_tiles"
))  # fmt: skip
def _log_sums(
    Q, K, Allowed, Logs, q_b, q_h, q_n, k_b, k_h, k_n, allowed_b, allowed_h, allowed_q, allowed_k,
    n_q, n_k, first, lines, cols, heads, sharing, row_tiles, col_tiles, scale,
    STRIDE: tl.constexpr, PER_COL: tl.constexpr, HELD: tl.constexpr, HEAD_DIM: tl.constexpr,
    STEP: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Return a tile of squares: ROWS of queries by the key blocks that COLS squares hold.

    Token STRIDE - 1 - s of a square of queries meets token s of a square of keys: a product over
    STRIDE * HEAD_DIM.
    """
    pid = tl.program_id(0)
    tile, bh = pid % (row_tiles * col_tiles), (pid // (row_tiles * col_tiles)).to(tl.int64)
    b, h = bh // heads, bh % heads
    BLOCKS: tl.constexpr = COLS // HELD
    line = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    block0 = tile // row_tiles * BLOCKS
    square = tl.arange(0, COLS)
    row = first + line
    col = (block0 + square // HELD) * PER_COL + square % HELD
    row_there = (line < lines) & (row * STRIDE < n_q)
    col_there = (square % HELD < PER_COL) & (col * STRIDE < n_k)
    some = 1
    if MASKED:  # whether there is anything to do; few at a time, for want of registers
        lines0 = (first + tile % row_tiles * ROWS).to(tl.int64)
        at = Allowed + b * allowed_b + h * allowed_h + lines0 * allowed_q
        some = 0
        for start in range(0, COLS, LOOK):
            near = start + tl.arange(0, LOOK)
            near_col = (block0 + near // HELD) * PER_COL + near % HELD
            near_there = (near % HELD < PER_COL) & (near_col * STRIDE < n_k)
            mask = tl.load(
                at + tl.arange(0, ROWS)[:, None] * allowed_q + near_col[None, :] * allowed_k,
                mask=row_there[:, None] & near_there[None, :], other=0,
            )  # fmt: skip
            some = tl.maximum(some, tl.max(tl.max(mask.to(tl.int32), 1), 0))
    found = tl.full([ROWS, BLOCKS], float("-inf"), tl.float32)
    if some > 0:
        score = tl.zeros([ROWS, COLS], tl.float32)
        queries = Q + b * q_b + h * q_h
        keys = K + b * k_b + h // sharing * k_h
        PARTS: tl.constexpr = (HEAD_DIM + STEP - 1) // STEP
        for part in tl.range(0, STRIDE * PARTS):
            s = part // PARTS
            dim = part % PARTS * STEP + tl.arange(0, STEP)
            q_token = row * STRIDE + (STRIDE - 1 - s)
            k_token = col * STRIDE + s
            q = tl.load(
                queries + q_token[:, None].to(tl.int64) * q_n + dim[None, :],
                mask=(row_there & (q_token < n_q))[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            k = tl.load(
                keys + k_token[None, :].to(tl.int64) * k_n + dim[:, None],
                mask=(col_there & (k_token < n_k))[None, :] & (dim < HEAD_DIM)[:, None], other=0.0,
            )  # fmt: skip
            score = tl.dot(q, k, score, input_precision="tf32x3")
        there = row_there[:, None] & col_there[None, :]
        if MASKED:
            place = tl.arange(0, ROWS)[:, None] * allowed_q + col[None, :] * allowed_k
            there = there & (tl.load(at + place, mask=there, other=0) != 0)
        score = tl.reshape(tl.where(there, score * scale, -INF), [ROWS, BLOCKS, HELD])
        top = tl.max(score, 2)
        shown = tl.where(top == -INF, 0.0, top)
        sums = tl.sum(tl.exp(score - shown[:, :, None]), 2)
        found = tl.where(top == -INF, -INF, shown + tl.log(sums))
    block = block0 + tl.arange(0, BLOCKS)
    to = Logs + bh * lines * cols + (line[:, None] * cols + block[None, :])
    tl.store(to, found, mask=(line < lines)[:, None] & (block < cols)[None, :])


@triton.jit(do_not_specialize=("first", "count", "lines", "rows", "cols"))
def _probabilities(
    Logs, Out, first, count, lines, rows, cols, PER_ROW: tl.constexpr, WIDTH: tl.constexpr
):
    """Softmax over every row of squares, added up over the rows of a block."""
    pid = tl.program_id(0).to(tl.int64)
    bh, row = pid // count, pid % count
    col = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for i in range(PER_ROW):
        at = Logs + (bh * lines + row * PER_ROW + i) * cols + col
        log = tl.load(at, mask=col < cols, other=-INF)
        top = tl.max(log, 0)
        weight = tl.exp(log - tl.where(top == -INF, 0.0, top))
        p = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
        total += tl.where(p == p, p, 0.0)  # a row with a score that is no number has none
    tl.store(Out + (bh * rows + first + row) * cols + col, total, mask=col < cols)
