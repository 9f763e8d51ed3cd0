"""Gradients of K and V on Hopper, and of Q if asked: key tiles over the columns of a mask.

docs/internals/kernels.md has the mathematics, docs/internals/hopper.md the pipeline.

All products are those of transposed scores, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T
leave the accumulators as the left operands of dV += P^T dO and dK += dS^T Q. Only dQ = dS K takes
the dS of both consumers, which they exchange through shared memory.

dQ is summed in float32 by vector reductions. Its buffer keeps slabs of 16 queries in the order of
the registers, (slab, D / 8, 32 lanes, 4), so that a warp adds 512 contiguous bytes at a time;
`backward_finish` brings it into order.

The grid is persistent. Warps: two consumer warpgroups of 64 keys each (above head dim 128 those of
`wide.py`, for scattered key blocks of 64 the one of `single.py`), a producer that copies tiles in,
a scheduler that claims work, and a storer that copies dK and dV out of the place of K and V while
the consumers are at the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.common.softmax import gradient_scale, probabilities
from sparseflash.kernels.hopper.backward.common import Inputs, scheduler
from sparseflash.kernels.hopper.backward.dq import add_dq, early_block, start_dq
from sparseflash.kernels.hopper.backward.feed import (
    Barriers,
    Buffers,
    Columns,
    kept_rows,
    operands,
    producer,
    split_index,
    start_with,
    storer,
)  # fmt: skip
from sparseflash.kernels.hopper.backward.single import single_consumer
from sparseflash.kernels.hopper.backward.tile import (
    allowed_words,
    as_rows,
    block_hash,
    over_tiles,
    store_gradients,
)  # fmt: skip
from sparseflash.kernels.hopper.backward.wide import keys, values
from sparseflash.kernels.hopper.columns import (
    no_sums,
    products,
    scaled,
    start_sums,
    wait_sums,
)  # fmt: skip
from sparseflash.kernels.hopper.common import (
    accumulator,
    meet,
    new_barriers,
    shared_layout,
)  # fmt: skip
from sparseflash.kernels.hopper.dropout import dropped_gradient, entry_blocks, kept, signed
from sparseflash.kernels.hopper.gluon import HOISTS
from sparseflash.kernels.hopper.masking import where_allowed, words_layout
from sparseflash.kernels.hopper.score import numbers_of, scored, sloped
from sparseflash.kernels.hopper.softmax import as_tile
from sparseflash.kernels.hopper.work import RECORD


@gluon.jit
def _block(f, dk, dv, sums, kept_k, kept_v, tiles, g, words, masked, entry, tile,
           CONSUMER: gl.constexpr, FIRST: gl.constexpr, MASKS: gl.constexpr):  # fmt: skip
    """Add a block of queries to dK, dV and the sums of a score, and the block before it to dQ,
    unless this is the first.

    The dS of that one has long been exchanged, so the consumers need not be at the same place:
    one has its exponentials while the other has its products.
    """
    bufs, bars = f.bufs, f.bars
    BLOCK_M: gl.constexpr = f.BLOCK_M
    DTYPE: gl.constexpr = tiles.q.dtype
    SCORES: gl.constexpr = accumulator(BLOCK_M)  # layout of S^T, P^T, dP^T and dS^T
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)  # of a number for each query
    s = g % f.STAGES
    phase = (g // f.STAGES) & 1
    before = g - 1
    if f.DROPOUT or f.SCORE is not None:  # long before it is used
        idx = entry_blocks(entry, BLOCK_M, BLOCK_M // f.GATHER)
    if f.SCORE is not None:
        hg, blocks = split_index(f, idx)
        b, h = tile.bh // f.kv_heads, tile.bh % f.kv_heads * f.group
        if f.GROUPED:
            h += hg
            if h.type.is_block():
                h = as_tile(h, BLOCK_M)
        numbers = numbers_of(f, b, h)
    PIPELINED: gl.constexpr = f.WITH_DQ and not FIRST
    WIDEST: gl.constexpr = max(f.COLUMNS, f.COLUMNS_V)
    # the LSE is read while the product runs, at all head dims that have registers for it
    EARLY: gl.constexpr = f.WITH_DQ and WIDEST != 80
    COPY: gl.constexpr = EARLY and WIDEST <= 96  # how dP comes to begin at -delta
    # or else the sums of S begin at it, as to read it behind the product takes longer
    STARTED: gl.constexpr = not EARLY and (f.WITH_DQ or BLOCK_M == 64) and f.SCORE is None
    mbarrier.wait(bars.q_full.index(s), phase)
    if STARTED:
        st = as_rows(bufs.lse_log2.index(s).load(QUERIES) * (-1.0 / f.scale_log2), SCORES, False)
    else:
        st = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
    st = start_with(kept_k, tiles.kw, tiles.q, st, f.COLUMNS, STARTED)
    if EARLY:
        lse_log2 = bufs.lse_log2.index(s).load(QUERIES)
    if PIPELINED:
        block_before = early_block(f, entry - f.GATHER)
        mbarrier.wait(bars.ds_full.index(before & 1), (before >> 1) & 1)
        dq_async = start_dq(bufs.ds.index(before & 1), tiles.k, CONSUMER, f.COLUMNS)
        st = warpgroup_mma_wait(1, deps=(st,))
    elif f.WITH_DQ:
        st = warpgroup_mma_wait(0, deps=(st,))
    else:
        mbarrier.wait(bars.dout_full.index(s), phase)
        dpt = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
        dpt = start_with(kept_v, tiles.vw, tiles.dout, dpt, f.COLUMNS_V, False)
        st = warpgroup_mma_wait(products(f.COLUMNS_V), deps=(st,))
    if STARTED:
        p = probabilities(st, f.scale_log2, 0.0)  # P^T [64, BLOCK_M]
    else:
        if not EARLY:
            lse_log2 = bufs.lse_log2.index(s).load(QUERIES)
        unit = f.scale_log2
        if f.SCORE is not None:
            raw = st
            st, unit, add, kept_values = scored(
                f, st, numbers, b, h, tile.k_start, f.n_k, blocks, f.score_args[-2],
                BLOCK_M // f.GATHER, True,
            )  # fmt: skip
            lse_log2 = lse_log2 - add
        p = probabilities(st, unit, lse_log2[None, :])  # P^T [64, BLOCK_M]
    if MASKS:
        if masked:
            p = where_allowed(p, words, 0.0)
    if not f.DROPOUT:
        pb = gl.convert_layout(p.to(DTYPE), P_OPERAND, assert_trivial=True)
    if f.WITH_DQ:
        # The barrier also bounds a basic block: ptxas hoists the wait for dQ above the exponentials
        # otherwise.
        mbarrier.wait(bars.dout_full.index(s), phase)
        if PIPELINED:
            dq = warpgroup_mma_wait(0, deps=(dq_async,))
            add_dq(f, dq, block_before, tile.row0, CONSUMER)
            if HOISTS and not MASKS and f.BLOCK_D > 64:
                # One more boundary, or ptxas spills, and serialises wgmma.
                mbarrier.wait(bars.dout_full.index(s), phase)
        if f.DROPOUT:
            dpt = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
        else:
            dpt = as_rows(bufs.neg_delta.index(s).load(QUERIES), SCORES, COPY)
        dpt = start_with(kept_v, tiles.vw, tiles.dout, dpt, f.COLUMNS_V, True)
    if f.DROPOUT:  # beside the product that makes dP
        p = signed(p, block_hash(f, idx, tile), f.threshold, True)
        pb = gl.convert_layout(kept(p, DTYPE), P_OPERAND, assert_trivial=True)
    if f.WITH_DQ:
        dv_async = start_sums(pb, tiles.dout, dv)  # [64, COLUMNS_V]
        dpt = warpgroup_mma_wait(products(f.COLUMNS_V), deps=(dpt,))
    else:
        dpt = warpgroup_mma_wait(0, deps=(dpt,))
        dv_async = start_sums(pb, tiles.dout, dv)  # [64, COLUMNS_V]
    if f.DROPOUT:
        neg_delta = bufs.neg_delta.index(s).load(QUERIES)[None, :]
        ds = dropped_gradient(p, dpt, f.keep_scale, neg_delta)
    elif f.WITH_DQ:
        ds = p * dpt
    else:
        ds = p * (dpt + bufs.neg_delta.index(s).load(QUERIES)[None, :])
    if f.SCORE is not None:
        ds, sums = sloped(
            f, raw, ds, kept_values, numbers, sums, b, h, tile.k_start, f.n_k, blocks,
            f.score_args[-2], BLOCK_M // f.GATHER,
        )  # fmt: skip
    ds = ds.to(DTYPE)  # dS^T [64, BLOCK_M]
    if f.WITH_DQ:
        bufs.ds.index(g & 1).slice(CONSUMER * 64, 64, 0).store(ds)
        fence_async_shared()
        mbarrier.arrive(bars.ds_full.index(g & 1), count=1)
    ds = gl.convert_layout(ds, DS_OPERAND, assert_trivial=True)
    dk_async = start_sums(ds, tiles.q, dk)  # [64, COLUMNS]
    dv = wait_sums(dv_async, products(f.COLUMNS))
    mbarrier.arrive(bars.dout_empty.index(s), count=1)
    dk = wait_sums(dk_async, 0)
    mbarrier.arrive(bars.q_empty.index(s), count=1)
    return dk, dv, sums


@gluon.jit
def _store_sums(f, sums, tile):
    """Keep the sums of a tile, or of a part of a split one: [64] of its keys."""
    row = tile.k_start
    if f.SPLIT:
        if tile.part >= 0:
            row = f.n_sums - (f.n_parts - tile.part) * f.BLOCK_N + tile.k_start % f.BLOCK_N
    for i in gl.static_range(len(sums)):
        at = (i * f.n_bh + tile.bh).to(gl.int64) * f.n_sums + row
        total = gl.sum(sums[i], 1)
        gl.store(f.row_sums + at + gl.arange(0, 64, total.type.layout), total)


@gluon.jit
def _on_tile(f, tile, g, CONSUMER: gl.constexpr):
    """Make dK and dV of 64 keys, and what they add to dQ."""
    bufs, bars = f.bufs, f.bars
    FIRST: gl.constexpr = 1 if f.WITH_DQ else 0
    kv, n, n_partial, entry, limit = tile.kv, tile.n, tile.n_partial, tile.entry, tile.limit
    bit = tile.bit
    dk = no_sums(f.COLUMNS)
    dv = no_sums(f.COLUMNS_V)
    sums = ()
    for _ in gl.static_range(f.SUMS):
        zeros = gl.zeros([64, 4], gl.float32, words_layout(f.BLOCK_M))
        sums = sums + (zeros,)  # noqa: RUF005
    kept_k = kept_rows(f, bufs.k.index(kv), f.COLUMNS, CONSUMER)
    kept_v = kept_rows(f, bufs.v.index(kv), f.COLUMNS_V, CONSUMER)
    if f.WITH_DQ:
        if n > 0:
            first_words = allowed_words(f, bit, limit, CONSUMER)
            bit = gl.load(f.bit + tile.begin + 1, mask=n_partial > 1, other=-1)
            dk, dv, sums = _block(
                f, dk, dv, sums, kept_k, kept_v, operands(f, kv, g % f.STAGES, 0, CONSUMER), g,
                first_words, (n_partial > 0) | (limit < 64), entry, tile, CONSUMER, True,
                f.PARTIAL,
            )  # fmt: skip
            g += 1
    # partial blocks come first, in a loop of their own where that was measured to be faster:
    # the loop of full blocks is that of attention without a mask then
    j0 = FIRST
    for loop in gl.static_range(f.LOOPS):
        end = gl.where(limit < 64, n, n_partial) if loop < f.LOOPS - 1 else n
        for j in range(j0, end):
            words = 0
            if f.PARTIAL and loop == 0:
                words = allowed_words(f, bit, limit, CONSUMER)
                bit = gl.load(f.bit + tile.begin + j + 1, mask=j + 1 < n_partial, other=-1)
            dk, dv, sums = _block(
                f, dk, dv, sums, kept_k, kept_v, operands(f, kv, g % f.STAGES, j, CONSUMER), g,
                words, (j < n_partial) | (limit < 64), entry + j * f.GATHER, tile, CONSUMER,
                False, f.PARTIAL and loop == 0,
            )  # fmt: skip
            g += 1
        j0 = gl.maximum(j0, end)
    if f.WITH_DQ:
        if n > 0:
            last = g - 1
            mbarrier.wait(bars.ds_full.index(last & 1), (last >> 1) & 1)
            k = bufs.k.index(kv).reshape([f.BLOCK_N, f.BLOCK_D])
            dq_async = start_dq(bufs.ds.index(last & 1), k, CONSUMER, f.COLUMNS)
            dq = warpgroup_mma_wait(0, deps=(dq_async,))
            block = early_block(f, entry + (n - 1) * f.GATHER)
            add_dq(f, dq, block, tile.row0, CONSUMER)
        if f.CONSUMERS == 2:
            meet(n)  # dQ of either consumer reads all of K
    if f.SUMS > 0:
        _store_sums(f, sums, tile)
    dk = scaled(dk, gradient_scale(f.scale_log2))
    if f.DROPOUT:
        dv = scaled(dv, f.keep_scale)
    store_gradients(f, tile, dk, dv, CONSUMER)
    return g


@gluon.jit
def _consumer(f, CONSUMER: gl.constexpr):
    """Four warps: dK and dV of 64 keys of the tile."""
    over_tiles(f, _on_tile, CONSUMER)


@gluon.jit(do_not_specialize=[
    "n_items", "n_long", "list_batch", "list_heads", "kv_heads", "n_bh", "together", "group",
    "n_pad", "n_blocks", "n_k", "n_parts", "threshold",
])  # fmt: skip
def backward_cols(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, lse_log2_desc, neg_delta_desc,
    lse_log2_ptr, neg_delta_ptr, items_ptr, idx_ptr, bit_ptr, bits_ptr, counters_ptr, dq_ptr,
    parts_ptr, seed_ptr,
    n_items, n_long, list_batch, list_heads, kv_heads, n_bh, together, group, n_pad, n_blocks, n_k,
    n_parts, scale_log2, threshold, keep_scale,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, KV_STAGES: gl.constexpr,
    GROUPED: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, SPLIT: gl.constexpr,
    WITH_DQ: gl.constexpr, COLUMNS: gl.constexpr, COLUMNS_V: gl.constexpr, LATE: gl.constexpr,
    KEEP_KV: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
    score_args=None, row_sums_ptr=None, n_sums=None, SCORE: gl.constexpr = None,
    NUMBERS: gl.constexpr = None, SLOPE: gl.constexpr = None, SUMS: gl.constexpr = 0,
):  # fmt: skip
    """dk (B, H_kv, N_k, D), dv (B, H_kv, N_k, D_v) and, WITH_DQ, what is added to dq. Tiles are
    BLOCK_M queries x 64 * CONSUMERS keys; lse_log2 and neg_delta (B, H_q, n_pad) come from
    `backward_start`. The parts of a split tile go to parts (B * H_kv, n_parts, 64 * CONSUMERS,
    BLOCK_D + BLOCK_DV) in float32, for `backward_merge`.

    BLOCK_D, BLOCK_DV: the padded head dims; COLUMNS, COLUMNS_V: what is multiplied of them. Where
    one is above 128, the consumers are those of `wide.py`, and tiles 64 x 64.

    SCORE gives the logits, of score_args, and SLOPE the gradient of the scaled scores from theirs;
    see `score.by_triton`. The last arguments are N_q and N_k. SLOPE has SUMS of them, which
    go to row_sums (SUMS, B * H, n_sums), by key.
    """
    gl.static_assert(num_warps == 4)
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    GATHER: gl.constexpr = BLOCK_M // q_desc.block_shape[2]
    DTYPE: gl.constexpr = q_desc.dtype
    WIDE: gl.constexpr = max(BLOCK_D, BLOCK_DV) > 128
    gl.static_assert(BLOCK_N == (64 if WIDE else 64 * CONSUMERS))
    VECTOR: gl.constexpr = lse_log2_desc.layout
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    dout_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_DV], dout_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [KV_STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [KV_STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    lse_log2 = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    neg_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], mbarrier.MBarrierLayout())
    kv_full = new_barriers(KV_STAGES)
    kv_empty = new_barriers(KV_STAGES)
    out_full = new_barriers(KV_STAGES)
    q_full = new_barriers(STAGES)
    q_empty = new_barriers(STAGES)
    dout_full = new_barriers(STAGES)
    dout_empty = new_barriers(STAGES)
    record_full = new_barriers(2)
    record_empty = new_barriers(2)
    record_go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_s, ds_full = lse_log2, record_full  # stand-ins
    SINGLE: gl.constexpr = WITH_DQ and CONSUMERS == 1 and max(BLOCK_D, BLOCK_DV) > 64
    if SINGLE:
        gl.static_assert(not DROPOUT)
        ds_s = gl.allocate_shared_memory(DTYPE, [1, 64, 64], shared_layout(64, 64, DTYPE))
    elif WITH_DQ:
        DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], DTYPE)
        ds_s = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, BLOCK_M], DS_LAYOUT)
        ds_full = new_barriers(2)
        for i in gl.static_range(2):
            mbarrier.init(ds_full.index(i), count=1 if WIDE else CONSUMERS)
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
        mbarrier.init(out_full.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
        mbarrier.init(dout_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=CONSUMERS + 2)
    mbarrier.init(record_go, count=1)
    p_s, p_full, p_empty = lse_log2, record_full, record_full  # stand-ins
    if WIDE:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        p_s = gl.allocate_shared_memory(gl.float32, [BLOCK_N * BLOCK_M], FLAT)
        p_full = new_barriers(1)
        p_empty = new_barriers(1)
        mbarrier.init(p_full.index(0), count=1)
        mbarrier.init(p_empty.index(0), count=1)
    fence_async_shared()
    f = Columns(
        descs=Inputs(
            q=q_desc, dout=dout_desc, k=k_desc, v=v_desc, lse_log2=lse_log2_desc,
            neg_delta=neg_delta_desc,
        ),
        bufs=Buffers(
            q=q_s, dout=dout_s, k=k_s, v=v_s, ds=ds_s, p=p_s, lse_log2=lse_log2,
            neg_delta=neg_delta, record=record,
        ),
        bars=Barriers(
            kv_full=kv_full, kv_empty=kv_empty, q_full=q_full, q_empty=q_empty,
            dout_full=dout_full, dout_empty=dout_empty, ds_full=ds_full, p_full=p_full,
            p_empty=p_empty, out_full=out_full, record_full=record_full,
            record_empty=record_empty, record_go=record_go,
        ),
        idx=idx_ptr, bit=bit_ptr, bits=bits_ptr, dq=dq_ptr, parts=parts_ptr, seed=seed_ptr,
        kv_heads=kv_heads, group=group, n_pad=n_pad, n_blocks=n_blocks, n_k=n_k,
        scale_log2=scale_log2, n_parts=n_parts, threshold=threshold, keep_scale=keep_scale,
        lse_log2=lse_log2_ptr, neg_delta=neg_delta_ptr, items=items_ptr,
        counter=counters_ptr, n_items=n_items, n_long=n_long, list_batch=list_batch,
        list_heads=list_heads, n_bh=n_bh, dk_desc=dk_desc, dv_desc=dv_desc,
        CONSUMERS=CONSUMERS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV,
        COLUMNS=COLUMNS, COLUMNS_V=COLUMNS_V, GATHER=GATHER, STAGES=STAGES, KV_STAGES=KV_STAGES,
        GROUPED=GROUPED, PARTIAL=PARTIAL, DROPOUT=DROPOUT, SPLIT=SPLIT, WITH_DQ=WITH_DQ, LATE=LATE,
        KEEP_KV=KEEP_KV, score_args=score_args, row_sums=row_sums_ptr, n_sums=n_sums,
        SCORE=SCORE, NUMBERS=NUMBERS, SLOPE=SLOPE, SUMS=SUMS,
        LOOPS=2 if PARTIAL and WITH_DQ and COLUMNS + COLUMNS_V <= 192 else 1,
    )  # fmt: skip
    if WIDE or CONSUMERS == 2:
        gl.warp_specialize(
            [
                (values if WIDE else _consumer, (f, 0)),
                (keys if WIDE else _consumer, (f, 1)),
                (producer, (f,)),
                (scheduler, (f, kv_heads, together)),
                (storer, (f,)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (single_consumer if SINGLE else _consumer, (f, 0)),
                (producer, (f,)),
                (scheduler, (f, kv_heads, together)),
                (storer, (f,)),
            ],
            [1, 1, 1],
            [24, 24, 24],
        )
