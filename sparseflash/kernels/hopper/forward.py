"""Block-sparse attention forward for Hopper.

docs/internals/kernels.md has the mathematics, docs/internals/hopper.md the pipeline.

Persistent: as many programs as run at a time. Warps: one to three consumer warpgroups of 64 query
rows each, of one head or of several that share keys, a producer that copies tiles in, a scheduler
that claims work from a counter, and a storer that copies O out of the place of Q. The pipeline of
blocks runs through the boundaries of tiles: the first product of a tile is in flight together with
the last one of the tile before. Where that takes too much shared memory (DRAIN), it ends with a
tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)  # fmt: skip

from sparseflash.kernels.common.dropout import head_keys, is_table
from sparseflash.kernels.hopper.columns import (
    first_columns,
    in_registers,
    no_sums,
    products,
    rescaled_rows,
    scaled_rows,
    start_scores,
    start_scores_of,
    start_sums,
    wait_sums,
)  # fmt: skip
from sparseflash.kernels.hopper.common import (
    WARPGROUP,
    accumulator,
    arrive,
    new_barriers,
    pass_turn,
    take_turn,
    wait_full,
)  # fmt: skip
from sparseflash.kernels.hopper.copies import tile_layout
from sparseflash.kernels.hopper.dropout import entry_blocks, kept, signed, tile_hash
from sparseflash.kernels.hopper.forward_args import Barriers, Buffers, Descriptors, Forward
from sparseflash.kernels.hopper.forward_feed import producer, scheduler, shared_rows, storer
from sparseflash.kernels.hopper.forward_store import sink_of, store_out
from sparseflash.kernels.hopper.masking import bit_words, where_allowed, words_layout
from sparseflash.kernels.hopper.score import numbers_of, scored
from sparseflash.kernels.hopper.softmax import (
    online_softmax,
    row_sums,
    softmax_with,
    some_rescaled,
)  # fmt: skip
from sparseflash.kernels.hopper.work import (
    BATCH,
    BEGIN,
    FIRST_BIT,
    HEAD,
    N_ENTRIES,
    N_PARTIAL,
    PART,
    RECORD,
    TILE,
    read,
    wait_record,
)  # fmt: skip


@gluon.jit
def _start_qk(f, q, g):
    """S = Q K^T of block g, asynchronous."""
    k = f.bufs.k.index(g % f.K_STAGES)  # [BLOCK_N, BLOCK_D]
    zeros = gl.zeros([64, f.BLOCK_N], gl.float32, accumulator(f.BLOCK_N))
    if f.KEEP_Q:
        return start_scores_of(q, k, zeros, False)  # [64, BLOCK_N]
    else:
        return start_scores(q, k, zeros, f.COLUMNS, False)


@gluon.jit
def _start_pv(f, p, acc, add, g, pred):
    """acc += P V of block g, asynchronous."""
    if f.PAIRS:
        i = (g + 1) % f.V_STAGES  # beside K of the next block, which is there
    else:
        i = g % f.V_STAGES
        mbarrier.wait(f.bars.v_full.index(i), (g // f.V_STAGES) & 1, pred=pred)
    v = f.bufs.v.index(i)  # [BLOCK_N, BLOCK_DV]
    return start_sums(p, v, acc, add)  # [64, COLUMNS_V]


@gluon.jit
def _blocks(f, entry):
    """Return the mask blocks of a list entry."""
    BLOCK_K: gl.constexpr = f.descs.k.block_shape[2]
    at = f.idx + entry.to(gl.int64) * (f.BLOCK_N // BLOCK_K)
    return entry_blocks(at, f.BLOCK_N, BLOCK_K)


@gluon.jit
def _with_signs(f, p, blocks, row, row_head, column_head):
    """P [64, BLOCK_N] as `signed` has it; row: the first query, blocks: those of the keys."""
    BLOCK_K: gl.constexpr = f.descs.k.block_shape[2]
    group = tile_hash(row, row_head, blocks, column_head, f.BLOCK_N, BLOCK_K, False)
    return signed(p, group, f.threshold, False)


@gluon.jit
def _logits(f, s, numbers, bh, row, blocks):
    """Return x, unit and add, the logits in base 2 being x unit + add, of products S
    [64, BLOCK_N].
    """
    if f.SCORE is None:
        return s, f.scale_log2, 0.0
    else:
        BLOCK_K: gl.constexpr = f.descs.k.block_shape[2]
        b, h, n_k = bh // f.heads, bh % f.heads, f.score_args[-1]
        s, unit, add, _kept = scored(
            f, s, numbers, b, h, row, f.n_q, blocks, n_k, BLOCK_K, False
        )  # fmt: skip
        return s, unit, add


@gluon.jit
def _softmax(f, s, m, unit, add, MASKED: gl.constexpr, LAZY: gl.constexpr):
    if f.SCORE is None:
        return online_softmax(s, m, unit, MASKED, LAZY)
    else:
        return softmax_with(s, m, unit, add, LAZY, f.BOUNDED)


@gluon.jit
def _consumer(f, CONSUMER: gl.constexpr):
    """Four warps: 64 rows of the tile."""
    bars, record = f.bars, f.bufs.record
    CONSUMERS: gl.constexpr = f.CONSUMERS
    ROW: gl.constexpr = CONSUMER // f.HEADS  # of 64 rows
    BLOCK_N: gl.constexpr = f.BLOCK_N
    PARTIAL: gl.constexpr = f.PARTIAL
    DTYPE: gl.constexpr = f.descs.q.dtype
    SCORES: gl.constexpr = accumulator(BLOCK_N)  # layouts: of S and P
    OUT: gl.constexpr = accumulator(first_columns(f.COLUMNS_V))  # of O
    PV: gl.constexpr = products(f.COLUMNS_V)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)  # of a number for each row
    LAZY: gl.constexpr = f.SKIP and f.max_scores is None  # a call may ask for exact maxima
    WORDS: gl.constexpr = words_layout(BLOCK_N)
    WORD_ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    PLACED: gl.constexpr = f.DROPOUT or f.SCORE is not None  # scores depend on their place
    START: gl.constexpr = 0.0 if f.BOUNDED else float("-inf")  # of the maxima
    token = f.n_items
    if CONSUMER == CONSUMERS - 1:
        token = pass_turn(token, CONSUMER, CONSUMERS)  # consumer 0 may start
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    acc = no_sums(f.COLUMNS_V)
    m = gl.full([64], START, gl.float32, ROWS)
    l = gl.zeros([64, 4], gl.float32, WORDS)
    p = gl.zeros([64, BLOCK_N], DTYPE, P_OPERAND)
    row_head = f.threshold.to(gl.uint32)
    if f.DROPOUT:
        if is_table(f.seed):
            row_head = f.seed
    column_head = row_head
    add = g > 0  # whether the tile has begun its sum
    last_bh = 0
    last_part = -1
    last_row = -1  # of the tile whose last P V is still to come
    running = 1
    while running > 0:
        slot = t & 3
        wait_record(bars.record_full, t)
        tile = read(record, slot, TILE, WARPGROUP)
        begin = read(record, slot, BEGIN, WARPGROUP)
        n_partial = read(record, slot, N_PARTIAL, WARPGROUP)
        n = read(record, slot, N_ENTRIES, WARPGROUP)
        bh = read(record, slot, BATCH, WARPGROUP) * f.heads + read(record, slot, HEAD, WARPGROUP)
        bh += CONSUMER % f.HEADS * f.PACK
        part = read(record, slot, PART, WARPGROUP)
        bit = read(record, slot, FIRST_BIT, WARPGROUP)
        if tile >= 0:
            # ---- first block: its QK with the last PV of the tile before
            row = tile * f.BLOCK_M + ROW * 64
            words = gl.zeros([64, 4], gl.int32, WORDS)
            if PARTIAL:
                words = bit_words(f.bits, bit, n_partial > 0, ROW, f.BLOCK_M, BLOCK_N)
            if f.DROPOUT:
                row_head, column_head = head_keys(f.seed, bh)
            blocks = _blocks(f, begin) if PLACED else 0
            numbers = ()
            if f.SCORE is not None:
                numbers = numbers_of(f, bh // f.heads, bh % f.heads)
            i = (t % f.Q_STAGES) * CONSUMERS + CONSUMER
            q = shared_rows(f.bufs.q, i, f.descs.q, f.BLOCK_D)  # [64, BLOCK_D]
            mbarrier.wait(bars.q_full.index(i), (t // f.Q_STAGES) & 1)
            if f.KEEP_Q:
                q = in_registers(q, f.COLUMNS, SCORES)
            wait_full(bars.k_full, g)
            token = take_turn(token, CONSUMER, CONSUMERS)
            s_async = _start_qk(f, q, g)
            if f.DRAIN:
                token = pass_turn(token, CONSUMER, CONSUMERS)
                s = warpgroup_mma_wait(0, deps=(s_async,))
            else:
                # before the very first block there is no V; what this gives then is not used
                acc_async = _start_pv(f, p, acc, add, gl.maximum(g - 1, 0), g > 0)
                token = pass_turn(token, CONSUMER, CONSUMERS)
                sink = sink_of(f, t - 1, last_part, CONSUMER)
                s = warpgroup_mma_wait(PV, deps=(s_async,))
                if CONSUMERS == 3:  # registers are short where one tile follows the other
                    acc = wait_sums(acc_async, 0)
            if not f.PAIRS:
                arrive(bars.k_empty, g)
            s, unit_0, shift_0 = _logits(f, s, numbers, bh, row, blocks)
            if PARTIAL:
                s = where_allowed(s, words, float("-inf"))
            nothing = gl.full([64], START, gl.float32, ROWS)
            p32, m_new, _unused = _softmax(f, s, nothing, unit_0, shift_0, PARTIAL, False)
            l_new = row_sums(p32)
            if f.DROPOUT:
                p32 = _with_signs(f, p32, blocks, row, row_head, column_head)
                p16 = kept(p32, DTYPE)
            else:
                p16 = p32.to(DTYPE)
            p = gl.convert_layout(p16, P_OPERAND, assert_trivial=True)
            g += 1
            wait_full(bars.k_full, g, n > 1)
            if not f.DRAIN:
                if CONSUMERS < 3:
                    acc = wait_sums(acc_async, 0)
                if f.PAIRS:
                    arrive(bars.k_empty, g - 1)
                if last_row >= 0:
                    if not f.PAIRS:
                        arrive(bars.v_empty, g - 2)
                    last_i = ((t - 1) % f.Q_STAGES) * CONSUMERS + CONSUMER
                    store_out(f, acc, m, l, sink, last_i, last_bh, last_row, last_part)
            m = m_new
            l = l_new
            add = n < 0
            # ---- the other blocks, partial ones first: in a loop of their own, or all in one
            if PARTIAL:
                bit = gl.load(f.bit + begin + 1)
            start = 1
            for loop in gl.static_range(f.LOOPS):
                end = n_partial if loop < f.LOOPS - 1 else n
                for j in range(start, end):
                    if PARTIAL and loop == 0:
                        words = bit_words(f.bits, bit, j < n_partial, ROW, f.BLOCK_M, BLOCK_N)
                        bit = gl.load(f.bit + begin + j + 1)
                    token = take_turn(token, CONSUMER, CONSUMERS)
                    s_async = _start_qk(f, q, g)
                    acc_async = _start_pv(f, p, acc, add, g - 1, True)
                    token = pass_turn(token, CONSUMER, CONSUMERS)
                    if PLACED:
                        blocks = _blocks(f, begin + j)
                    if f.DROPOUT or (CONSUMERS == 3 and not PARTIAL):
                        # a barrier that has been passed, for one more basic block: ptxas computes
                        # signs, or with three consumers exp2s, after the wait for PV otherwise
                        wait_full(bars.k_full, g)
                    s = warpgroup_mma_wait(PV, deps=(s_async,))  # [64, BLOCK_N]
                    if not f.PAIRS:
                        arrive(bars.k_empty, g)
                    s, unit, shift = _logits(f, s, numbers, bh, row, blocks)
                    if PARTIAL and loop == 0:
                        if j < n_partial:
                            s = where_allowed(s, words, float("-inf"))
                    p32, m, alpha = _softmax(f, s, m, unit, shift, PARTIAL and loop == 0, LAZY)
                    if f.BOUNDED:
                        l += row_sums(p32)
                    else:
                        alpha_l = gl.convert_layout(alpha, WORD_ROWS, assert_trivial=True)
                        alpha_l = alpha_l[:, None].broadcast_to(l.shape)
                        l = l * alpha_l + row_sums(p32)  # [64, 4]
                        if f.SKIP:
                            some = some_rescaled(alpha_l, l)
                    if f.DROPOUT:
                        p32 = _with_signs(f, p32, blocks, row, row_head, column_head)
                    else:
                        p = gl.convert_layout(p32.to(DTYPE), P_OPERAND, assert_trivial=True)
                    # a basic-block boundary: ptxas hoists the wait for PV above the exp2s otherwise
                    wait_full(bars.k_full, g + 1, j + 1 < n)
                    acc = wait_sums(acc_async, 0)
                    if f.DROPOUT:
                        p = gl.convert_layout(kept(p32, DTYPE), P_OPERAND, assert_trivial=True)
                    if f.PAIRS:
                        arrive(bars.k_empty, g)
                    else:
                        arrive(bars.v_empty, g - 1)
                    if f.SKIP and not f.BOUNDED:
                        acc = rescaled_rows(acc, alpha_l, some)
                    elif not f.BOUNDED:
                        acc = scaled_rows(acc, alpha)
                    add = n > 0
                    g += 1
                start = gl.maximum(start, end)
            if f.DRAIN:
                acc_async = _start_pv(f, p, acc, add, g - 1, True)
                sink = sink_of(f, t, part, CONSUMER)
                acc = wait_sums(acc_async, 0)
                arrive(bars.v_empty, g - 1)
                o = store_out(f, acc, m, l, sink, i, bh, row, part)
                if f.SPLIT:
                    acc = o  # the next tile begins a sum of its own: acc need not outlive O
            last_bh = bh + 0
            last_part = part + 0
            last_row = row + 0
            t += 1
        else:
            running = 0
    if not f.DRAIN:
        if last_row >= 0:
            if f.PAIRS:
                wait_full(bars.k_full, g)
            acc_async = _start_pv(f, p, acc, add, g - 1, True)
            sink = sink_of(f, t - 1, last_part, CONSUMER)
            acc = wait_sums(acc_async, 0)
            i = ((t - 1) % f.Q_STAGES) * CONSUMERS + CONSUMER
            store_out(f, acc, m, l, sink, i, last_bh, last_row, last_part)
    if CONSUMER == 0:
        token = take_turn(token, CONSUMER, CONSUMERS)  # absorb the last arrival


_UNSPECIALIZED = (
    "n_items", "n_long", "n_parts", "list_batch", "list_heads", "n_q", "dim_v", "heads", "group",
    "n_bh", "together", "stride_b", "stride_h", "stride_n", "threshold",
)  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def attention_forward(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, counter_ptr, part_out_ptr, part_lse_ptr,
    items_ptr, idx_ptr, bit_ptr, bits_ptr, n_items, n_long, n_parts, list_batch, list_heads,
    n_q, dim_v, heads, group, n_bh, together, stride_b, stride_h, stride_n,
    scale_log2, seed_ptr, threshold, keep_scale, sink_ptr, max_ptr, part_max_ptr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, HEADS: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, COLUMNS: gl.constexpr,
    COLUMNS_V: gl.constexpr, PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, SPLIT: gl.constexpr,
    DRAIN: gl.constexpr, PAIRS: gl.constexpr, KEEP_Q: gl.constexpr,
    REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
    score_args=None, SCORE: gl.constexpr = None, NUMBERS: gl.constexpr = None,
    BOUNDED: gl.constexpr = False,
):  # fmt: skip
    """q (B, H_q, N_q, D), k (B, H_kv, N_k, D), v (B, H_kv, N_k, D_v) -> out (B, H_q, N_q, D_v) and
    lse (B, H_q, N_q), and the row maxima like lse, unless max_ptr is None.

    BLOCK_D and BLOCK_DV are the padded head dims, COLUMNS and COLUMNS_V what is multiplied of them.
    Tiles are BLOCK_M queries of each of HEADS heads, 64 rows to a consumer, x BLOCK_N keys; K and V
    have rings of K_STAGES and V_STAGES of them, with PAIRS one for both. Parts of a split tile go
    to part_out (B * H_q, n_parts, BLOCK_M, BLOCK_DV), part_lse and part_max, for `merge_parts`.

    SCORE gives the logits, of score_args; see `score.by_triton`. The last is N_k.
    """
    gl.static_assert(num_warps == 4)
    DTYPE: gl.constexpr = q_desc.dtype
    Q_STAGES: gl.constexpr = 1 if DRAIN else 2
    WIDTH: gl.constexpr = BLOCK_D if BLOCK_D > BLOCK_DV else BLOCK_DV
    BOTH: gl.constexpr = COLUMNS + COLUMNS_V
    MOST: gl.constexpr = 256 if CONSUMERS == 1 else 192  # that two loops have registers for
    Q_LAYOUT: gl.constexpr = tile_layout(q_desc.layout)
    K_LAYOUT: gl.constexpr = tile_layout(k_desc.layout)
    V_LAYOUT: gl.constexpr = tile_layout(v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, [Q_STAGES * CONSUMERS, 64, WIDTH], Q_LAYOUT)
    k_s = gl.allocate_shared_memory(DTYPE, [K_STAGES, BLOCK_N, BLOCK_D], K_LAYOUT)
    v_s = gl.allocate_shared_memory(DTYPE, [V_STAGES, BLOCK_N, BLOCK_DV], V_LAYOUT)
    record = gl.allocate_shared_memory(gl.int32, [4 * RECORD, 1], mbarrier.MBarrierLayout())
    q_full = new_barriers(Q_STAGES * CONSUMERS)
    q_empty = new_barriers(Q_STAGES)
    k_full = new_barriers(K_STAGES)
    k_empty = new_barriers(K_STAGES)
    out_full = new_barriers(Q_STAGES * CONSUMERS)
    record_full = new_barriers(4)
    record_go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(out_full.index(i), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(record_full.index(i), count=1)
    mbarrier.init(record_go, count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
    v_full, v_empty = k_full, k_empty  # stand-ins
    if not PAIRS:
        v_full = new_barriers(V_STAGES)
        v_empty = new_barriers(V_STAGES)
        for i in gl.static_range(V_STAGES):
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    f = Forward(
        descs=Descriptors(q=q_desc, k=k_desc, v=v_desc, out=out_desc),
        bufs=Buffers(q=q_s, k=k_s, v=v_s, record=record),
        bars=Barriers(
            q_full=q_full, q_empty=q_empty, k_full=k_full, k_empty=k_empty, v_full=v_full,
            v_empty=v_empty, out_full=out_full, record_full=record_full, record_go=record_go,
        ),
        items=items_ptr, idx=idx_ptr, bit=bit_ptr, bits=bits_ptr, n_items=n_items, n_long=n_long,
        list_batch=list_batch, list_heads=list_heads,
        out=out_ptr, lse=lse_ptr, counter=counter_ptr, seed=seed_ptr, threshold=threshold,
        keep_scale=keep_scale, sink=sink_ptr, max_scores=max_ptr, part_max=part_max_ptr,
        stride_b=stride_b, stride_h=stride_h, stride_n=stride_n,
        part_out=part_out_ptr, part_lse=part_lse_ptr, n_parts=n_parts, scale_log2=scale_log2,
        n_q=n_q, dim_v=dim_v, heads=heads, group=group, n_bh=n_bh, together=together,
        CONSUMERS=CONSUMERS, HEADS=HEADS, PACK=1 if HEADS <= CONSUMERS else HEADS // CONSUMERS,
        BLOCK_M=64 * CONSUMERS // HEADS, BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, COLUMNS=COLUMNS, COLUMNS_V=COLUMNS_V,
        Q_STAGES=Q_STAGES, K_STAGES=K_STAGES, V_STAGES=V_STAGES,
        PARTIAL=PARTIAL, LOOPS=2 if PARTIAL and BOTH > 160 and BOTH <= MOST else 1,
        DROPOUT=DROPOUT, SPLIT=SPLIT, DRAIN=DRAIN, PAIRS=PAIRS, KEEP_Q=KEEP_Q,
        score_args=score_args, SCORE=SCORE, NUMBERS=NUMBERS, BOUNDED=BOUNDED,
        # dropout has no registers for it up to 128, and 80 columns lose by it
        SKIP=COLUMNS_V > 128 or (COLUMNS_V != 80 and not DROPOUT),
    )  # fmt: skip
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (f, 0)),
                (_consumer, (f, 1)),
                (_consumer, (f, 2)),
                (producer, (f,)),
                (scheduler, (f,)),
                (storer, (f,)),
            ],
            [4, 4, 1, 1, 1],
            [REGISTERS, REGISTERS, FEED_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (f, 0)),
                (_consumer, (f, 1)),
                (producer, (f,)),
                (scheduler, (f,)),
                (storer, (f,)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, FEED_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_consumer, (f, 0)), (producer, (f,)), (scheduler, (f,)), (storer, (f,))],
            [1, 1, 1],
            [FEED_REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
