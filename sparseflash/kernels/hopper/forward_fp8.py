"""Block-sparse attention with e4m3 inputs on Hopper, forward only. See docs/hopper.md.

Both products run as fp8 wgmma, whose operands must lie with the reduced dimension contiguous. So V
comes transposed, (B, H_kv, D_v, tokens), and with its tokens in another order inside every group
of 16: token 8 * half + 2 * quad + pair stands at place 4 * quad + 2 * half + pair. With that order
the registers in which wgmma leaves the scores are those in which it takes P: no shuffles.

Every block of 128 tokens has one scale per tensor. Those of Q and K enter the softmax' scale. That
of V, relative to the largest of its head, enters the exponent of P, together with 2 ** 8, which
brings P into the range of e4m3: p = exp2(score - maximum + shift).

fp8 wgmma keeps about 14 bits of its accumulator and cuts off the rest, a bias that grows with the
length of the sum: 1.6 % after 16,384 keys. So every 8 blocks the accumulator is added, in float32,
to one in shared memory and begins anew; in registers a second one would not fit beside S.
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

from sparseflash.kernels.hopper.common import (
    BEGIN,
    BH,
    FIRST_BIT,
    FIRST_IDX,
    LN2,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
    WARPGROUP,
    N,
    bit_layout,
    bit_words,
    named_arrive,
    named_sync,
    read,
    where_allowed,
)  # fmt: skip
from sparseflash.kernels.hopper.fp8_feed import producer, scheduler
from sparseflash.kernels.hopper.fp8_softmax import (
    finite,
    probabilities,
    row_max,
    unpack,
)

FLUSH = gl.constexpr(8)  # blocks that one wgmma accumulator sums


@gluon.jit
def _key_scale(k_scale_ptr, block, kv_row):
    """Of one block of keys: the scale of K, and log2 of what P is multiplied by."""
    p = k_scale_ptr + (kv_row + block) * 2
    return gl.load(p), gl.load(p + 1)


@gluon.jit
def _issue(
    q, k_s, v_s, bars, p, acc, add, g, token, zero,
    CID: gl.constexpr, S_L: gl.constexpr, P_L: gl.constexpr, W4_L: gl.constexpr,
):  # fmt: skip
    """Start QK of block g and P V of block g - 1, in turns with the other consumer."""
    v_full = bars[3]
    STAGES: gl.constexpr = k_s.shape[0]
    i_v = gl.maximum(g - 1, 0) % STAGES
    p = unpack(p, zero, W4_L, P_L)  # not between the two wgmma, or ptxas serialises them
    token = named_sync(9 + CID, 256, token)
    k = k_s.index(g % STAGES).reshape([128, q.shape[1]]).permute((1, 0))
    zeros = gl.zeros([64, 128], gl.float32, S_L)
    s_async = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    # before the first block there is no V: whatever lies there is multiplied and not used
    mbarrier.wait(v_full.index(i_v), ((g - 1) // STAGES) & 1, pred=g > 0)
    v = v_s.index(i_v).reshape([acc.shape[1], 128]).permute((1, 0))
    acc_async = warpgroup_mma(p, v, acc, use_acc=add, is_async=True)
    return s_async, acc_async, named_arrive(10 - CID, 256, token)


@gluon.jit
def _step(
    q, k_s, v_s, bars, p, acc, add, m, l, g, has_next, words, on, c, shift, token, zero,
    CID: gl.constexpr, MASKED: gl.constexpr, W_L: gl.constexpr,
    P_L: gl.constexpr, S_L: gl.constexpr, W4_L: gl.constexpr,
):  # fmt: skip
    """QK of block g and P V of block g - 1 in flight together; the softmax of g meanwhile."""
    k_full, empty = bars[2], bars[4]
    STAGES: gl.constexpr = k_s.shape[0]
    s_async, acc_async, token = _issue(
        q, k_s, v_s, bars, p, acc, add, g, token, zero, CID, S_L, P_L, W4_L
    )
    s = warpgroup_mma_wait(1, deps=(s_async,))
    if MASKED:
        if on:
            s = where_allowed(s, words, float("-inf"), W_L)
    m_new = gl.maximum(m, row_max(s) * c)
    p, total = probabilities(s, c, shift, m_new, W4_L)
    alpha = gl.exp2(m - finite(m_new))
    l = l * alpha + total
    # a basic-block boundary: without it ptxas hoists the wait for P V above the exponentials
    mbarrier.wait(k_full.index((g + 1) % STAGES), ((g + 1) // STAGES) & 1, pred=has_next)
    acc = warpgroup_mma_wait(0, deps=(acc_async,))
    mbarrier.arrive(empty.index(g % STAGES), count=1)  # of K of block g and V of block g - 1
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m_new, l, token


@gluon.jit
def _flushed(acc, sum_s, m, m_sum, first):
    """acc, relative to the maxima m, plus the sum in shared memory, relative to m_sum."""
    factor = gl.convert_layout(gl.exp2(m_sum - finite(m)), gl.SliceLayout(1, acc.type.layout))
    before = sum_s.load(acc.type.layout) * factor[:, None]
    return acc + gl.where(first, 0.0, before)


@gluon.jit
def _store(
    acc, m, l, o_desc, o_s, sum_s, m_sum, n, outs, bh, tile, part, group, n_q,
    CID: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Out and LSE of 64 rows; those of a part of a tile go to its slot, in float32."""
    lse_ptr, out_scale_ptr, part_out_ptr, part_lse_ptr, n_parts = outs
    R_S: gl.constexpr = m.type.layout
    R_O: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    DV: gl.constexpr = acc.shape[1]
    if n > FLUSH:
        acc = _flushed(acc, sum_s, m, m_sum, False)
    some = m > float("-inf")
    l = gl.where(some, l, 1.0)
    factor = gl.load(out_scale_ptr + bh // group) / l
    out = acc * gl.convert_layout(gl.where(some, factor, 0.0), R_O)[:, None]
    lse = gl.where(some, (m + gl.log2(l)) * LN2, float("-inf"))
    whole = part < 0
    if SPLIT:
        if part >= 0:
            slot = (bh.to(gl.int64) * n_parts + part) * 128 + CID * 64
            row = slot + gl.arange(0, 64, R_O)
            dim = gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout))
            gl.store(part_out_ptr + row[:, None] * DV + dim[None, :], out)
            gl.store(part_lse_ptr + slot + gl.arange(0, 64, R_S), lse)
    if whole:
        heads = o_desc.shape[1]
        row = tile * 128 + CID * 64
        tma.store_wait(0)  # the store of the previous tile has read the buffer
        o_s.reshape([64, DV]).store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [bh // heads, bh % heads, row, 0], o_s)
        q = row + gl.arange(0, 64, R_S)
        gl.store(lse_ptr + bh.to(gl.int64) * n_q + q, lse, mask=q < n_q)


@gluon.jit
def _consumer(
    descs, bufs, bars, lists, scales, outs, shape, CID: gl.constexpr,
    PARTIAL: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of the tile. The pipeline of blocks runs through tile boundaries."""
    _, k_desc, v_desc, o_desc = descs
    q_ring, k_s, v_s, o_ring, record, sums = bufs
    q_full, q_empty, k_full, v_full, empty, record_full, record_empty, _ = bars
    idx_ptr, bit_ptr, bits_ptr, n_long = lists[1], lists[2], lists[3], lists[5]
    q_scale_ptr, k_scale_ptr, scale = scales
    n_q, group = shape[0], shape[2]
    STAGES: gl.constexpr = k_s.shape[0]
    D: gl.constexpr = k_desc.block_shape[3]
    DV: gl.constexpr = v_desc.block_shape[2]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    R_S: gl.constexpr = gl.SliceLayout(1, S_L)
    W_L: gl.constexpr = bit_layout(128)
    # P_L as (row, word, byte of the word)
    W4_L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 32, 4],
    )  # fmt: skip
    o_s = o_ring.index(CID)
    sum_s = sums.index(CID)
    n_q_blocks = gl.cdiv(n_q, 128)
    n_k_blocks = gl.cdiv(k_desc.shape[2], 128)
    token = n_q
    zero = n_long >> 31
    if CID == 1:
        token = named_arrive(9, 256, token)  # consumer 0 may start
    t = 0
    g = 0
    acc = gl.zeros([64, DV], gl.float32, O_L)
    m = gl.full([64], float("-inf"), gl.float32, R_S)
    l = gl.zeros([64], gl.float32, R_S)
    m_sum = m
    p = gl.zeros([64, 32], gl.int32, gl.SliceLayout(2, W4_L))
    add = g > 0
    last_bh = 0
    last_n = 0
    last_part = -1
    last_tile = -1  # whose last P V is still to come
    running = 1
    while running > 0:
        slot = t & 1
        mbarrier.wait(record_full.index(slot), (t >> 1) & 1)
        tile = read(record, slot, TILE, WARPGROUP)
        begin = read(record, slot, BEGIN, WARPGROUP)
        n_partial = read(record, slot, N_PARTIAL, WARPGROUP)
        n = read(record, slot, N, WARPGROUP)
        bh = read(record, slot, BH, WARPGROUP)
        part = read(record, slot, PART, WARPGROUP)
        block = read(record, slot, FIRST_IDX, WARPGROUP)
        bit = read(record, slot, FIRST_BIT, WARPGROUP)
        mbarrier.arrive(record_empty.index(slot), count=1)
        if tile >= 0:
            # ---- first block: its QK with the last PV of the tile before
            kv_row = (bh // group).to(gl.int64) * n_k_blocks
            q_scale = gl.load(q_scale_ptr + bh.to(gl.int64) * n_q_blocks + tile) * scale
            c, shift = _key_scale(k_scale_ptr, block, kv_row)
            block = gl.load(idx_ptr + begin + 1)
            words = gl.zeros([64, 4], gl.int32, gl.SliceLayout(1, gl.SliceLayout(3, W_L)))
            if PARTIAL:
                words = bit_words(bits_ptr, bit, n_partial > 0, CID, 128, W_L)
            i = g % STAGES
            q = q_ring.index(slot * 2 + CID).reshape([64, D])
            mbarrier.wait(q_full.index(slot * 2 + CID), (t >> 1) & 1)
            mbarrier.wait(k_full.index(i), (g // STAGES) & 1)
            s_async, acc_async, token = _issue(
                q, k_s, v_s, bars, p, acc, add, g, token, zero, CID, S_L, P_L, W4_L
            )
            s = warpgroup_mma_wait(1, deps=(s_async,))
            if PARTIAL:
                s = where_allowed(s, words, float("-inf"), W_L)
            c = c * q_scale
            m_new = row_max(s) * c
            p, l_new = probabilities(s, c, shift, m_new, W4_L)
            g += 1
            mbarrier.wait(k_full.index(g % STAGES), (g // STAGES) & 1, pred=n > 1)
            acc = warpgroup_mma_wait(0, deps=(acc_async,))
            mbarrier.arrive(empty.index((g - 1) % STAGES), count=1)
            if last_tile >= 0:
                _store(
                    acc, m, l, o_desc, o_s, sum_s, m_sum, last_n, outs, last_bh, last_tile,
                    last_part, group, n_q, CID, SPLIT,
                )  # fmt: skip
            m = m_new
            l = l_new
            add = g < 0
            # ---- blocks 1..n-1, partial ones first: one loop, since two spill
            c, shift = _key_scale(k_scale_ptr, block, kv_row)
            if PARTIAL:
                bit = gl.load(bit_ptr + begin + 1, mask=n_partial > 1, other=0)
            for j in range(1, n):
                c_now = c * q_scale
                shift_now = shift
                block = gl.load(idx_ptr + begin + j + 1, mask=j + 1 < n, other=0)
                if PARTIAL:
                    words = bit_words(bits_ptr, bit, j < n_partial, CID, 128, W_L)
                    bit = gl.load(bit_ptr + begin + j + 1, mask=j + 1 < n_partial, other=0)
                p, acc, m, l, token = _step(
                    q, k_s, v_s, bars, p, acc, add, m, l, g, j + 1 < n, words, j < n_partial,
                    c_now, shift_now, token, zero, CID, PARTIAL, W_L, P_L, S_L, W4_L,
                )  # fmt: skip
                add = j % FLUSH != 0
                if j % FLUSH == 0:
                    sum_s.store(_flushed(acc, sum_s, m, m_sum, j == FLUSH))
                    gl.thread_barrier()  # here, or the compiler puts one into every step
                    m_sum = m + 0.0
                c, shift = _key_scale(k_scale_ptr, block, kv_row)
                g += 1
            mbarrier.arrive(q_empty.index(slot), count=1)
            last_bh = bh
            last_n = n
            last_part = part
            last_tile = tile
            t += 1
        else:
            running = 0
    # ---- the last PV of this program
    if last_tile >= 0:
        i_v = (g - 1) % STAGES
        mbarrier.wait(v_full.index(i_v), ((g - 1) // STAGES) & 1)
        v = v_s.index(i_v).reshape([DV, 128]).permute((1, 0))
        acc_async = warpgroup_mma(unpack(p, zero, W4_L, P_L), v, acc, use_acc=add, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_async,))
        _store(
            acc, m, l, o_desc, o_s, sum_s, m_sum, last_n, outs, last_bh, last_tile,
            last_part, group, n_q, CID, SPLIT,
        )  # fmt: skip
    if CID == 0:
        token = named_sync(9, 256, token)  # absorb the last arrival
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_items", "n_long", "list_batch", "list_heads", "n_parts", "n_q", "heads", "group", "n_bh",
        "dim_v",
    ]
)  # fmt: skip
def attention_forward_fp8(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, counter_ptr,
    q_scale_ptr, k_scale_ptr, out_scale_ptr, items_ptr, idx_ptr, bit_ptr, bits_ptr,
    n_items, n_long, list_batch, list_heads, n_parts, n_q, heads, group, n_bh, dim_v, scale,
    STAGES: gl.constexpr, PARTIAL: gl.constexpr, SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent: one program per SM.

    q (B, H_q, N_q, D), k (B, H_kv, N_k, D) and v (B, H_kv, D_v, tokens, in the order above), e4m3
    -> out (B, H_q, N_q, D_v) bfloat16, lse (B, H_q, N_q). scale includes log2(e). The parts of a
    split tile go to part_out (B, H_q, n_parts, 128, D_v padded) and part_lse, for `merge_parts`.
    """
    gl.static_assert(num_warps == 4)
    D: gl.constexpr = k_desc.block_shape[3]
    DV: gl.constexpr = v_desc.block_shape[2]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, 128, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, DV, 128], v_desc.layout)
    o_s = gl.allocate_shared_memory(o_desc.dtype, [2, 1, 1, 64, DV], o_desc.layout)
    SUM_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DV], gl.float32)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64, DV], SUM_L)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    record_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    record_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    record_go = gl.allocate_shared_memory(gl.int64, [1], ML)
    for i in gl.static_range(4):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=2)
    mbarrier.init(record_go, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, o_desc)
    bufs = (q_s, k_s, v_s, o_s, record, sums)
    bars = (q_full, q_empty, k_full, v_full, empty, record_full, record_empty, record_go)
    lists = (items_ptr, idx_ptr, bit_ptr, bits_ptr, n_items, n_long, list_batch, list_heads)
    scales = (q_scale_ptr, k_scale_ptr, scale)
    outs = (lse_ptr, out_scale_ptr, part_out_ptr, part_lse_ptr, n_parts)
    shape = (n_q, heads, group, n_bh)
    gl.warp_specialize(
        [
            (_consumer, (descs, bufs, bars, lists, scales, outs, shape, 0, PARTIAL, SPLIT)),
            (_consumer, (descs, bufs, bars, lists, scales, outs, shape, 1, PARTIAL, SPLIT)),
            (producer, (descs, bufs, bars, lists, shape)),
            (scheduler, (bufs, bars, lists, shape, counter_ptr, out_ptr, lse_ptr, dim_v, DV)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
