"""The gradients of K and V on Hopper, by key tiles over the columns of a mask, and those of Q with
them or not. See docs/hopper.md.

All products are those of transposed scores, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T
leave the accumulators as the left operands of dV += P^T dO and dK += dS^T Q. Only dQ = dS K takes
the dS of both consumers, which they exchange through shared memory.

dQ is summed in float32 by vector reductions. Its buffer keeps slabs of 16 queries in the order of
the registers, (slab, D / 8, 32 lanes, 4), so that a warp adds 512 contiguous bytes at a time;
`backward_finish` brings it into order.

The grid is persistent. Warps: two consumer warpgroups of 64 keys each, a producer that copies
tiles in, a scheduler that claims work, and a storer that copies dK and dV out of the place of K
and V while the consumers are at the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.hopper.backward_common import scheduler, store_part, words_below
from sparseflash.kernels.hopper.backward_dq import add_dq, start_dq
from sparseflash.kernels.hopper.backward_feed import producer, split_index, storer
from sparseflash.kernels.hopper.common import (
    BEGIN,
    BH,
    FIRST_BIT,
    LN2,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
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
def _meet(token):
    """Both consumers meet at a named barrier."""
    return gl.inline_asm_elementwise(
        "bar.sync 9, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _again(x, j):
    """x, to the compiler another one in every iteration j >= 0 of a loop: the addresses that derive
    from it do not fill registers over the loop.
    """
    return x + gl.inline_asm_elementwise(
        "shr.s32 $0, $1, 31;", "=r,r", [j], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _columns(row_s, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A vector as every row of a tile. By an addition: plain copies make ptxas spill at D = 128."""
    x = row_s.load(gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.full(SHAPE, -0.0, gl.float32, LAYOUT) + x


@gluon.jit
def _tiles(bufs, kv, s, j, W: gl.constexpr):
    """Of this warpgroup and block: q, dO, K, and its rows of K and V."""
    q_s, do_s, k_s, v_s = bufs[0], bufs[1], bufs[2], bufs[3]
    BM: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    D: gl.constexpr = q_s.shape[4]
    DV: gl.constexpr = do_s.shape[4]
    kv = _again(kv, j)
    k = k_s.index(kv).reshape([BN, D])
    v = v_s.index(kv).reshape([BN, DV])
    q = q_s.index(s).reshape([BM, D])
    do = do_s.index(s).reshape([BM, DV])
    return q, do, k, k.slice(W * 64, 64, 0), v.slice(W * 64, 64, 0)


@gluon.jit
def _words(bits_ptr, bit, limit, W: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
           PARTIAL: gl.constexpr):  # fmt: skip
    if PARTIAL:
        return words_below(bits_ptr, bit, limit, W, BN, LAYOUT)
    else:
        return 0


@gluon.jit
def _block(dk, dv, tiles, g, words, masked, entry, origin, bufs, bars, ptrs, shape, scales,
           W: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
           GROUPED: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
           WITH_DQ: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Add a block of queries to dK and dV, and the block before it to dQ, unless this is the first.

    The dS of that one has long been exchanged, so the warpgroups need not be at the same place:
    one has its exponentials while the other has its products.
    """
    ds_s, lse_s, delta_s = bufs[4], bufs[5], bufs[6]
    q_full, q_empty, do_full, do_empty, ds_full = bars[2], bars[3], bars[4], bars[5], bars[6]
    q, do, k, kw, vw = tiles
    row0 = origin[2]
    _, group, n_pad, n_blocks, _ = shape
    scale, _, threshold, keep_scale = scales
    BM: gl.constexpr = q.shape[0]
    DT: gl.constexpr = q.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    K_A: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    V_A: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    s = g % STAGES
    phase = (g // STAGES) & 1
    before = g - 1
    PIPELINED: gl.constexpr = WITH_DQ and not FIRST
    # -LSE / scale and -delta are where the sums of S and dP begin: so they take no registers
    mbarrier.wait(q_full.index(s), phase)
    if WITH_DQ or BM == 64:
        st = _columns(lse_s.index(s), [64, BM], S_L)
        st = warpgroup_mma(kw, q.permute((1, 0)), st, is_async=True)
    else:
        st = gl.zeros([64, BM], gl.float32, S_L)
        st = warpgroup_mma(kw, q.permute((1, 0)), st, use_acc=False, is_async=True)
    if PIPELINED:
        mbarrier.wait(ds_full.index(before & 1), (before >> 1) & 1)
        dqt = start_dq(ds_s.index(before & 1), k, W)
        st = warpgroup_mma_wait(1, deps=(st,))
    elif WITH_DQ:
        st = warpgroup_mma_wait(0, deps=(st,))
    else:
        mbarrier.wait(do_full.index(s), phase)
        dpt = gl.zeros([64, BM], gl.float32, S_L)
        dpt = warpgroup_mma(vw, do.permute((1, 0)), dpt, use_acc=False, is_async=True)
        st = warpgroup_mma_wait(1, deps=(st,))
    if WITH_DQ or BM == 64:
        p = gl.exp2(st * scale)
    else:
        start = lse_s.index(s).load(gl.SliceLayout(0, S_L)) * scale
        p = gl.exp2(st * scale + start[None, :])
    if PARTIAL:
        if masked:
            p = where_allowed(p, words, 0.0, bit_layout(BM))
    kept = p
    if DROPOUT:
        keep = _keep(ptrs, entry, origin, group, n_blocks, threshold, S_L, BM, GATHER, GROUPED)
        kept = gl.where(keep, p, 0.0)
    pb = gl.convert_layout(kept.to(DT), V_A, assert_trivial=True)
    if WITH_DQ:
        # The barrier also bounds a basic block: ptxas hoists the wait for dQ above the exponentials
        # otherwise.
        mbarrier.wait(do_full.index(s), phase)
        if PIPELINED:
            dq = warpgroup_mma_wait(0, deps=(dqt,))
            add_dq(dq, ptrs[3], entry - GATHER, row0, n_pad, n_blocks, q.shape[1], W, CONSUMERS,
                    GATHER, GROUPED, BM // GATHER)  # fmt: skip
        if DROPOUT:
            dpt = gl.zeros([64, BM], gl.float32, S_L)
        else:
            dpt = _columns(delta_s.index(s), [64, BM], S_L)
        dpt = warpgroup_mma(vw, do.permute((1, 0)), dpt, is_async=True)
        dvt = warpgroup_mma(pb, do, dv, is_async=True)
        dpt = warpgroup_mma_wait(1, deps=(dpt,))
    else:
        dpt = warpgroup_mma_wait(0, deps=(dpt,))
        dvt = warpgroup_mma(pb, do, dv, is_async=True)
    if DROPOUT:
        dpt = gl.where(keep, dpt * keep_scale, 0.0)
    if DROPOUT or not WITH_DQ:
        dpt += delta_s.index(s).load(gl.SliceLayout(0, S_L))[None, :]  # minus what is called so
    ds = (p * dpt).to(DT)
    if WITH_DQ:
        ds_s.index(g & 1).slice(W * 64, 64, 0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(g & 1), count=1)
    ds = gl.convert_layout(ds, K_A, assert_trivial=True)
    dkt = warpgroup_mma(ds, q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dvt,))
    mbarrier.arrive(do_empty.index(s), count=1)
    dk = warpgroup_mma_wait(0, deps=(dkt,))
    mbarrier.arrive(q_empty.index(s), count=1)
    return dk, dv


@gluon.jit
def _consumer(bufs, bars, ptrs, shape, scales, W: gl.constexpr, CONSUMERS: gl.constexpr,
              STAGES: gl.constexpr, KV: gl.constexpr, GATHER: gl.constexpr, GROUPED: gl.constexpr,
              PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, SPLIT: gl.constexpr,
              WITH_DQ: gl.constexpr):  # fmt: skip
    k_s, v_s, ds_s, record = bufs[2], bufs[3], bufs[4], bufs[7]
    kv_full, ds_full, out_full = bars[0], bars[6], bars[7]
    record_full, record_empty = bars[8], bars[9]
    idx_ptr, bit_ptr, bits_ptr, dq_ptr, parts_ptr, _ = ptrs
    kv_heads, group, n_pad, n_blocks, n_k = shape
    scale, n_parts, _, keep_scale = scales
    BM: gl.constexpr = bufs[5].shape[1]
    BN: gl.constexpr = 64 * CONSUMERS
    D: gl.constexpr = k_s.shape[4]
    DV: gl.constexpr = v_s.shape[4]
    DT: gl.constexpr = k_s.dtype
    K_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    V_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    B_L: gl.constexpr = bit_layout(BM)
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
        kv = t % KV
        k_start = tile * BN + W * 64
        limit = n_k - k_start  # keys of this warpgroup that exist
        # first row of (b, first head of the group) in dQ
        row0 = (bh // kv_heads * kv_heads + bh % kv_heads) * group * n_pad
        row_head = 0
        column_head = 0
        if DROPOUT and not GROUPED:
            row_head, column_head = head_keys(ptrs[5], bh)
        origin = (bh, k_start, row0, row_head, column_head)
        entry = idx_ptr + begin.to(gl.int64) * GATHER
        dk = gl.zeros([64, D], gl.float32, K_L)
        dv = gl.zeros([64, DV], gl.float32, V_L)
        mbarrier.wait(kv_full.index(kv), (t // KV) & 1)
        FIRST: gl.constexpr = 1 if WITH_DQ else 0
        if WITH_DQ:
            if n > 0:
                first_words = _words(bits_ptr, bit, limit, W, BN, B_L, PARTIAL)
                bit = gl.load(bit_ptr + begin + 1, mask=n_partial > 1, other=-1)
                dk, dv = _block(
                    dk, dv, _tiles(bufs, kv, g % STAGES, 0, W), g, first_words,
                    (n_partial > 0) | (limit < 64), entry, origin, bufs, bars, ptrs, shape, scales,
                    W, CONSUMERS, STAGES, GATHER, GROUPED, PARTIAL, DROPOUT, True, True,
                )  # fmt: skip
                g += 1
        for j in range(FIRST, n):
            words = _words(bits_ptr, bit, limit, W, BN, B_L, PARTIAL)
            bit = gl.load(bit_ptr + begin + j + 1, mask=j + 1 < n_partial, other=-1)
            dk, dv = _block(
                dk, dv, _tiles(bufs, kv, g % STAGES, j, W), g, words,
                (j < n_partial) | (limit < 64), entry + j * GATHER, origin, bufs, bars, ptrs, shape,
                scales, W, CONSUMERS, STAGES, GATHER, GROUPED, PARTIAL, DROPOUT, WITH_DQ, False,
            )  # fmt: skip
            g += 1
        if WITH_DQ:
            if n > 0:
                last = g - 1
                mbarrier.wait(ds_full.index(last & 1), (last >> 1) & 1)
                dqt = start_dq(ds_s.index(last & 1), k_s.index(kv).reshape([BN, D]), W)
                dq = warpgroup_mma_wait(0, deps=(dqt,))
                add_dq(dq, dq_ptr, entry + (n - 1) * GATHER, row0, n_pad, n_blocks, D, W,
                        CONSUMERS, GATHER, GROUPED, BM // GATHER)  # fmt: skip
            if CONSUMERS == 2:
                _meet(n)  # dQ reads all of K
        dk *= scale * LN2
        if DROPOUT:
            dv *= keep_scale
        if SPLIT:
            if part >= 0:
                at = parts_ptr + ((bh.to(gl.int64) * n_parts + part) * BN + W * 64) * (D + DV)
                store_part(at, dk, D + DV)
                store_part(at + D, dv, D + DV)
        v_s.index(kv).reshape([BN, DV]).slice(W * 64, 64, 0).store(dv.to(DT))
        k_s.index(kv).reshape([BN, D]).slice(W * 64, 64, 0).store(dk.to(DT))
        fence_async_shared()
        mbarrier.arrive(out_full.index(kv), count=1)
        t += 1
        mbarrier.wait(record_full.index(t & 1), (t >> 1) & 1)
        tile = read(record, t & 1, TILE, WARPGROUP)


@gluon.jit
def _keep(ptrs, entry, origin, group, n_blocks, threshold, S_L: gl.constexpr, BM: gl.constexpr,
          GATHER: gl.constexpr, GROUPED: gl.constexpr):  # fmt: skip
    """What dropout keeps of (64 keys, BM queries)."""
    PIECE: gl.constexpr = BM // GATHER
    bh, k_start, _, row_head, column_head = origin
    idx, token = piece_tokens(entry, BM, PIECE, gl.SliceLayout(0, S_L))
    hg, block = split_index(idx, n_blocks, GROUPED)
    if GROUPED:
        row_head, column_head = head_keys(ptrs[5], bh * group + hg)
    q_token = block * PIECE + token
    k_token = k_start + gl.arange(0, 64, gl.SliceLayout(1, S_L))
    if GROUPED and GATHER > 1:  # a head for every column
        column_keys = column_key(k_token[:, None], column_head[None, :])
    else:
        column_keys = column_key(k_token, column_head)[:, None]
    return keeps(row_key(q_token, row_head)[None, :], column_keys, threshold)


@gluon.jit(do_not_specialize=[
    "n_items", "n_long", "list_batch", "list_heads", "kv_heads", "n_bh", "group", "n_pad",
    "n_blocks", "n_k", "n_parts", "threshold",
])  # fmt: skip
def backward_cols(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc,
    start_ptr, delta_ptr, items_ptr, idx_ptr, bit_ptr, bits_ptr, counter_ptr, dq_ptr, parts_ptr,
    seed_ptr,
    n_items, n_long, list_batch, list_heads, kv_heads, n_bh, group, n_pad, n_blocks, n_k, n_parts,
    scale, threshold, keep_scale,
    BM: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, KV: gl.constexpr,
    GROUPED: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, SPLIT: gl.constexpr,
    WITH_DQ: gl.constexpr, LATE: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(num_warps == 4)
    D: gl.constexpr = q_desc.block_shape[3]
    DV: gl.constexpr = do_desc.block_shape[3]
    BN: gl.constexpr = k_desc.block_shape[2]
    GATHER: gl.constexpr = BM // q_desc.block_shape[2]
    DT: gl.constexpr = q_desc.dtype
    gl.static_assert(BN == 64 * CONSUMERS)
    q_s = gl.allocate_shared_memory(DT, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(DT, [STAGES, 1, 1, BM, DV], do_desc.layout)
    k_s = gl.allocate_shared_memory(DT, [KV, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DT, [KV, 1, 1, BN, DV], v_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], ML)
    kv_full = gl.allocate_shared_memory(gl.int64, [KV, 1], ML)
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV, 1], ML)
    out_full = gl.allocate_shared_memory(gl.int64, [KV, 1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    record_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    record_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    record_go = gl.allocate_shared_memory(gl.int64, [1], ML)
    ds_s, ds_full = lse_s, record_full  # stand-ins
    if WITH_DQ:
        DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], DT)
        ds_s = gl.allocate_shared_memory(DT, [2, BN, BM], DS_L)
        ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
        for i in gl.static_range(2):
            mbarrier.init(ds_full.index(i), count=CONSUMERS)
    for i in gl.static_range(KV):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
        mbarrier.init(out_full.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
        mbarrier.init(do_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=CONSUMERS + 2)
    mbarrier.init(record_go, count=1)
    fence_async_shared()
    bufs = (q_s, do_s, k_s, v_s, ds_s, lse_s, delta_s, record)
    bars = (kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, out_full,
            record_full, record_empty, record_go)  # fmt: skip
    shape = (kv_heads, group, n_pad, n_blocks, n_k)
    work = (
        n_items,
        n_long,
        list_batch,
        list_heads,
        kv_heads,
        1,
        n_bh,
    )  # a list has all heads of a group
    ptrs = (idx_ptr, bit_ptr, bits_ptr, dq_ptr, parts_ptr, seed_ptr)
    scales = (scale, n_parts, threshold, keep_scale)
    in_ptrs = (idx_ptr, start_ptr, delta_ptr)
    in_descs = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    claims = (record, record_full, record_empty, record_go, items_ptr, bit_ptr, counter_ptr, work)
    out_descs = (dk_desc, dv_desc)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (bufs, bars, ptrs, shape, scales, 0, CONSUMERS, STAGES, KV, GATHER, GROUPED,
                         PARTIAL, DROPOUT, SPLIT, WITH_DQ)),
            (_consumer, (bufs, bars, ptrs, shape, scales, 1, CONSUMERS, STAGES, KV, GATHER, GROUPED,
                         PARTIAL, DROPOUT, SPLIT, WITH_DQ)),
            (producer, (in_descs, bufs, bars, in_ptrs, shape, n_bh, STAGES, KV, GATHER, GROUPED,
                        LATE)),
            (scheduler, claims),
            (storer, (out_descs, bufs, bars, shape, KV, SPLIT)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (bufs, bars, ptrs, shape, scales, 0, CONSUMERS, STAGES, KV, GATHER, GROUPED,
                         PARTIAL, DROPOUT, SPLIT, WITH_DQ)),
            (producer, (in_descs, bufs, bars, in_ptrs, shape, n_bh, STAGES, KV, GATHER, GROUPED,
                        LATE)),
            (scheduler, claims),
            (storer, (out_descs, bufs, bars, shape, KV, SPLIT)),
        ], [1, 1, 1], [24, 24, 24])  # fmt: skip
