"""The consumer of `cols.py` for scattered key blocks of 64 at head dims from 65 to 128.

One warpgroup has 64 keys, and a multiprocessor two such programs, which never wait for each other.
There are registers for 232 numbers a thread, of which dK and dV take 128. So dQ is made in two
halves of its columns. The second waits for the next block, and runs beside its exponentials.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.common.softmax import gradient_scale, probabilities
from sparseflash.kernels.hopper.backward.dq import add_part, early_block, start_columns
from sparseflash.kernels.hopper.backward.feed import operands
from sparseflash.kernels.hopper.backward.tile import (
    allowed_words,
    as_rows,
    over_tiles,
    store_gradients,
)  # fmt: skip
from sparseflash.kernels.hopper.columns import (
    no_sums,
    products,
    scaled,
    start_scores,
    start_sums,
    wait_sums,
)  # fmt: skip
from sparseflash.kernels.hopper.common import accumulator
from sparseflash.kernels.hopper.gluon import barrier
from sparseflash.kernels.hopper.masking import where_allowed


@gluon.jit
def _start_dq(f, ds, k, HALF: gl.constexpr):
    """Return a half of the columns of dQ = dS K; ds [64, 64], k [64, BLOCK_D]."""
    return start_columns(ds, k, HALF, f.BLOCK_D // 2, f.COLUMNS)


@gluon.jit
def _add_dq(f, dq, entry, row0, FIRST: gl.constexpr):
    """Add to the dQ of a list entry, columns FIRST and following."""
    block = early_block(f, f.idx + entry.to(gl.int64) * f.GATHER)
    add_part(f, dq, block, row0, 0, FIRST)


@gluon.jit
def _block(f, dk, dv, tiles, g, words, masked, entry, tile, FIRST: gl.constexpr):
    """Add a block of queries to dK, dV and half of dQ, and to the other half the block before it,
    unless this is the first.
    """
    bufs, bars = f.bufs, f.bars
    HALF: gl.constexpr = f.BLOCK_D // 2
    DTYPE: gl.constexpr = tiles.q.dtype
    SCORES: gl.constexpr = accumulator(f.BLOCK_M)  # layout of S^T, P^T, dP^T and dS^T
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)  # of a number for each query
    s = g % f.STAGES
    phase = (g // f.STAGES) & 1
    ds_place = bufs.ds.index(0)
    mbarrier.wait(bars.q_full.index(s), phase)
    st = gl.zeros([64, f.BLOCK_M], gl.float32, SCORES)
    st = start_scores(tiles.k, tiles.q, st, f.COLUMNS, False)
    lse_log2 = bufs.lse_log2.index(s).load(QUERIES)
    if FIRST:
        st = warpgroup_mma_wait(0, deps=(st,))
    else:
        dq_async = _start_dq(f, ds_place, tiles.k, 1)
        st = warpgroup_mma_wait(1, deps=(st,))
    p = probabilities(st, f.scale_log2, lse_log2[None, :])  # P^T [64, BLOCK_M]
    # The barrier also bounds a basic block: ptxas hoists the wait for dQ above the exponentials
    # otherwise.
    mbarrier.wait(bars.dout_full.index(s), phase)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=(dq_async,))
        _add_dq(f, dq, entry - 1, tile.row0, HALF)
        mbarrier.wait(bars.dout_full.index(s), phase)
    if f.PARTIAL:
        if masked:  # only here are there registers for it
            p = where_allowed(p, words, 0.0)
    pb = gl.convert_layout(p.to(DTYPE), P_OPERAND, assert_trivial=True)
    dpt = as_rows(bufs.neg_delta.index(s).load(QUERIES), SCORES, False)
    dpt = start_scores(tiles.vw, tiles.dout, dpt, f.COLUMNS_V, True)
    dv_async = start_sums(pb, tiles.dout, dv)  # [64, COLUMNS_V]
    dpt = warpgroup_mma_wait(products(f.COLUMNS_V), deps=(dpt,))
    ds = (p * dpt).to(DTYPE)  # dS^T [64, BLOCK_M]
    barrier()  # all warps have read dS of the block before
    ds_place.store(ds)
    fence_async_shared()
    barrier()
    dq_async = _start_dq(f, ds_place, tiles.k, 0)
    ds = gl.convert_layout(ds, DS_OPERAND, assert_trivial=True)
    dk_async = start_sums(ds, tiles.q, dk)  # [64, COLUMNS]
    dv = wait_sums(dv_async, 1 + products(f.COLUMNS))
    mbarrier.arrive(bars.dout_empty.index(s), count=1)
    dq = warpgroup_mma_wait(products(f.COLUMNS), deps=(dq_async,))
    _add_dq(f, dq, entry, tile.row0, 0)
    mbarrier.wait(bars.q_full.index(s), phase)
    dk = wait_sums(dk_async, 0)
    mbarrier.arrive(bars.q_empty.index(s), count=1)
    return dk, dv


@gluon.jit
def _on_tile(f, tile, g, CONSUMER: gl.constexpr):
    """Make dK and dV of 64 keys, and what they add to dQ."""
    bufs = f.bufs
    kv, n, bit, limit = tile.kv, tile.n, tile.bit, tile.limit
    dk = no_sums(f.COLUMNS)
    dv = no_sums(f.COLUMNS_V)
    if n > 0:
        words = allowed_words(f, bit, limit, 0)
        masked = (bit >= 0) | (limit < 64)
        bit = gl.load(f.bit + tile.begin + 1)
        dk, dv = _block(
            f, dk, dv, operands(f, kv, g % f.STAGES, 0, 0), g, words, masked, tile.begin, tile,
            True,
        )  # fmt: skip
        g += 1
    for j in range(1, n):
        words = allowed_words(f, bit, limit, 0)
        masked = (bit >= 0) | (limit < 64)
        bit = gl.load(f.bit + tile.begin + j + 1)
        dk, dv = _block(
            f, dk, dv, operands(f, kv, g % f.STAGES, j, 0), g, words, masked, tile.begin + j,
            tile, False,
        )  # fmt: skip
        g += 1
    if n > 0:
        k = bufs.k.index(kv).reshape([64, f.BLOCK_D])
        dq = warpgroup_mma_wait(0, deps=(_start_dq(f, bufs.ds.index(0), k, 1),))
        _add_dq(f, dq, tile.begin + n - 1, tile.row0, f.BLOCK_D // 2)
        barrier()  # all warps have read K and dS
    dk = scaled(dk, gradient_scale(f.scale_log2))
    store_gradients(f, tile, dk, dv, CONSUMER)
    return g


@gluon.jit
def single_consumer(f, CONSUMER: gl.constexpr):
    """Four warps: dK and dV of 64 keys, and what they add to dQ."""
    over_tiles(f, _on_tile, CONSUMER)
