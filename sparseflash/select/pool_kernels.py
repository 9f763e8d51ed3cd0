"""The Triton kernel that pools blocks of tokens."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.launch import launch

_PLACES = ("mean", "max", "min", "positive", "negative", "high", "middle", "low")


def pool_blocks(*inputs: tuple[Tensor, int, Sequence[str]]) -> tuple[Tensor, ...]:
    """`pool.pool_torch` of one or two (x, block, kinds), in one launch that reads each x once.

    The kinds "high", "middle" and "low" are bfloat16 parts whose sum is the mean in float32.
    """
    arguments, codes, out, programs = [], [], [], []
    for x, block, kinds in inputs:
        x = x.detach()
        x = x if x.stride(-1) == 1 else x.contiguous()
        batch, heads, n, dim = x.shape
        blocks = -(-n // block)
        dtype = torch.bfloat16 if "high" in kinds else torch.float32
        out.append(
            torch.empty(batch, heads, blocks, len(kinds) * dim, dtype=dtype, device=x.device)
        )
        arguments += [x, out[-1], *x.stride()[:3], n, blocks, heads]
        place = sum((i + 1) << 4 * _PLACES.index(kind) for i, kind in enumerate(kinds))
        codes += [place, len(kinds), block]
        programs.append(blocks * batch * heads)
    if len(inputs) == 1:
        arguments, codes = 2 * arguments, 2 * codes
    dim = inputs[0][0].shape[-1]
    # tokens at a time, and times unrolled: three reductions take registers
    step, unroll = (4, 16) if max(len(kinds) for _, _, kinds in inputs) > 2 else (8, 8)
    launch(
        _pool, (sum(programs),),
        *arguments, programs[0], *codes, HEAD_DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
        BOTH=len(inputs) == 2, MOST=step,
        UNROLL=unroll, num_warps=2,
    )  # fmt: skip
    return tuple(out)


@triton.jit(do_not_specialize=("n", "blocks", "heads", "n2", "blocks2", "heads2", "first"))
def _pool(
    X, Out, stride_b, stride_h, stride_n, n, blocks, heads,
    X2, Out2, stride_b2, stride_h2, stride_n2, n2, blocks2, heads2, first,
    PLACES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    PLACES2: tl.constexpr, KINDS2: tl.constexpr, BLOCK2: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOTH: tl.constexpr, MOST: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Pool the blocks of one tensor in the first programs, those of the second in the others."""
    pid = tl.program_id(0)
    if BOTH:
        if pid < first:
            _pool_block(
                X, Out, stride_b, stride_h, stride_n, n, blocks, heads, pid,
                PLACES, KINDS, BLOCK, HEAD_DIM, BLOCK_D, MOST, UNROLL,
            )  # fmt: skip
        else:
            _pool_block(
                X2, Out2, stride_b2, stride_h2, stride_n2, n2, blocks2, heads2, pid - first,
                PLACES2, KINDS2, BLOCK2, HEAD_DIM, BLOCK_D, MOST, UNROLL,
            )  # fmt: skip
    else:
        _pool_block(
            X, Out, stride_b, stride_h, stride_n, n, blocks, heads, pid,
            PLACES, KINDS, BLOCK, HEAD_DIM, BLOCK_D, MOST, UNROLL,
        )  # fmt: skip


@triton.jit
def _pool_block(
    X, Out, stride_b, stride_h, stride_n, n, blocks, heads, pid,
    PLACES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One block, STEP tokens at a time, reduced to one vector in the end."""
    MAX: tl.constexpr = PLACES // 16 % 16 > 0
    MIN: tl.constexpr = PLACES // 256 % 16 > 0
    MEAN: tl.constexpr = PLACES % 16 > 0 or PLACES // 4096 > 0
    LOWEST: tl.constexpr = BLOCK & -BLOCK
    STEP: tl.constexpr = LOWEST if LOWEST < MOST else MOST
    block, bh = pid % blocks, (pid // blocks).to(tl.int64)
    first = block * BLOCK
    dim = tl.arange(0, BLOCK_D)
    base = X + bh // heads * stride_b + bh % heads * stride_h + dim[None, :]
    total = tl.zeros([STEP, BLOCK_D], tl.float32)
    most = tl.full([STEP, BLOCK_D], float("-inf"), tl.float32)
    least = tl.full([STEP, BLOCK_D], float("inf"), tl.float32)
    for step in tl.range(0, BLOCK, STEP, loop_unroll_factor=UNROLL):
        token = first + step + tl.arange(0, STEP)
        there = (token < n)[:, None] & (dim < HEAD_DIM)[None, :]
        x = tl.load(base + token[:, None].to(tl.int64) * stride_n, mask=there, other=0.0)
        x = x.to(tl.float32)
        if MEAN:
            total += x
        if MAX:
            most = tl.maximum(most, tl.where(there, x, float("-inf")))
        if MIN:
            least = tl.minimum(least, tl.where(there, x, float("inf")))
    out = Out + (bh * blocks + block) * (KINDS * HEAD_DIM) - HEAD_DIM + dim
    kept = dim < HEAD_DIM
    if MAX:
        tl.store(out + PLACES // 16 % 16 * HEAD_DIM, tl.max(most, 0), mask=kept)
    if MIN:
        tl.store(out + PLACES // 256 % 16 * HEAD_DIM, tl.min(least, 0), mask=kept)
    if MEAN:
        mean = tl.sum(total, 0) / tl.minimum(n - first, BLOCK)
        if PLACES % 16 > 0:
            tl.store(out + PLACES % 16 * HEAD_DIM, mean, mask=kept)
        if PLACES // 4096 % 16 > 0:
            tl.store(out + PLACES // 4096 % 16 * HEAD_DIM, tl.maximum(mean, 0.0), mask=kept)
        if PLACES // 65536 % 16 > 0:
            tl.store(out + PLACES // 65536 % 16 * HEAD_DIM, tl.minimum(mean, 0.0), mask=kept)
        if PLACES >> 20 > 0:  # all three, in their order
            high = mean.to(tl.bfloat16)
            rest = mean - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            tl.store(out + HEAD_DIM, high, mask=kept)
            tl.store(out + 2 * HEAD_DIM, middle, mask=kept)
            tl.store(out + 3 * HEAD_DIM, low, mask=kept)
