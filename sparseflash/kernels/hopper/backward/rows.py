"""The gradient of Q on Hopper by query tiles over the rows of a mask: no atomics.

docs/internals/kernels.md has the mathematics, docs/internals/hopper.md the pipeline.

The grid is persistent. Warps: two consumer warpgroups of 64 queries each (or one), a producer that
copies tiles in, and a scheduler that claims work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)  # fmt: skip
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from sparseflash.kernels.common.dropout import head_keys
from sparseflash.kernels.common.softmax import gradient_scale, probabilities
from sparseflash.kernels.hopper.backward.common import Inputs, scheduler
from sparseflash.kernels.hopper.columns import (
    first_columns,
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
    WARP,
    WARPGROUP,
    accumulator,
    fields,
    new_barriers,
    wait_full,
)  # fmt: skip
from sparseflash.kernels.hopper.dropout import (
    dropped_gradient,
    entry_blocks,
    signed,
    tile_hash,
)  # fmt: skip
from sparseflash.kernels.hopper.gluon import async_load, async_store
from sparseflash.kernels.hopper.masking import where_allowed, words_below
from sparseflash.kernels.hopper.work import (
    BATCH_HEAD,
    BEGIN,
    FIRST_BIT,
    N_ENTRIES,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
    read,
    wait_record,
)  # fmt: skip


@fields
class Buffers:
    """Shared memory. A ring has its places along the first axis."""

    q: gl.shared_memory_descriptor  # [Q_STAGES, 1, 1, BLOCK_M, BLOCK_D]
    dout: gl.shared_memory_descriptor  # [Q_STAGES, 1, 1, BLOCK_M, BLOCK_DV]
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, BLOCK_D]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, BLOCK_DV]
    dq: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, 64, BLOCK_D]
    lse_log2: gl.shared_memory_descriptor  # float32 [Q_STAGES, BLOCK_M]
    neg_delta: gl.shared_memory_descriptor  # float32 [Q_STAGES, BLOCK_M]
    record: gl.shared_memory_descriptor  # [2 * RECORD, 1]: the work to do


@fields
class Barriers:
    """A place is full once its copy has arrived, and empty once it has been read."""

    q_full: gl.shared_memory_descriptor  # of Q, dO and the two vectors
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    record_full: gl.shared_memory_descriptor
    record_empty: gl.shared_memory_descriptor
    record_go: gl.shared_memory_descriptor  # the next tile may be claimed


@fields
class Rows:
    dq_desc: tensor_descriptor
    descs: Inputs
    bufs: Buffers
    bars: Barriers
    # tensors, lists (see sparseflash/schedule), and what describes them
    idx: gl.tensor  # int32: the mask blocks of an entry
    bit: gl.tensor  # int32: the bit tile of an entry
    bits: gl.tensor  # int32: bit tiles
    parts: gl.tensor  # float32 (B * H, n_parts, BLOCK_M, BLOCK_D)
    seed: gl.tensor  # of dropout
    heads: gl.tensor
    group: gl.tensor  # query heads to a key head
    n_pad: gl.tensor  # queries of a head, with those that only the vectors have
    scale_log2: gl.tensor
    n_parts: gl.tensor
    threshold: gl.tensor
    keep_scale: gl.tensor  # 1 / (1 - p)
    items: gl.tensor  # int32 (list_batch * list_heads * n_items, 8): TILE to PART of a tile
    counter: gl.tensor  # int32: tiles claimed
    n_items: gl.tensor  # of a batch x head
    n_long: gl.tensor  # of these, the ones that run before all others
    list_batch: gl.tensor  # 1: all batch entries have the same lists
    list_heads: gl.tensor  # likewise
    n_bh: gl.tensor
    # what the kernel is compiled for
    CONSUMERS: gl.constexpr
    BLOCK_M: gl.constexpr  # queries of a tile: 64 for each consumer
    BLOCK_N: gl.constexpr  # keys of a tile
    BLOCK_D: gl.constexpr  # head dims, padded
    BLOCK_DV: gl.constexpr
    COLUMNS: gl.constexpr  # what is multiplied of them
    COLUMNS_V: gl.constexpr
    GATHER: gl.constexpr  # mask blocks to an entry
    STAGES: gl.constexpr
    Q_STAGES: gl.constexpr
    PARTIAL: gl.constexpr  # there are partial blocks
    DROPOUT: gl.constexpr
    SPLIT: gl.constexpr  # some tiles are split along the keys
    LATE: gl.constexpr  # blocks before its end at which a tile lets the next one be claimed


@gluon.jit
def _producer(f):
    """Copy Q, dO and the vectors of a tile, and K and V of its entries."""
    descs, bufs, bars, record = f.descs, f.bufs, f.bars, f.bufs.record
    BLOCK_M: gl.constexpr = f.BLOCK_M
    Q_BYTES: gl.constexpr = (
        descs.q.block_type.nbytes + descs.dout.block_type.nbytes
        + 2 * descs.lse_log2.block_type.nbytes
    )  # fmt: skip
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        begin = read(record, t & 1, BEGIN, WARP)
        n = read(record, t & 1, N_ENTRIES, WARP)
        bh = read(record, t & 1, BATCH_HEAD, WARP)
        mbarrier.arrive(bars.record_empty.index(t & 1), count=1)
        b = bh // f.heads
        h = bh % f.heads
        entry = f.idx + begin.to(gl.int64) * f.GATHER
        idx = gl.load(entry)
        r = t % f.Q_STAGES
        full = bars.q_full.index(r)
        mbarrier.wait(bars.q_empty.index(r), ((t // f.Q_STAGES) & 1) ^ 1)
        mbarrier.expect(full, Q_BYTES)
        at = [b, h, tile * BLOCK_M, 0]
        async_load(descs.q, at, full, bufs.q.index(r))
        async_load(descs.dout, at, full, bufs.dout.index(r))
        row = bh * f.n_pad + tile * BLOCK_M
        async_load(descs.lse_log2, [row], full, bufs.lse_log2.index(r))
        async_load(descs.neg_delta, [row], full, bufs.neg_delta.index(r))
        h = h // f.group
        # the next tile is claimed late, so that a long one holds no other back
        mbarrier.arrive(bars.record_go, count=1, pred=n == 0)
        late = gl.maximum(n - f.LATE, 0)
        for j in range(n):
            following = gl.load(entry + (j + 1) * f.GATHER)
            mbarrier.arrive(bars.record_go, count=1, pred=j == late)
            s = g % f.STAGES
            phase = ((g // f.STAGES) & 1) ^ 1
            mbarrier.wait(bars.k_empty.index(s), phase)
            _copy_entry(
                f, descs.k, bufs.k.index(s), bars.k_full.index(s), entry + j * f.GATHER, idx, b, h
            )
            if f.GATHER > 1:
                idx = gl.load(entry + j * f.GATHER)
            mbarrier.wait(bars.v_empty.index(s), phase)
            _copy_entry(
                f, descs.v, bufs.v.index(s), bars.v_full.index(s), entry + j * f.GATHER, idx, b, h
            )
            idx = following
            g += 1
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 1, TILE, WARP)


@gluon.jit
def _copy_entry(f, desc, place, full, entry, idx, b, h):
    """K or V of the mask blocks of an entry, the first of which is idx."""
    BLOCK_K: gl.constexpr = desc.block_shape[2]  # keys of a mask block
    mbarrier.expect(full, f.GATHER * desc.block_type.nbytes)
    for i in gl.static_range(f.GATHER):
        if i > 0:
            idx = gl.load(entry + i)
        at = [b, h, idx * BLOCK_K, 0]
        async_load(desc, at, full, place.slice(i * BLOCK_K, BLOCK_K, 2))


@gluon.jit
def _consumer(f, CONSUMER: gl.constexpr):
    """Four warps: dQ of 64 rows of the tile."""
    bufs, bars, record = f.bufs, f.bars, f.bufs.record
    BLOCK_M: gl.constexpr = f.BLOCK_M
    BLOCK_N: gl.constexpr = f.BLOCK_N
    BLOCK_D: gl.constexpr = f.BLOCK_D
    DTYPE: gl.constexpr = f.dq_desc.dtype
    BLOCK_K: gl.constexpr = BLOCK_N // f.GATHER  # keys of a mask block
    SCORES: gl.constexpr = accumulator(BLOCK_N)  # layouts: of S, P, dP and dS
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(first_columns(f.COLUMNS)), 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)  # of a number for each row
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARPGROUP)
    while tile >= 0:
        begin = read(record, t & 1, BEGIN, WARPGROUP)
        n = read(record, t & 1, N_ENTRIES, WARPGROUP)
        bh = read(record, t & 1, BATCH_HEAD, WARPGROUP)
        part = read(record, t & 1, PART, WARPGROUP)
        n_partial = read(record, t & 1, N_PARTIAL, WARPGROUP)
        bit = read(record, t & 1, FIRST_BIT, WARPGROUP)
        mbarrier.arrive(bars.record_empty.index(t & 1), count=1)
        r = t % f.Q_STAGES
        dq = no_sums(f.COLUMNS)
        mbarrier.wait(bars.q_full.index(r), (t // f.Q_STAGES) & 1)
        q = bufs.q.index(r).reshape([BLOCK_M, BLOCK_D]).slice(CONSUMER * 64, 64, 0)
        dout = bufs.dout.index(r).reshape([BLOCK_M, f.BLOCK_DV]).slice(CONSUMER * 64, 64, 0)
        lse_log2 = bufs.lse_log2.index(r).slice(CONSUMER * 64, 64, 0).load(ROWS)  # [64]
        neg_delta = bufs.neg_delta.index(r).slice(CONSUMER * 64, 64, 0).load(ROWS)  # [64]
        if f.DROPOUT:
            row_head, column_head = head_keys(f.seed, bh)
            row = tile * BLOCK_M + CONSUMER * 64
        wait_full(bars.k_full, g, n > 0)
        for j in range(n):
            s = g % f.STAGES
            if f.PARTIAL:
                words = words_below(f.bits, bit, 64, CONSUMER, BLOCK_M, BLOCK_N)
                bit = gl.load(f.bit + begin + j + 1, mask=j + 1 < n_partial, other=-1)
            if f.DROPOUT:  # long before it is used
                entry = f.idx + (begin + j).to(gl.int64) * f.GATHER
                block = entry_blocks(entry, BLOCK_N, BLOCK_K)
            k = bufs.k.index(s).reshape([BLOCK_N, BLOCK_D])
            v = bufs.v.index(s).reshape([BLOCK_N, f.BLOCK_DV])
            scores = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
            scores = start_scores(q, k, scores, f.COLUMNS, False)
            mbarrier.wait(bars.v_full.index(s), (g // f.STAGES) & 1)
            dp = gl.full([64, BLOCK_N], -0.0, gl.float32, SCORES)
            if not f.DROPOUT:
                dp += neg_delta[:, None]  # where its sums begin
            dp = start_scores(dout, v, dp, f.COLUMNS_V, True)
            scores = warpgroup_mma_wait(products(f.COLUMNS_V), deps=(scores,))
            p = probabilities(scores, f.scale_log2, lse_log2[:, None])  # [64, BLOCK_N]
            if f.PARTIAL:
                if j < n_partial:
                    p = where_allowed(p, words, 0.0)
            if f.DROPOUT:
                group = tile_hash(row, row_head, block, column_head, BLOCK_N, BLOCK_K, False)
                p = signed(p, group, f.threshold, False)
            g += 1
            # a basic-block boundary before the wait for dP, which ptxas hoists above the
            # exponentials otherwise
            wait_full(bars.k_full, g, j + 1 < n)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            mbarrier.arrive(bars.v_empty.index(s), count=1)
            if f.DROPOUT:
                ds = dropped_gradient(p, dp, f.keep_scale, neg_delta[:, None])
            else:
                ds = p * dp
            ds = gl.convert_layout(ds.to(DTYPE), DS_OPERAND, assert_trivial=True)
            dq = wait_sums(start_sums(ds, k, dq), 0)  # [64, COLUMNS]
            mbarrier.arrive(bars.k_empty.index(s), count=1)
        mbarrier.arrive(bars.q_empty.index(r), count=1)
        dq = scaled(dq, gradient_scale(f.scale_log2))
        stored = True
        if f.SPLIT:
            stored = part < 0
            if part >= 0:
                part_row = (bh.to(gl.int64) * f.n_parts + part) * BLOCK_M + CONSUMER * 64
                store_part(f.parts, part_row * BLOCK_D, dq, BLOCK_D)
        if stored:
            tma.store_wait(0)  # the last tile has long been read out of its buffer
            store_shared(bufs.dq.index(CONSUMER).reshape([64, BLOCK_D]), dq)
            fence_async_shared()
            at = [bh // f.heads, bh % f.heads, tile * BLOCK_M + CONSUMER * 64, 0]
            async_store(f.dq_desc, at, bufs.dq.index(CONSUMER))
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 1, TILE, WARPGROUP)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "n_items", "n_long", "list_batch", "list_heads", "heads", "n_bh", "group", "n_pad",
    "n_parts", "threshold",
])  # fmt: skip
def backward_rows(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, lse_log2_desc, neg_delta_desc,
    items_ptr, idx_ptr, bit_ptr, bits_ptr, counters_ptr, parts_ptr, seed_ptr,
    n_items, n_long, list_batch, list_heads, heads, n_bh, group, n_pad, n_parts,
    scale_log2, threshold, keep_scale,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr, COLUMNS_V: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
    SPLIT: gl.constexpr, LATE: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dq (B, H_q, N_q, D). Tiles are 64 * CONSUMERS queries x BLOCK_N keys; lse_log2 and
    neg_delta (B, H_q, n_pad) come from `backward_start`. The parts of a split tile go to parts
    (B * H_q, n_parts, 64 * CONSUMERS, BLOCK_D) in float32, for `backward_merge`.

    COLUMNS, COLUMNS_V: what is multiplied of the padded head dims.
    """
    gl.static_assert(num_warps == 4)
    BLOCK_D: gl.constexpr = q_desc.block_shape[3]
    BLOCK_DV: gl.constexpr = dout_desc.block_shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    GATHER: gl.constexpr = BLOCK_N // k_desc.block_shape[2]
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BLOCK_M == 64 * CONSUMERS)
    VECTOR: gl.constexpr = lse_log2_desc.layout
    q_s = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    dout_s = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, BLOCK_M, BLOCK_DV], dout_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    dq_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, 64, BLOCK_D], dq_desc.layout)
    lse_log2 = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], VECTOR)
    neg_delta = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], VECTOR)
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], mbarrier.MBarrierLayout())
    q_full = new_barriers(Q_STAGES)
    q_empty = new_barriers(Q_STAGES)
    k_full = new_barriers(STAGES)
    k_empty = new_barriers(STAGES)
    v_full = new_barriers(STAGES)
    v_empty = new_barriers(STAGES)
    record_full = new_barriers(2)
    record_empty = new_barriers(2)
    record_go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=CONSUMERS + 1)
    mbarrier.init(record_go, count=1)
    fence_async_shared()
    f = Rows(
        dq_desc=dq_desc,
        descs=Inputs(
            q=q_desc, dout=dout_desc, k=k_desc, v=v_desc, lse_log2=lse_log2_desc,
            neg_delta=neg_delta_desc,
        ),
        bufs=Buffers(
            q=q_s, dout=dout_s, k=k_s, v=v_s, dq=dq_s, lse_log2=lse_log2,
            neg_delta=neg_delta, record=record,
        ),
        bars=Barriers(
            q_full=q_full, q_empty=q_empty, k_full=k_full, k_empty=k_empty, v_full=v_full,
            v_empty=v_empty, record_full=record_full, record_empty=record_empty,
            record_go=record_go,
        ),
        idx=idx_ptr, bit=bit_ptr, bits=bits_ptr, parts=parts_ptr, seed=seed_ptr, heads=heads,
        group=group, n_pad=n_pad, scale_log2=scale_log2, n_parts=n_parts, threshold=threshold,
        keep_scale=keep_scale, items=items_ptr, counter=counters_ptr + 1, n_items=n_items,
        n_long=n_long, list_batch=list_batch, list_heads=list_heads, n_bh=n_bh,
        CONSUMERS=CONSUMERS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV,
        COLUMNS=COLUMNS, COLUMNS_V=COLUMNS_V, GATHER=GATHER, STAGES=STAGES, Q_STAGES=Q_STAGES,
        PARTIAL=PARTIAL, DROPOUT=DROPOUT, SPLIT=SPLIT, LATE=LATE,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (f, 0)),
                (_consumer, (f, 1)),
                (_producer, (f,)),
                (scheduler, (f, heads, group)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(_consumer, (f, 0)), (_producer, (f,)), (scheduler, (f, heads, group))],
            [1, 1],
            [24, 24],
        )
