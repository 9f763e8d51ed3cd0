"""Block-sparse attention forward for Hopper. See docs/hopper.md.

Persistent: as many programs as run at a time. Warps: one or two consumer warpgroups of 64 query
rows each, a producer that copies tiles in, a scheduler that claims work from a counter, and a
storer that copies O out of the place of Q. The pipeline of blocks runs through the boundaries of
tiles: the first product of a tile is in flight together with the last one of the tile before. Where
that needs more shared memory than there is (DRAIN), it ends with every tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.hopper.common import (
    BATCH,
    BEGIN,
    FIRST_BIT,
    HEAD,
    LN2,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
    WARPGROUP,
    N,
    bit_layout,
    bit_words,
    head_keys,
    named_arrive,
    named_sync,
    read,
    row_key,
    tree_layout,
    where_allowed,
)  # fmt: skip
from sparseflash.kernels.hopper.forward_feed import (
    producer,
    scheduler,
    shared_layout,
    shared_rows,
    storer,
)  # fmt: skip
from sparseflash.kernels.hopper.forward_softmax import dropped, row_sums, softmax


@gluon.jit
def _take_turn(token, CID: gl.constexpr, CONSUMERS: gl.constexpr):
    """The consumers start their products in turns, so that one's softmax runs under the other's
    products.
    """
    if CONSUMERS == 2:
        return named_sync(9 + CID, 256, token)
    else:
        return token


@gluon.jit
def _pass_turn(token, CID: gl.constexpr, CONSUMERS: gl.constexpr):
    if CONSUMERS == 2:
        return named_arrive(10 - CID, 256, token)
    else:
        return token


@gluon.jit
def _start_qk(q, k_s, g, S_L: gl.constexpr):
    """S = Q K^T of block g, asynchronous."""
    STAGES: gl.constexpr = k_s.shape[0]
    MINOR: gl.constexpr = k_s.shape[1]
    zeros = gl.zeros([64, MINOR], gl.float32, S_L)
    k = k_s.index(g % STAGES).permute((1, 0))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_pv(p, v_s, v_full, acc, add, g, pred, PAIRS: gl.constexpr):
    """acc += P V of block g, asynchronous."""
    STAGES: gl.constexpr = v_s.shape[0]
    if PAIRS:
        i = (g + 1) % STAGES  # beside K of the next block, which is there
    else:
        i = g % STAGES
        mbarrier.wait(v_full.index(i), (g // STAGES) & 1, pred=pred)
    return warpgroup_mma(p, v_s.index(i), acc, use_acc=add, is_async=True)


@gluon.jit
def _store(
    acc, m, sums, q_s, o_full, i, tensors, shape, bh, row, part,
    DTYPE: gl.constexpr, MAJOR: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Hands O to the storer, in the place of Q, or keeps that of a part."""
    lse_ptr, inv_keep, n_q = tensors[1], tensors[5], shape[0]
    DV: gl.constexpr = acc.shape[1]
    R_S: gl.constexpr = m.type.layout
    O_L: gl.constexpr = acc.type.layout
    l = gl.convert_layout(gl.sum(sums, 1), R_S, assert_trivial=True)
    some = m > float("-inf")
    l = gl.where(some, l, 1.0)
    factor = gl.where(some, inv_keep / l, 0.0)
    o = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_L))[:, None]
    lse = gl.where(some, (m + gl.log2(l)) * LN2, float("-inf"))
    whole = part < 2**30
    if SPLIT:
        whole = part < 0
        if part >= 0:
            part_out_ptr, part_lse_ptr, n_parts = tensors[9], tensors[10], tensors[11]
            first = (bh.to(gl.int64) * n_parts + part) * MAJOR + row % MAJOR
            r = gl.arange(0, 64, gl.SliceLayout(1, O_L))[:, None]
            d = gl.arange(0, DV, gl.SliceLayout(0, O_L))[None, :]
            gl.store(part_out_ptr + first * DV + r * DV + d, o)
            gl.store(part_lse_ptr + first + gl.arange(0, 64, R_S), lse)
    if whole:
        shared_rows(q_s, i, DV).store(o.to(DTYPE))
        fence_async_shared()
        r = row + gl.arange(0, 64, R_S)
        gl.store(lse_ptr + bh.to(gl.int64) * n_q + r, lse, mask=r < n_q)
    mbarrier.arrive(o_full.index(i), count=1)


