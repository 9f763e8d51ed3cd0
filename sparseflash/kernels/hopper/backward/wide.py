"""The consumers of `cols.py` for head dims above 128.

The sums of dK and dV for 64 keys fill the registers of two warpgroups, so these share the products
instead of the keys. One has S^T = K Q^T, P^T and dV += P^T dO, the other dP^T = V dO^T, dS^T and
dK += dS^T Q. P^T goes from the first to the second through shared memory, in float32, and dS^T
back for dQ = dS K, of which each takes columns of its own.

Of padded head dims, columns that are not in use are not multiplied: see `columns.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.common.softmax import gradient_scale, probabilities
from sparseflash.kernels.hopper.backward.dq import add_part, early_block
from sparseflash.kernels.hopper.backward.tile import allowed_words, block_hash, over_tiles
from sparseflash.kernels.hopper.columns import (
    no_sums,
    products,
    scaled,
    start_scores,
    start_sums,
    store_part,
    store_shared,
    wait_sums,
)  # fmt: skip
from sparseflash.kernels.hopper.common import (
    accumulator,
    arrive,
    meet,
    wait_empty,
    wait_full,
)  # fmt: skip
from sparseflash.kernels.hopper.dropout import dropped_gradient, entry_blocks, kept, signed
from sparseflash.kernels.hopper.masking import where_allowed

# columns of dQ that one consumer has; the other has those in use beyond
FIRST_DQ = gl.constexpr(128)


# ------------------------------------------------------------------ products
@gluon.jit
def _matrix(ring, i):
    """Place i of a ring as [64, columns]. Its addresses are computed here: compilers would do so
    long before, and run out of registers.
    """
    i = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], gl.int32, is_pure=False, pack=1)
    return ring.index(i).reshape([64, ring.shape[4]])


@gluon.jit
def _start_dq(f, g, kv, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """dQ [64, WIDTH] of a block, columns FIRST and following, once its dS is there."""
    mbarrier.wait(f.bars.ds_full.index(g & 1), (g >> 1) & 1)
    zero = gl.zeros([64, WIDTH], gl.float32, accumulator(WIDTH))
    ds, k = f.bufs.ds.index(g & 1).permute((1, 0)), _matrix(f.bufs.k, kv)
    return warpgroup_mma(ds, k.slice(FIRST, WIDTH, 1), zero, use_acc=False, is_async=True)


# ------------------------------------------------------------------ P^T between the consumers
@gluon.constexpr_function
def _exchange_layout():
    """Four numbers of a thread beside each other, those of a warp's next thread behind them."""
    return gl.DistributedLinearLayout(
        [[1], [2], [128], [256], [512]],
        [[4], [8], [16], [32], [64]],
        [[1024], [2048]], [], [4096],
    )  # fmt: skip


@gluon.jit
def _give(place, p):
    """Store an accumulator [64, 64], 16 bytes of a thread at a time."""
    # warp, half, row, 8 columns, pair of them, one of the pair
    p = p.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([4096])
    place.store(gl.convert_layout(p, _exchange_layout(), assert_trivial=True))


