"""Block-sparse attention with e4m3 inputs on Hopper, forward only. See docs/internals/hopper.md.

Both products run as fp8 wgmma, whose operands must lie with the reduced dimension contiguous. So V
comes transposed, (B, H_kv, D_v, tokens), and with its tokens in another order inside every group
of 16: token 8 * half + 2 * quad + pair stands at place 4 * quad + 2 * half + pair. With that order
the registers in which wgmma leaves the scores are those in which it takes P: no shuffles.

Every block of 128 tokens has one scale per tensor. Those of Q and K enter the softmax' scale. That
of V, relative to the largest of its head, enters the exponent of P, together with 2 ** 8, which
brings P into the range of e4m3: p = exp2(score - maximum + shift).

fp8 wgmma keeps about 14 bits of its accumulator and cuts off the rest, a bias that grows with the
length of the sum: 1.6 % after 16,384 keys. So every 8 blocks the accumulator is added, in float32,
to one in shared memory and starts again at 0; in registers a second one would not fit beside S.
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

from sparseflash.kernels.gluon import async_store, barrier
from sparseflash.kernels.hopper.common import (
    WARPGROUP,
    accumulator,
    arrive,
    new_barriers,
    pass_turn,
    take_turn,
    wait_full,
)  # fmt: skip
from sparseflash.kernels.hopper.fp8_feed import (
    Barriers,
    Buffers,
    Descriptors,
    Fp8Forward,
    producer,
    scheduler,
)  # fmt: skip
from sparseflash.kernels.hopper.masking import bit_words, where_allowed, words_layout
from sparseflash.kernels.hopper.softmax import (
    byte_layout,
    fp8_probabilities,
    fp8_row_max,
    unpack,
)  # fmt: skip
from sparseflash.kernels.hopper.work import (
    BATCH_HEAD,
    BEGIN,
    FIRST_BIT,
    FIRST_IDX,
    N_ENTRIES,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
    read,
    wait_record,
)  # fmt: skip
from sparseflash.kernels.softmax import finite, natural_lse, rescale_factor

FLUSH = gl.constexpr(8)  # blocks that one wgmma accumulator sums


@gluon.jit
def _key_scale(f, block, kv_row):
    """Of one block of keys: the scale of K, and log2 of what P is multiplied by."""
    p = f.k_table + (kv_row + block) * 2
    return gl.load(p), gl.load(p + 1)


@gluon.jit
def _issue(f, q, p, acc, add, g, token, zero, CONSUMER: gl.constexpr):
    """Start QK of block g and P V of block g - 1, in turns with the other consumer."""
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    i_v = gl.maximum(g - 1, 0) % f.STAGES
    p = unpack(p, zero, P_OPERAND)  # not between the two wgmma, or ptxas serialises them
    token = take_turn(token, CONSUMER, 2)
    k = f.bufs.k.index(g % f.STAGES).reshape([128, f.BLOCK_D]).permute((1, 0))  # [BLOCK_D, 128]
    zeros = gl.zeros([64, 128], gl.float32, accumulator(128, 32))
    s_async = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)  # [64, 128]
    # before the first block there is no V: whatever lies there is multiplied and not used
    mbarrier.wait(f.bars.v_full.index(i_v), ((g - 1) // f.STAGES) & 1, pred=g > 0)
    v = f.bufs.v.index(i_v).reshape([f.BLOCK_DV, 128]).permute((1, 0))  # [128, BLOCK_DV]
    acc_async = warpgroup_mma(p, v, acc, use_acc=add, is_async=True)  # [64, BLOCK_DV]
    return s_async, acc_async, pass_turn(token, CONSUMER, 2)


@gluon.jit
def _step(
    f, q, p, acc, add, m, l, g, has_next, words, on, score_scale, shift, token, zero,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """QK of block g and P V of block g - 1 in flight together; the softmax of g meanwhile."""
    s_async, acc_async, token = _issue(f, q, p, acc, add, g, token, zero, CONSUMER)
    s = warpgroup_mma_wait(1, deps=(s_async,))  # [64, 128]
    if f.PARTIAL:
        if on:
            s = where_allowed(s, words, float("-inf"))
    m_new = gl.maximum(m, fp8_row_max(s) * score_scale)  # [64]
    p, total = fp8_probabilities(s, score_scale, shift, m_new)
    alpha = rescale_factor(m, finite(m_new))
    l = l * alpha + total
    # a basic-block boundary: without it ptxas hoists the wait for P V above the exponentials
    wait_full(f.bars.k_full, g + 1, has_next)
    acc = warpgroup_mma_wait(0, deps=(acc_async,))
    arrive(f.bars.empty, g)  # of K of block g and V of block g - 1
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m_new, l, token


@gluon.jit
def _flushed(acc, sum_s, m, m_sum, first):
    """acc [64, BLOCK_DV], relative to the maxima m, plus the sum in shared memory, relative to
    m_sum.
    """
    factor = rescale_factor(m_sum, finite(m))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))
    before = sum_s.load(acc.type.layout) * factor[:, None]
    return acc + gl.where(first, 0.0, before)


@gluon.jit
def _store(f, acc, m, l, m_sum, n, bh, tile, part, CONSUMER: gl.constexpr):
    """Out and LSE of 64 rows; those of a part of a tile go to its slot, in float32."""
    ROWS: gl.constexpr = m.type.layout
    OUT: gl.constexpr = acc.type.layout
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    if n > FLUSH:
        acc = _flushed(acc, f.bufs.sums.index(CONSUMER), m, m_sum, False)
    some = m > float("-inf")
    l = gl.where(some, l, 1.0)
    factor = gl.load(f.out_scale + bh // f.group) / l
    out = acc * gl.convert_layout(gl.where(some, factor, 0.0), OUT_ROWS)[:, None]
    lse = gl.where(some, natural_lse(m, l), float("-inf"))
    whole = part < 0
    if f.SPLIT:
        if part >= 0:
            slot = (bh.to(gl.int64) * f.n_parts + part) * 128 + CONSUMER * 64
            row = slot + gl.arange(0, 64, OUT_ROWS)
            dim = gl.arange(0, f.BLOCK_DV, gl.SliceLayout(0, OUT))
            gl.store(f.part_out + row[:, None] * f.BLOCK_DV + dim[None, :], out)
            gl.store(f.part_lse + slot + gl.arange(0, 64, ROWS), lse)
    if whole:
        out_s = f.bufs.out.index(CONSUMER)
        heads = f.descs.out.shape[1]
        row = tile * 128 + CONSUMER * 64
        tma.store_wait(0)  # the store of the previous tile has read the buffer
        out_s.reshape([64, f.BLOCK_DV]).store(out.to(gl.bfloat16))
        fence_async_shared()
        async_store(f.descs.out, [bh // heads, bh % heads, row, 0], out_s)
        q = row + gl.arange(0, 64, ROWS)
        gl.store(f.lse + bh.to(gl.int64) * f.n_q + q, lse, mask=q < f.n_q)


@gluon.jit
def _consumer(f, CONSUMER: gl.constexpr):
    """Four warps: 64 rows of the tile. The pipeline of blocks runs through tile boundaries."""
    bars, record = f.bars, f.bufs.record
    PARTIAL: gl.constexpr = f.PARTIAL
    OUT: gl.constexpr = accumulator(f.BLOCK_DV, 32)  # layouts: of O
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    P_WORDS: gl.constexpr = gl.SliceLayout(2, byte_layout())
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(128, 32))  # of a number for each row
    sum_s = f.bufs.sums.index(CONSUMER)
    n_q_blocks = gl.cdiv(f.n_q, 128)
    n_k_blocks = gl.cdiv(f.descs.k.shape[2], 128)
    token = f.n_q
    zero = f.n_long >> 31
    if CONSUMER == 1:
        token = pass_turn(token, CONSUMER, 2)  # consumer 0 may start
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    acc = gl.zeros([64, f.BLOCK_DV], gl.float32, OUT)
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    l = gl.zeros([64], gl.float32, ROWS)
    m_sum = m
    p = gl.zeros([64, 32], gl.int32, P_WORDS)
    add = g > 0
    last_bh = 0
    last_n = 0
    last_part = -1
    last_tile = -1  # whose last P V is still to come
    running = 1
    while running > 0:
        slot = t & 1
        wait_record(bars.record_full, t)
        tile = read(record, slot, TILE, WARPGROUP)
        begin = read(record, slot, BEGIN, WARPGROUP)
        n_partial = read(record, slot, N_PARTIAL, WARPGROUP)
        n = read(record, slot, N_ENTRIES, WARPGROUP)
        bh = read(record, slot, BATCH_HEAD, WARPGROUP)
        part = read(record, slot, PART, WARPGROUP)
        block = read(record, slot, FIRST_IDX, WARPGROUP)
        bit = read(record, slot, FIRST_BIT, WARPGROUP)
        mbarrier.arrive(bars.record_empty.index(slot), count=1)
        if tile >= 0:
            # ---- first block: its QK with the last PV of the tile before
            kv_row = (bh // f.group).to(gl.int64) * n_k_blocks
            q_scale = gl.load(f.q_scale + bh.to(gl.int64) * n_q_blocks + tile) * f.scale_log2
            score_scale, shift = _key_scale(f, block, kv_row)
            block = gl.load(f.idx + begin + 1)
            words = gl.zeros([64, 4], gl.int32, words_layout(128))
            if PARTIAL:
                words = bit_words(f.bits, bit, n_partial > 0, CONSUMER, 128, 128)
            i = g % f.STAGES
            q = f.bufs.q.index(slot * 2 + CONSUMER).reshape([64, f.BLOCK_D])
            mbarrier.wait(bars.q_full.index(slot * 2 + CONSUMER), (t >> 1) & 1)
            mbarrier.wait(bars.k_full.index(i), (g // f.STAGES) & 1)
            s_async, acc_async, token = _issue(f, q, p, acc, add, g, token, zero, CONSUMER)
            s = warpgroup_mma_wait(1, deps=(s_async,))  # [64, 128]
            if PARTIAL:
                s = where_allowed(s, words, float("-inf"))
            score_scale = score_scale * q_scale
            m_new = fp8_row_max(s) * score_scale
            p, l_new = fp8_probabilities(s, score_scale, shift, m_new)
            g += 1
            wait_full(bars.k_full, g, n > 1)
            acc = warpgroup_mma_wait(0, deps=(acc_async,))
            arrive(bars.empty, g - 1)
            if last_tile >= 0:
                _store(f, acc, m, l, m_sum, last_n, last_bh, last_tile, last_part, CONSUMER)
            m = m_new
            l = l_new
            add = g < 0
            # ---- blocks 1..n-1, partial ones first: one loop, since two spill
            score_scale, shift = _key_scale(f, block, kv_row)
            if PARTIAL:
                bit = gl.load(f.bit + begin + 1, mask=n_partial > 1, other=0)
            for j in range(1, n):
                scale_now = score_scale * q_scale
                shift_now = shift
                block = gl.load(f.idx + begin + j + 1, mask=j + 1 < n, other=0)
                if PARTIAL:
                    words = bit_words(f.bits, bit, j < n_partial, CONSUMER, 128, 128)
                    bit = gl.load(f.bit + begin + j + 1, mask=j + 1 < n_partial, other=0)
                p, acc, m, l, token = _step(
                    f, q, p, acc, add, m, l, g, j + 1 < n, words, j < n_partial,
                    scale_now, shift_now, token, zero, CONSUMER,
                )  # fmt: skip
                add = j % FLUSH != 0
                if j % FLUSH == 0:
                    sum_s.store(_flushed(acc, sum_s, m, m_sum, j == FLUSH))
                    barrier()  # here, or the compiler puts one into every step
                    m_sum = m + 0.0
                score_scale, shift = _key_scale(f, block, kv_row)
                g += 1
            mbarrier.arrive(bars.q_empty.index(slot), count=1)
            last_bh = bh
            last_n = n
            last_part = part
            last_tile = tile
            t += 1
        else:
            running = 0
    # ---- the last PV of this program
    if last_tile >= 0:
        i_v = (g - 1) % f.STAGES
        wait_full(bars.v_full, g - 1)
        v = f.bufs.v.index(i_v).reshape([f.BLOCK_DV, 128]).permute((1, 0))  # [128, BLOCK_DV]
        p_operand = unpack(p, zero, P_OPERAND)
        acc_async = warpgroup_mma(p_operand, v, acc, use_acc=add, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_async,))
        _store(f, acc, m, l, m_sum, last_n, last_bh, last_tile, last_part, CONSUMER)
    if CONSUMER == 0:
        token = take_turn(token, CONSUMER, 2)  # absorb the last arrival
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_items", "n_long", "list_batch", "list_heads", "n_parts", "n_q", "heads", "group", "n_bh",
        "dim_v",
    ]
)  # fmt: skip
def attention_forward_fp8(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, counter_ptr,
    q_scale_ptr, k_table_ptr, out_scale_ptr, items_ptr, idx_ptr, bit_ptr, bits_ptr,
    n_items, n_long, list_batch, list_heads, n_parts, n_q, heads, group, n_bh, dim_v, scale_log2,
    STAGES: gl.constexpr, PARTIAL: gl.constexpr, SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent: one program per SM.

    q (B, H_q, N_q, D), k (B, H_kv, N_k, D) and v (B, H_kv, D_v, tokens, in the order above), e4m3
    -> out (B, H_q, N_q, D_v) bfloat16, lse (B, H_q, N_q). The parts of a split tile go to part_out
    (B, H_q, n_parts, 128, BLOCK_DV) and part_lse, for `merge_parts`.
    """
    gl.static_assert(num_warps == 4)
    BLOCK_D: gl.constexpr = k_desc.block_shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_shape[2]
    SUM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_DV], gl.float32)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 1, 64, BLOCK_D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, 128, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_DV, 128], v_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [2, 1, 1, 64, BLOCK_DV], out_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64, BLOCK_DV], SUM_LAYOUT)
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], mbarrier.MBarrierLayout())
    q_full = new_barriers(4)
    q_empty = new_barriers(2)
    k_full = new_barriers(STAGES)
    v_full = new_barriers(STAGES)
    empty = new_barriers(STAGES)
    record_full = new_barriers(2)
    record_empty = new_barriers(2)
    record_go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
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
    f = Fp8Forward(
        descs=Descriptors(q=q_desc, k=k_desc, v=v_desc, out=out_desc),
        bufs=Buffers(q=q_s, k=k_s, v=v_s, out=out_s, record=record, sums=sums),
        bars=Barriers(
            q_full=q_full, q_empty=q_empty, k_full=k_full, v_full=v_full, empty=empty,
            record_full=record_full, record_empty=record_empty, record_go=record_go,
        ),
        items=items_ptr, idx=idx_ptr, bit=bit_ptr, bits=bits_ptr, n_items=n_items, n_long=n_long,
        list_batch=list_batch, list_heads=list_heads,
        q_scale=q_scale_ptr, k_table=k_table_ptr, scale_log2=scale_log2,
        lse=lse_ptr, out_scale=out_scale_ptr, part_out=part_out_ptr, part_lse=part_lse_ptr,
        n_parts=n_parts, n_q=n_q, heads=heads, group=group, n_bh=n_bh, counter=counter_ptr,
        out=out_ptr, dim_v=dim_v, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, STAGES=STAGES,
        PARTIAL=PARTIAL, SPLIT=SPLIT,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (f, 0)), (_consumer, (f, 1)), (producer, (f,)), (scheduler, (f,))],
        [4, 1, 1],
        [240, 24, 24],
    )