@gluon.jit
def _consumer(
    descs, bufs, bars, lists, tensors, shape,
    CID: gl.constexpr, CONSUMERS: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
    SPLIT: gl.constexpr, DRAIN: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of the tile."""
    q_desc, k_desc = descs[0], descs[1]
    q_s, k_s, v_s, record = bufs
    q_full, _, k_full, k_empty, v_full, v_empty, o_full, record_full, _ = bars
    idx_ptr, bit_ptr, bits_ptr, n_items = lists[1], lists[2], lists[3], lists[4]
    seed_ptr, threshold = tensors[3], tensors[4]
    scale = tensors[12]
    heads = shape[2]
    KS: gl.constexpr = k_s.shape[0]
    VS: gl.constexpr = v_s.shape[0]
    MINOR: gl.constexpr = k_s.shape[1]
    DV: gl.constexpr = v_s.shape[2]
    D: gl.constexpr = k_s.shape[2]
    DTYPE: gl.constexpr = q_desc.dtype
    PIECE: gl.constexpr = k_desc.block_shape[2]
    MAJOR: gl.constexpr = 64 * CONSUMERS
    RING: gl.constexpr = 1 if DRAIN else 2
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MINOR, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    R_S: gl.constexpr = gl.SliceLayout(1, S_L)
    R_O: gl.constexpr = gl.SliceLayout(1, O_L)
    W_L: gl.constexpr = bit_layout(MINOR)
    T_L: gl.constexpr = tree_layout(MINOR)
    token = n_items
    if CID == 1:
        token = _pass_turn(token, CID, CONSUMERS)  # consumer 0 may start
    t = 0
    g = 0
    acc = gl.zeros([64, DV], gl.float32, O_L)
    m = gl.full([64], float("-inf"), gl.float32, R_S)
    l = gl.zeros([64, 4], gl.float32, gl.SliceLayout(1, gl.SliceLayout(3, W_L)))
    p = gl.zeros([64, MINOR], DTYPE, P_L)
    row_keys = gl.zeros([64], gl.uint32, R_S)
    column_head = threshold.to(gl.uint32)
    add = g > 0  # whether the tile has begun its sum
    last_bh = 0
    last_part = -1
    last_row = -1  # of the tile whose last P V is still to come
    running = 1
    while running > 0:
        slot = t & 3
        mbarrier.wait(record_full.index(slot), (t >> 2) & 1)
        tile = read(record, slot, TILE, WARPGROUP)
        begin = read(record, slot, BEGIN, WARPGROUP)
        n_partial = read(record, slot, N_PARTIAL, WARPGROUP)
        n = read(record, slot, N, WARPGROUP)
        bh = read(record, slot, BATCH, WARPGROUP) * heads + read(record, slot, HEAD, WARPGROUP)
        part = read(record, slot, PART, WARPGROUP)
        bit = read(record, slot, FIRST_BIT, WARPGROUP)
        if tile >= 0:
            # ---- first block: its QK with the last PV of the tile before
            row = tile * MAJOR + CID * 64
            words = gl.zeros([64, 4], gl.int32, gl.SliceLayout(1, gl.SliceLayout(3, W_L)))
            if PARTIAL:
                words = bit_words(bits_ptr, bit, n_partial > 0, CID, MAJOR, W_L)
            if DROPOUT:
                row_head, column_head = head_keys(seed_ptr, bh)
                row_keys = row_key(row + gl.arange(0, 64, R_S), row_head)
            i = (t % RING) * CONSUMERS + CID
            q = shared_rows(q_s, i, D)
            mbarrier.wait(q_full.index(i), (t // RING) & 1)
            mbarrier.wait(k_full.index(g % KS), (g // KS) & 1)
            token = _take_turn(token, CID, CONSUMERS)
            s_async = _start_qk(q, k_s, g, S_L)
            if DRAIN:
                token = _pass_turn(token, CID, CONSUMERS)
                s = warpgroup_mma_wait(0, deps=(s_async,))
            else:
                # before the very first block there is no V; what this gives then is not used
                last = gl.maximum(g - 1, 0)
                acc_async = _start_pv(p, v_s, v_full, acc, add, last, g > 0, PAIRS)
                token = _pass_turn(token, CID, CONSUMERS)
                s = warpgroup_mma_wait(1, deps=(s_async,))
            if not PAIRS:
                mbarrier.arrive(k_empty.index(g % KS), count=1)
            if PARTIAL:
                s = where_allowed(s, words, float("-inf"), W_L)
            nothing = gl.full([64], float("-inf"), gl.float32, R_S)
            p32, m_new, _unused = softmax(s, nothing, scale, PARTIAL, T_L)
            l_new = row_sums(p32, W_L)
            if DROPOUT:
                p32 = dropped(p32, idx_ptr, begin, row_keys, column_head, threshold, PIECE)
            p = gl.convert_layout(p32.to(DTYPE), P_L, assert_trivial=True)
            g += 1
            mbarrier.wait(k_full.index(g % KS), (g // KS) & 1, pred=n > 1)
            if not DRAIN:
                acc = warpgroup_mma_wait(0, deps=(acc_async,))
                if PAIRS:
                    mbarrier.arrive(k_empty.index((g - 1) % KS), count=1)
                if last_row >= 0:
                    if not PAIRS:
                        mbarrier.arrive(v_empty.index((g - 2) % VS), count=1)
                    last_i = ((t - 1) % RING) * CONSUMERS + CID
                    _store(
                        acc, m, l, q_s, o_full, last_i, tensors, shape,
                        last_bh, last_row, last_part, DTYPE, MAJOR, SPLIT,
                    )  # fmt: skip
            m = m_new
            l = l_new
            add = n < 0
            # ---- the other blocks, partial ones first: one loop, since two of them spill
            if PARTIAL:
                bit = gl.load(bit_ptr + begin + 1)
            for j in range(1, n):
                if PARTIAL:
                    words = bit_words(bits_ptr, bit, j < n_partial, CID, MAJOR, W_L)
                    bit = gl.load(bit_ptr + begin + j + 1)
                token = _take_turn(token, CID, CONSUMERS)
                s_async = _start_qk(q, k_s, g, S_L)
                acc_async = _start_pv(p, v_s, v_full, acc, add, g - 1, True, PAIRS)
                token = _pass_turn(token, CID, CONSUMERS)
                s = warpgroup_mma_wait(1, deps=(s_async,))
                if not PAIRS:
                    mbarrier.arrive(k_empty.index(g % KS), count=1)
                if PARTIAL:
                    if j < n_partial:
                        s = where_allowed(s, words, float("-inf"), W_L)
                p32, m, alpha = softmax(s, m, scale, PARTIAL, T_L)
                alpha_l = gl.convert_layout(
                    alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True
                )
                l = l * alpha_l[:, None] + row_sums(p32, W_L)
                if DROPOUT:
                    p32 = dropped(p32, idx_ptr, begin + j, row_keys, column_head, threshold, PIECE)
                p = gl.convert_layout(p32.to(DTYPE), P_L, assert_trivial=True)
                # a basic-block boundary: without it ptxas hoists the wait for PV above the exp2s
                mbarrier.wait(k_full.index((g + 1) % KS), ((g + 1) // KS) & 1, pred=j + 1 < n)
                acc = warpgroup_mma_wait(0, deps=(acc_async,))
                if PAIRS:
                    mbarrier.arrive(k_empty.index(g % KS), count=1)
                else:
                    mbarrier.arrive(v_empty.index((g - 1) % VS), count=1)
                acc = acc * gl.convert_layout(alpha, R_O)[:, None]
                add = n > 0
                g += 1
            if DRAIN:
                acc_async = _start_pv(p, v_s, v_full, acc, add, g - 1, True, PAIRS)
                acc = warpgroup_mma_wait(0, deps=(acc_async,))
                mbarrier.arrive(v_empty.index((g - 1) % VS), count=1)
                _store(
                    acc, m, l, q_s, o_full, i, tensors, shape, bh, row, part, DTYPE, MAJOR, SPLIT
                )
            last_bh = bh + 0
            last_part = part + 0
            last_row = row + 0
            t += 1
        else:
            running = 0
    if not DRAIN:
        if last_row >= 0:
            if PAIRS:
                mbarrier.wait(k_full.index(g % KS), (g // KS) & 1)
            acc_async = _start_pv(p, v_s, v_full, acc, add, g - 1, True, PAIRS)
            acc = warpgroup_mma_wait(0, deps=(acc_async,))
            i = ((t - 1) % RING) * CONSUMERS + CID
            _store(
                acc, m, l, q_s, o_full, i, tensors, shape,
                last_bh, last_row, last_part, DTYPE, MAJOR, SPLIT,
            )  # fmt: skip
    if CID == 0:
        token = _take_turn(token, CID, CONSUMERS)  # absorb the last arrival


_UNSPECIALIZED = (
    "n_items", "n_long", "n_parts", "list_batch", "list_heads", "n_q", "dim_v", "heads", "group",
    "n_bh", "stride_b", "stride_h", "stride_n", "threshold",
)  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, counter_ptr, part_out_ptr, part_lse_ptr,
    items_ptr, idx_ptr, bit_ptr, bits_ptr, n_items, n_long, n_parts, list_batch, list_heads,
    n_q, dim_v, heads, group, n_bh, stride_b, stride_h, stride_n,
    scale, seed_ptr, threshold, inv_keep,
    MINOR: gl.constexpr, CONSUMERS: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
    SPLIT: gl.constexpr, DRAIN: gl.constexpr, PAIRS: gl.constexpr, REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q (B, H_q, N_q, D), k (B, H_kv, N_k, D), v (B, H_kv, N_k, D_v) -> out (B, H_q, N_q, D_v) and
    lse (B, H_q, N_q). scale includes log2(e); D and D_v are padded. Tiles are 64 * CONSUMERS
    queries x MINOR keys; K and V have rings of KS and VS of them, with PAIRS one for both. Parts of
    a split tile go to part_out (B * H_q, n_parts, 64 * CONSUMERS, D_v padded) and part_lse, for
    `merge_parts`.
    """
    gl.static_assert(num_warps == 4)
    DTYPE: gl.constexpr = q_desc.dtype
    RING: gl.constexpr = 1 if DRAIN else 2
    W: gl.constexpr = D if D > DV else DV
    q_s = gl.allocate_shared_memory(DTYPE, [RING * CONSUMERS, 64, W], shared_layout(64, W, DTYPE))
    k_s = gl.allocate_shared_memory(DTYPE, [KS, MINOR, D], shared_layout(MINOR, D, DTYPE))
    v_s = gl.allocate_shared_memory(DTYPE, [VS, MINOR, DV], shared_layout(MINOR, DV, DTYPE))
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    record = gl.allocate_shared_memory(gl.int32, [4 * RECORD, 1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [RING * CONSUMERS, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], ML)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], ML)
    k_empty = gl.allocate_shared_memory(gl.int64, [KS, 1], ML)
    o_full = gl.allocate_shared_memory(gl.int64, [RING * CONSUMERS, 1], ML)
    record_full = gl.allocate_shared_memory(gl.int64, [4, 1], ML)
    record_go = gl.allocate_shared_memory(gl.int64, [1], ML)
    for i in gl.static_range(RING * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(o_full.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(record_full.index(i), count=1)
    mbarrier.init(record_go, count=1)
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
    v_full, v_empty = k_full, k_empty  # stand-ins
    if not PAIRS:
        v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], ML)
        v_empty = gl.allocate_shared_memory(gl.int64, [VS, 1], ML)
        for i in gl.static_range(VS):
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, o_desc)
    bufs = (q_s, k_s, v_s, record)
    bars = (
        q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, record_full, record_go,
    )  # fmt: skip
    lists = (items_ptr, idx_ptr, bit_ptr, bits_ptr, n_items, n_long, list_batch, list_heads)
    tensors = (
        out_ptr, lse_ptr, counter_ptr, seed_ptr, threshold, inv_keep,
        stride_b, stride_h, stride_n, part_out_ptr, part_lse_ptr, n_parts, scale,
    )  # fmt: skip
    shape = (n_q, dim_v, heads, group, n_bh)
    MAJOR: gl.constexpr = 64 * CONSUMERS
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (descs, bufs, bars, lists, tensors, shape, 0, 2,
                             PARTIAL, DROPOUT, SPLIT, DRAIN, PAIRS)),
                (_consumer, (descs, bufs, bars, lists, tensors, shape, 1, 2,
                             PARTIAL, DROPOUT, SPLIT, DRAIN, PAIRS)),
                (producer, (descs, bufs, bars, lists, tensors, shape, 2, DRAIN, PAIRS)),
                (scheduler, (descs, bufs, bars, lists, tensors, shape, MAJOR)),
                (storer, (descs, bufs, bars, 2, DRAIN)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, FEED_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (descs, bufs, bars, lists, tensors, shape, 0, 1,
                             PARTIAL, DROPOUT, SPLIT, DRAIN, PAIRS)),
                (producer, (descs, bufs, bars, lists, tensors, shape, 1, DRAIN, PAIRS)),
                (scheduler, (descs, bufs, bars, lists, tensors, shape, MAJOR)),
                (storer, (descs, bufs, bars, 1, DRAIN)),
            ],
            [1, 1, 1],
            [FEED_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
    # fmt: on