@gluon.jit
def _take(place, LAYOUT: gl.constexpr):
    """Load what `_give` stored."""
    p = place.load(_exchange_layout()).reshape([4, 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return gl.convert_layout(p.reshape([64, 64]), LAYOUT, assert_trivial=True)


# ------------------------------------------------------------------ consumers
@gluon.jit
def _value_block(f, dv, tile, g, entry, words, masked, FIRST: gl.constexpr):
    """P^T of a block, for the other consumer too, and dV; the last columns of dQ of the block
    before, unless this is the first. No product is in flight when it returns.
    """
    bufs, bars = f.bufs, f.bars
    SCORES: gl.constexpr = accumulator(f.BLOCK_M)  # layout of S^T and P^T
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)  # of a number for each query
    s = g % f.STAGES
    phase = (g // f.STAGES) & 1
    mbarrier.wait(bars.q_full.index(s), phase)
    st = gl.zeros([64, f.BLOCK_M], gl.float32, SCORES)
    st = start_scores(_matrix(bufs.k, tile.kv), _matrix(bufs.q, s), st, f.COLUMNS, False)
    lse_log2 = bufs.lse_log2.index(s).load(QUERIES)
    st = warpgroup_mma_wait(0, deps=(st,))
    mbarrier.arrive(bars.q_empty.index(s), count=1)
    p = probabilities(st, f.scale_log2, lse_log2[None, :])  # P^T [64, BLOCK_M]
    if f.PARTIAL:
        if masked:
            p = where_allowed(p, words, 0.0)
    if f.DROPOUT:
        idx = entry_blocks(entry, f.BLOCK_M, f.BLOCK_M // f.GATHER)
        p = signed(p, block_hash(f, idx, tile), f.threshold, True)
    wait_empty(bars.p_empty, g)
    _give(bufs.p, p)
    arrive(bars.p_full, g)
    p = kept(p, bufs.q.dtype) if f.DROPOUT else p.to(bufs.q.dtype)
    if f.COLUMNS > FIRST_DQ and not FIRST:
        dq_async = _start_dq(f, g - 1, tile.kv, FIRST_DQ, f.COLUMNS - FIRST_DQ)
    mbarrier.wait(bars.dout_full.index(s), phase)
    dv = start_sums(p, _matrix(bufs.dout, s), dv)  # [64, COLUMNS_V]
    if f.COLUMNS > FIRST_DQ and not FIRST:
        dq = warpgroup_mma_wait(products(f.COLUMNS_V), deps=(dq_async,))
        add_part(f, dq, early_block(f, entry - f.GATHER), tile.row0, 0, FIRST_DQ)
        # The boundary of a basic block: ptxas hoists the wait for dV above the additions otherwise.
        mbarrier.wait(bars.dout_full.index(s), phase)
    dv = wait_sums(dv, 0)
    mbarrier.arrive(bars.dout_empty.index(s), count=1)
    return dv


@gluon.jit
def _value_tile(f, tile, g, CONSUMER: gl.constexpr):
    """Make P^T and dV of 64 keys, and the last columns of dQ."""
    n, n_partial, entry, limit = tile.n, tile.n_partial, tile.entry, tile.limit
    dv = no_sums(f.COLUMNS_V)
    if n > 0:
        words = allowed_words(f, tile.bit, limit, 0)
        bit = gl.load(f.bit + tile.begin + 1, mask=n_partial > 1, other=-1)
        dv = _value_block(
            f, dv, tile, g, entry, words,
            (n_partial > 0) | (limit < 64), True,
        )  # fmt: skip
        g += 1
        for j in range(1, n):
            words = allowed_words(f, bit, limit, 0)
            bit = gl.load(f.bit + tile.begin + j + 1, mask=j + 1 < n_partial, other=-1)
            dv = _value_block(
                f, dv, tile, g,
                entry + j * f.GATHER, words, (j < n_partial) | (limit < 64), False,
            )  # fmt: skip
            g += 1
        if f.COLUMNS > FIRST_DQ:
            dq_async = _start_dq(f, g - 1, tile.kv, FIRST_DQ, f.COLUMNS - FIRST_DQ)
            dq = warpgroup_mma_wait(0, deps=(dq_async,))
            add_part(f, dq, early_block(f, entry + (n - 1) * f.GATHER), tile.row0, 0, FIRST_DQ)
    meet(n)  # all of K has been read
    if f.DROPOUT:
        dv = scaled(dv, f.keep_scale)
    _store(f, tile, _matrix(f.bufs.v, tile.kv), dv, f.BLOCK_D)
    return g


@gluon.jit
def _key_block(f, dk, tile, g, entry):
    """dS^T, dK and the first columns of dQ of a block. No product is in flight when it returns."""
    bufs, bars = f.bufs, f.bars
    DTYPE: gl.constexpr = bufs.q.dtype
    SCORES: gl.constexpr = accumulator(f.BLOCK_M)  # layout of dP^T and dS^T
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    s = g % f.STAGES
    phase = (g // f.STAGES) & 1
    mbarrier.wait(bars.dout_full.index(s), phase)
    dpt = gl.zeros([64, f.BLOCK_M], gl.float32, SCORES)
    dpt = start_scores(_matrix(bufs.v, tile.kv), _matrix(bufs.dout, s), dpt, f.COLUMNS_V, False)
    wait_full(bars.p_full, g)
    p = _take(bufs.p, SCORES)
    arrive(bars.p_empty, g)
    dpt = warpgroup_mma_wait(0, deps=(dpt,))
    neg_delta = bufs.neg_delta.index(s).load(QUERIES)[None, :]
    if f.DROPOUT:
        ds = dropped_gradient(p, dpt, f.keep_scale, neg_delta)
    else:
        ds = p * (dpt + neg_delta)
    mbarrier.arrive(bars.dout_empty.index(s), count=1)
    ds = ds.to(DTYPE)  # dS^T [64, BLOCK_M]
    bufs.ds.index(g & 1).store(ds)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(g & 1), count=1)
    dq = _start_dq(f, g, tile.kv, 0, FIRST_DQ)
    mbarrier.wait(bars.q_full.index(s), phase)
    dk = start_sums(ds, _matrix(bufs.q, s), dk)  # [64, COLUMNS]
    dq = warpgroup_mma_wait(products(f.COLUMNS), deps=(dq,))
    add_part(f, dq, early_block(f, entry), tile.row0, 0, 0)
    mbarrier.wait(bars.q_full.index(s), phase)  # the boundary of a block, as above
    dk = wait_sums(dk, 0)
    mbarrier.arrive(bars.q_empty.index(s), count=1)
    return dk


@gluon.jit
def _key_tile(f, tile, g, CONSUMER: gl.constexpr):
    """Make dS^T and dK of 64 keys, and the first columns of dQ."""
    n, entry = tile.n, tile.entry
    dk = no_sums(f.COLUMNS)
    for j in range(n):
        dk = _key_block(
            f, dk, tile, g,
            entry + j * f.GATHER,
        )  # fmt: skip
        g += 1
    meet(n)  # all of K has been read
    dk = scaled(dk, gradient_scale(f.scale_log2))
    _store(f, tile, _matrix(f.bufs.k, tile.kv), dk, 0)
    return g


@gluon.jit
def _store(f, tile, place, sums, FIRST: gl.constexpr):
    """Store a gradient of 64 keys: where K or V was, or as a part of a split tile from FIRST on."""
    WIDTH: gl.constexpr = f.BLOCK_D + f.BLOCK_DV
    if f.SPLIT:
        if tile.part >= 0:
            row = (tile.bh.to(gl.int64) * f.n_parts + tile.part) * f.BLOCK_N
            store_part(f.parts + row * WIDTH, FIRST, sums, WIDTH)
    store_shared(place, sums)


@gluon.jit
def values(f, CONSUMER: gl.constexpr):
    """Four warps: P^T and dV of 64 keys, and the last columns of dQ."""
    over_tiles(f, _value_tile, CONSUMER)


@gluon.jit
def keys(f, CONSUMER: gl.constexpr):
    """Four warps: dS^T and dK of 64 keys, and the first columns of dQ."""
    over_tiles(f, _key_tile, CONSUMER)
