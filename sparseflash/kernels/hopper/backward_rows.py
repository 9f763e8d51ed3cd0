"""The gradient of Q on Hopper by query tiles over the rows of a mask: no atomics. See
docs/hopper.md.

The grid is persistent. Warps: two consumer warpgroups of 64 queries each (or one), a producer that
copies tiles in, and a scheduler that claims work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.hopper.backward_common import scheduler, store_part, words_below
from sparseflash.kernels.hopper.common import (
    BEGIN,
    BH,
    FIRST_BIT,
    LN2,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
    WARP,
    WARPGROUP,
    N,
    bit_layout,
    column_key,
    head_keys,
    keeps,
    piece_tokens,
    read,
    row_key,
    where_allowed,
)  # fmt: skip


@gluon.jit
def _producer(descs, bufs, bars, idx_ptr, shape, STAGES: gl.constexpr, RING: gl.constexpr,
              GATHER: gl.constexpr, LATE: gl.constexpr):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    q_s, do_s, k_s, v_s, _, lse_s, delta_s, record = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, record_full, record_empty, record_go = bars
    heads, group, n_pad = shape
    BM: gl.constexpr = q_desc.block_shape[2]
    PIECE: gl.constexpr = k_desc.block_shape[2]
    Q_BYTES: gl.constexpr = (
        q_desc.block_type.nbytes + do_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes
    )
    t = 0
    g = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        begin = read(record, t & 1, BEGIN, WARP)
        n = read(record, t & 1, N, WARP)
        bh = read(record, t & 1, BH, WARP)
        mbarrier.arrive(record_empty.index(t & 1), count=1)
        b = bh // heads
        h = bh % heads
        entry = idx_ptr + begin.to(gl.int64) * GATHER
        idx = gl.load(entry)
        r = t % RING
        full = q_full.index(r)
        mbarrier.wait(q_empty.index(r), ((t // RING) & 1) ^ 1)
        mbarrier.expect(full, Q_BYTES)
        tma.async_copy_global_to_shared(q_desc, [b, h, tile * BM, 0], full, q_s.index(r))
        tma.async_copy_global_to_shared(do_desc, [b, h, tile * BM, 0], full, do_s.index(r))
        row = bh * n_pad + tile * BM
        tma.async_copy_global_to_shared(lse_desc, [row], full, lse_s.index(r))
        tma.async_copy_global_to_shared(delta_desc, [row], full, delta_s.index(r))
        h = h // group
        # the next tile is claimed late, so that a long one holds no other back
        mbarrier.arrive(record_go, count=1, pred=n == 0)
        late = gl.maximum(n - LATE, 0)
        for j in range(n):
            nxt = gl.load(entry + (j + 1) * GATHER)
            mbarrier.arrive(record_go, count=1, pred=j == late)
            s = g % STAGES
            phase = ((g // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(s), phase)
            mbarrier.expect(k_full.index(s), GATHER * k_desc.block_type.nbytes)
            for i in gl.static_range(GATHER):
                if i > 0:
                    idx = gl.load(entry + j * GATHER + i)
                tma.async_copy_global_to_shared(
                    k_desc, [b, h, idx * PIECE, 0], k_full.index(s),
                    k_s.index(s).slice(i * PIECE, PIECE, 2),
                )  # fmt: skip
            if GATHER > 1:
                idx = gl.load(entry + j * GATHER)
            mbarrier.wait(v_empty.index(s), phase)
            mbarrier.expect(v_full.index(s), GATHER * v_desc.block_type.nbytes)
            for i in gl.static_range(GATHER):
                if i > 0:
                    idx = gl.load(entry + j * GATHER + i)
                tma.async_copy_global_to_shared(
                    v_desc, [b, h, idx * PIECE, 0], v_full.index(s),
                    v_s.index(s).slice(i * PIECE, PIECE, 2),
                )  # fmt: skip
            idx = nxt
            g += 1
        t += 1
        mbarrier.wait(record_full.index(t & 1), (t >> 1) & 1)
        tile = read(record, t & 1, TILE, WARP)


@gluon.jit
def _consumer(dq_desc, bufs, bars, ptrs, shape, scales, W: gl.constexpr, CONSUMERS: gl.constexpr,
              STAGES: gl.constexpr, RING: gl.constexpr, GATHER: gl.constexpr,
              PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    q_s, do_s, k_s, v_s, dq_s, lse_s, delta_s, record = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, record_full, record_empty = bars[:8]
    idx_ptr, bit_ptr, bits_ptr, parts_ptr, seed_ptr = ptrs
    heads = shape[0]
    scale, n_parts, threshold, keep_scale = scales
    BM: gl.constexpr = 64 * CONSUMERS
    BN: gl.constexpr = k_s.shape[3]
    D: gl.constexpr = q_s.shape[4]
    DV: gl.constexpr = do_s.shape[4]
    PIECE: gl.constexpr = BN // GATHER
    DT: gl.constexpr = dq_desc.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, Q_L, 2)
    R_L: gl.constexpr = gl.SliceLayout(1, S_L)
    B_L: gl.constexpr = bit_layout(BN)
    t = 0
    g = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARPGROUP)
    while tile >= 0:
        begin = read(record, t & 1, BEGIN, WARPGROUP)
        n = read(record, t & 1, N, WARPGROUP)
        bh = read(record, t & 1, BH, WARPGROUP)
        part = read(record, t & 1, PART, WARPGROUP)
        n_partial = read(record, t & 1, N_PARTIAL, WARPGROUP)
        bit = read(record, t & 1, FIRST_BIT, WARPGROUP)
        mbarrier.arrive(record_empty.index(t & 1), count=1)
        r = t % RING
        dq = gl.zeros([64, D], gl.float32, Q_L)
        mbarrier.wait(q_full.index(r), (t // RING) & 1)
        q = q_s.index(r).reshape([BM, D]).slice(W * 64, 64, 0)
        do = do_s.index(r).reshape([BM, DV]).slice(W * 64, 64, 0)
        lse = lse_s.index(r).slice(W * 64, 64, 0).load(R_L) * scale  # all are minus
        delta = delta_s.index(r).slice(W * 64, 64, 0).load(R_L)
        if DROPOUT:
            row_head, column_head = head_keys(seed_ptr, bh)
            row_keys = row_key(tile * BM + W * 64 + gl.arange(0, 64, R_L), row_head)
        mbarrier.wait(k_full.index(g % STAGES), (g // STAGES) & 1, pred=n > 0)
        for j in range(n):
            s = g % STAGES
            if PARTIAL:
                words = words_below(bits_ptr, bit, 64, W, BM, B_L)
                bit = gl.load(bit_ptr + begin + j + 1, mask=j + 1 < n_partial, other=-1)
            k = k_s.index(s).reshape([BN, D])
            v = v_s.index(s).reshape([BN, DV])
            st = gl.zeros([64, BN], gl.float32, S_L)
            st = warpgroup_mma(q, k.permute((1, 0)), st, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(s), (g // STAGES) & 1)
            dpt = gl.full([64, BN], -0.0, gl.float32, S_L)
            if not DROPOUT:
                dpt += delta[:, None]  # where its sums begin
            dpt = warpgroup_mma(do, v.permute((1, 0)), dpt, is_async=True)
            st = warpgroup_mma_wait(1, deps=(st,))
            p = gl.exp2(st * scale + lse[:, None])
            if PARTIAL:
                if j < n_partial:
                    p = where_allowed(p, words, 0.0, B_L)
            g += 1
            # a basic-block boundary before the wait for dP, which ptxas hoists above the
            # exponentials otherwise
            mbarrier.wait(k_full.index(g % STAGES), (g // STAGES) & 1, pred=j + 1 < n)
            dpt = warpgroup_mma_wait(0, deps=(dpt,))
            mbarrier.arrive(v_empty.index(s), count=1)
            if DROPOUT:
                keep = _keep(
                    row_keys, column_head, idx_ptr + (begin + j).to(gl.int64) * GATHER,
                    threshold, BN, PIECE, gl.SliceLayout(0, S_L),
                )  # fmt: skip
                dpt = gl.where(keep, dpt * keep_scale, 0.0) + delta[:, None]
            ds = gl.convert_layout((p * dpt).to(DT), A_L, assert_trivial=True)
            dqt = warpgroup_mma(ds, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dqt,))
            mbarrier.arrive(k_empty.index(s), count=1)
        mbarrier.arrive(q_empty.index(r), count=1)
        dq *= scale * LN2
        stored = True
        if SPLIT:
            stored = part < 0
            if part >= 0:
                at = parts_ptr + ((bh.to(gl.int64) * n_parts + part) * BM + W * 64) * D
                store_part(at, dq, D)
        if stored:
            tma.store_wait(0)  # the last tile has long been read out of its buffer
            dq_s.index(W).reshape([64, D]).store(dq.to(DT))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                dq_desc, [bh // heads, bh % heads, tile * BM + W * 64, 0], dq_s.index(W)
            )
        t += 1
        mbarrier.wait(record_full.index(t & 1), (t >> 1) & 1)
        tile = read(record, t & 1, TILE, WARPGROUP)
    tma.store_wait(0)


@gluon.jit
def _keep(row_keys, column_head, entry, threshold, BN: gl.constexpr, PIECE: gl.constexpr,
          LAYOUT: gl.constexpr):  # fmt: skip
    """What dropout keeps of (64 queries, BN keys)."""
    block, token = piece_tokens(entry, BN, PIECE, LAYOUT)
    column_keys = column_key(block * PIECE + token, column_head)
    return keeps(row_keys[:, None], column_keys[None, :], threshold)


@gluon.jit(do_not_specialize=[
    "n_items", "n_long", "list_batch", "list_heads", "heads", "n_bh", "group", "n_pad",
    "n_parts", "threshold",
])  # fmt: skip
def backward_rows(
    q_desc, do_desc, k_desc, v_desc, dq_desc, lse_desc, delta_desc,
    items_ptr, idx_ptr, bit_ptr, bits_ptr, counter_ptr, parts_ptr, seed_ptr,
    n_items, n_long, list_batch, list_heads, heads, n_bh, group, n_pad, n_parts,
    scale, threshold, keep_scale,
    BN: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
    PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, SPLIT: gl.constexpr,
    LATE: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(num_warps == 4)
    D: gl.constexpr = q_desc.block_shape[3]
    DV: gl.constexpr = do_desc.block_shape[3]
    BM: gl.constexpr = q_desc.block_shape[2]
    GATHER: gl.constexpr = BN // k_desc.block_shape[2]
    DT: gl.constexpr = q_desc.dtype
    gl.static_assert(BM == 64 * CONSUMERS)
    q_s = gl.allocate_shared_memory(DT, [RING, 1, 1, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(DT, [RING, 1, 1, BM, DV], do_desc.layout)
    k_s = gl.allocate_shared_memory(DT, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DT, [STAGES, 1, 1, BN, DV], v_desc.layout)
    dq_s = gl.allocate_shared_memory(DT, [CONSUMERS, 1, 1, 64, D], dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [RING, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [RING, BM], lse_desc.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [RING, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], ML)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    record_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    record_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    record_go = gl.allocate_shared_memory(gl.int64, [1], ML)
    for i in gl.static_range(RING):
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
    bufs = (q_s, do_s, k_s, v_s, dq_s, lse_s, delta_s, record)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty,
            record_full, record_empty, record_go)  # fmt: skip
    shape = (heads, group, n_pad)
    work = (n_items, n_long, list_batch, list_heads, heads, group, n_bh)
    ptrs = (idx_ptr, bit_ptr, bits_ptr, parts_ptr, seed_ptr)
    scales = (scale, n_parts, threshold, keep_scale)
    in_descs = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    claims = (record, record_full, record_empty, record_go, items_ptr, bit_ptr, counter_ptr, work)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (dq_desc, bufs, bars, ptrs, shape, scales, 0, CONSUMERS, STAGES, RING,
                         GATHER, PARTIAL, DROPOUT, SPLIT)),
            (_consumer, (dq_desc, bufs, bars, ptrs, shape, scales, 1, CONSUMERS, STAGES, RING,
                         GATHER, PARTIAL, DROPOUT, SPLIT)),
            (_producer, (in_descs, bufs, bars, idx_ptr, shape, STAGES, RING, GATHER, LATE)),
            (scheduler, claims),
        ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (dq_desc, bufs, bars, ptrs, shape, scales, 0, CONSUMERS, STAGES, RING,
                         GATHER, PARTIAL, DROPOUT, SPLIT)),
            (_producer, (in_descs, bufs, bars, idx_ptr, shape, STAGES, RING, GATHER, LATE)),
            (scheduler, claims),
        ], [1, 1], [24, 24])  # fmt: skip
