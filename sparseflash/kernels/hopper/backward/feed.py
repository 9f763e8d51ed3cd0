"""The pass over columns apart from its products: its arguments by name, the warp that copies tiles
in, the warp that copies dK and dV out, and the operands of the consumers.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from sparseflash.kernels.hopper.backward.common import Inputs
from sparseflash.kernels.hopper.columns import in_registers, start_scores, start_scores_of
from sparseflash.kernels.hopper.common import WARP, accumulator, fields
from sparseflash.kernels.hopper.copies import copied_bytes, load_rows, store_rows
from sparseflash.kernels.hopper.gluon import async_load
from sparseflash.kernels.hopper.work import (
    BATCH_HEAD,
    BEGIN,
    N_ENTRIES,
    PART,
    TILE,
    read,
    wait_record,
)  # fmt: skip


@fields
class Buffers:
    """Shared memory. A ring has its places along the first axis."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, BLOCK_D]
    dout: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, BLOCK_DV]
    k: gl.shared_memory_descriptor  # [KV_STAGES, 1, 1, BLOCK_N, BLOCK_D]; also dK
    v: gl.shared_memory_descriptor  # [KV_STAGES, 1, 1, BLOCK_N, BLOCK_DV]; also dV
    ds: gl.shared_memory_descriptor  # WITH_DQ: [2, BLOCK_N, BLOCK_M]; otherwise any
    p: gl.shared_memory_descriptor  # `wide.py`: float32 [4096], P^T in the order of the registers
    lse_log2: gl.shared_memory_descriptor  # float32 [STAGES, BLOCK_M]
    neg_delta: gl.shared_memory_descriptor  # float32 [STAGES, BLOCK_M]
    record: gl.shared_memory_descriptor  # [2 * RECORD, 1]: the work to do


@fields
class Barriers:
    """A place is full once its copy has arrived, and empty once it has been read."""

    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor  # of Q and lse_log2
    q_empty: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor  # of dO and neg_delta
    dout_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor  # of the dS of both consumers
    p_full: gl.shared_memory_descriptor  # `wide.py`: of P^T
    p_empty: gl.shared_memory_descriptor
    out_full: gl.shared_memory_descriptor  # dK and dV stand in the place of K and V
    record_full: gl.shared_memory_descriptor
    record_empty: gl.shared_memory_descriptor
    record_go: gl.shared_memory_descriptor  # the next tile may be claimed


@fields
class Columns:
    descs: Inputs
    bufs: Buffers
    bars: Barriers
    # tensors, lists (see sparseflash/schedule), and what describes them
    idx: gl.tensor  # int32: the mask blocks of an entry
    bit: gl.tensor  # int32: the bit tile of an entry
    bits: gl.tensor  # int32: bit tiles
    dq: gl.tensor  # WITH_DQ: float32 (B, H, n_pad, BLOCK_D) in slabs, see cols.py
    parts: gl.tensor  # float32 (B * H_kv, n_parts, BLOCK_N, BLOCK_D + BLOCK_DV)
    seed: gl.tensor  # of dropout
    kv_heads: gl.tensor
    group: gl.tensor  # query heads to a key head
    n_pad: gl.tensor  # queries of a head, with those that only the vectors and dQ have
    # GROUPED: an entry is head in the group * n_blocks + query block. With GATHER 1, n_pad is
    # n_blocks * BLOCK_M.
    n_blocks: gl.tensor
    n_k: gl.tensor
    scale_log2: gl.tensor
    n_parts: gl.tensor
    threshold: gl.tensor
    keep_scale: gl.tensor  # 1 / (1 - p)
    lse_log2: gl.tensor  # float32 (B, H, n_pad): the LSE in base 2
    neg_delta: gl.tensor  # float32 (B, H, n_pad): -delta
    items: gl.tensor  # int32 (list_batch * list_heads * n_items, 8): TILE to PART of a tile
    counter: gl.tensor  # int32: tiles claimed
    n_items: gl.tensor  # of a batch x key head
    n_long: gl.tensor  # of these, the ones that run before all others
    list_batch: gl.tensor  # 1: all batch entries have the same lists
    list_heads: gl.tensor  # likewise
    n_bh: gl.tensor  # batch x key heads
    dk_desc: tensor_descriptor
    dv_desc: tensor_descriptor
    # what the kernel is compiled for
    CONSUMERS: gl.constexpr
    BLOCK_M: gl.constexpr  # queries of a tile
    BLOCK_N: gl.constexpr  # keys of a tile: 64 for each consumer
    BLOCK_D: gl.constexpr  # head dims, padded
    BLOCK_DV: gl.constexpr
    COLUMNS: gl.constexpr  # what is multiplied of them
    COLUMNS_V: gl.constexpr
    GATHER: gl.constexpr  # mask blocks to an entry
    STAGES: gl.constexpr
    KV_STAGES: gl.constexpr
    GROUPED: gl.constexpr  # several query heads to a key head
    PARTIAL: gl.constexpr  # there are partial blocks
    DROPOUT: gl.constexpr
    SPLIT: gl.constexpr  # some tiles are split along the queries
    WITH_DQ: gl.constexpr
    KEEP_KV: gl.constexpr  # K and V stay in registers for a tile
    LOOPS: gl.constexpr  # two: partial blocks have a loop of their own
    LATE: gl.constexpr  # blocks before its end at which a tile lets the next one be claimed
    # a score
    score_args: tl.tuple | gl.constexpr  # of the functions, then N_q and N_k; None without one
    row_sums: gl.tensor | gl.constexpr  # float32 (SUMS, B * H, n_sums), by key, or None
    n_sums: gl.tensor | gl.constexpr  # n_k in whole tiles, then the keys of split parts
    SCORE: gl.constexpr  # a function of `score.by_triton`, or None
    NUMBERS: gl.constexpr  # likewise
    SLOPE: gl.constexpr  # that of its derivative
    SUMS: gl.constexpr  # how many it gives


@fields
class Operands:
    """Operands of a block in shared memory; kw and vw: of this consumer."""

    q: gl.shared_memory_descriptor  # [BLOCK_M, BLOCK_D]
    dout: gl.shared_memory_descriptor  # [BLOCK_M, BLOCK_DV]
    k: gl.shared_memory_descriptor  # [BLOCK_N, BLOCK_D]
    kw: gl.shared_memory_descriptor  # [64, BLOCK_D]
    vw: gl.shared_memory_descriptor  # [64, BLOCK_DV]


@gluon.jit
def split_index(f, idx):
    """Head in the group and block of queries of a list entry."""
    if f.GROUPED:
        return idx // f.n_blocks, idx % f.n_blocks
    else:
        return idx * 0, idx


@gluon.jit
def producer(f):
    """Copy K and V of a tile, and Q, dO and the vectors of its entries."""
    descs, bufs, bars, record = f.descs, f.bufs, f.bars, f.bufs.record
    BLOCK_M: gl.constexpr = f.BLOCK_M
    BLOCK_Q: gl.constexpr = descs.q.block_shape[2]  # queries of a mask block
    # the copies of vectors want 128-byte places, so this warp copies shorter ones itself
    BY_HAND: gl.constexpr = BLOCK_Q < 32
    VECTOR_BYTES: gl.constexpr = 0 if BY_HAND else descs.lse_log2.block_type.nbytes
    Q_BYTES: gl.constexpr = f.GATHER * (copied_bytes(descs.q.block_type, f.COLUMNS) + VECTOR_BYTES)
    DOUT_BYTES: gl.constexpr = f.GATHER * (
        copied_bytes(descs.dout.block_type, f.COLUMNS_V) + VECTOR_BYTES
    )
    K_BYTES: gl.constexpr = copied_bytes(descs.k.block_type, f.COLUMNS)
    V_BYTES: gl.constexpr = copied_bytes(descs.v.block_type, f.COLUMNS_V)
    n_rows = f.n_bh * f.group * f.n_pad
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        slot = t & 1
        begin = read(record, slot, BEGIN, WARP)
        n = read(record, slot, N_ENTRIES, WARP)
        bh = read(record, slot, BATCH_HEAD, WARP)
        mbarrier.arrive(bars.record_empty.index(slot), count=1)
        b = bh // f.kv_heads
        h = bh % f.kv_heads
        entry = f.idx + begin.to(gl.int64) * f.GATHER
        idx = gl.load(entry)
        kv = t % f.KV_STAGES
        full = bars.kv_full.index(kv)
        mbarrier.wait(bars.kv_empty.index(kv), ((t // f.KV_STAGES) & 1) ^ 1)
        mbarrier.expect(full, K_BYTES + V_BYTES)
        load_rows(descs.k, b, h, tile * f.BLOCK_N, bufs.k.index(kv), full, f.COLUMNS)
        load_rows(descs.v, b, h, tile * f.BLOCK_N, bufs.v.index(kv), full, f.COLUMNS_V)
        # the next tile is claimed late, so that a long one holds no other back
        mbarrier.arrive(bars.record_go, count=1, pred=n == 0)
        late = gl.maximum(n - f.LATE, 0)
        for j in range(n):
            following = gl.load(entry + (j + 1) * f.GATHER)
            mbarrier.arrive(bars.record_go, count=1, pred=j == late)
            s = g % f.STAGES
            phase = ((g // f.STAGES) & 1) ^ 1
            if BY_HAND:
                column = gl.arange(0, BLOCK_M, WARP)
                hg, block = split_index(f, gl.load(entry + j * f.GATHER + column // BLOCK_Q))
                at = (b * f.kv_heads * f.group + h * f.group + hg) * f.n_pad + block * BLOCK_Q
                at += column % BLOCK_Q
                inside = at < n_rows
                lse_log2 = gl.load(f.lse_log2 + at, mask=inside, other=0.0)  # [BLOCK_M]
                neg_delta = gl.load(f.neg_delta + at, mask=inside, other=0.0)  # [BLOCK_M]
            mbarrier.wait(bars.q_empty.index(s), phase)
            if BY_HAND:
                bufs.lse_log2.index(s).store(lse_log2)
            mbarrier.expect(bars.q_full.index(s), Q_BYTES)
            for i in gl.static_range(f.GATHER):
                if i > 0:
                    idx = gl.load(entry + j * f.GATHER + i)
                _copy_block(
                    f, descs.q, bufs.q.index(s), descs.lse_log2, bufs.lse_log2.index(s),
                    bars.q_full.index(s), b, h, idx, i, f.COLUMNS,
                )  # fmt: skip
            if f.GATHER > 1:
                idx = gl.load(entry + j * f.GATHER)
            mbarrier.wait(bars.dout_empty.index(s), phase)
            if BY_HAND:
                bufs.neg_delta.index(s).store(neg_delta)
            mbarrier.expect(bars.dout_full.index(s), DOUT_BYTES)
            for i in gl.static_range(f.GATHER):
                if i > 0:
                    idx = gl.load(entry + j * f.GATHER + i)
                _copy_block(
                    f, descs.dout, bufs.dout.index(s), descs.neg_delta, bufs.neg_delta.index(s),
                    bars.dout_full.index(s), b, h, idx, i, f.COLUMNS_V,
                )  # fmt: skip
            idx = following
            g += 1
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 1, TILE, WARP)


@gluon.jit
def _copy_block(
    f, desc, place, vector_desc, vector_place, full, b, h, idx, i: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Block i of an entry: its rows of Q or dO, and the vector beside them."""
    BLOCK_Q: gl.constexpr = desc.block_shape[2]
    hg, block = split_index(f, idx)
    head = h * f.group + hg
    row = block * BLOCK_Q
    load_rows(desc, b, head, row, place.slice(i * BLOCK_Q, BLOCK_Q, 2), full, COLUMNS)
    if BLOCK_Q >= 32:
        at = (b * f.kv_heads * f.group + head) * f.n_pad + row
        async_load(vector_desc, [at], full, vector_place.slice(i * BLOCK_Q, BLOCK_Q, 0))


@gluon.jit
def storer(f):
    """Copy dK and dV out of the place of K and V, and hand it back to the producer."""
    bufs, bars, record = f.bufs, f.bars, f.bufs.record
    t = 0
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        bh = read(record, t & 1, BATCH_HEAD, WARP)
        part = read(record, t & 1, PART, WARP)
        mbarrier.arrive(bars.record_empty.index(t & 1), count=1)
        kv = t % f.KV_STAGES
        mbarrier.wait(bars.out_full.index(kv), (t // f.KV_STAGES) & 1)
        if (part < 0) | (not f.SPLIT):
            b = bh // f.kv_heads
            h = bh % f.kv_heads
            store_rows(f.dv_desc, b, h, tile * f.BLOCK_N, bufs.v.index(kv), f.COLUMNS_V)
            store_rows(f.dk_desc, b, h, tile * f.BLOCK_N, bufs.k.index(kv), f.COLUMNS)
            tma.store_wait(0)
        mbarrier.arrive(bars.kv_empty.index(kv), count=1)
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 1, TILE, WARP)


# ------------------------------------------------------------------ operands of the consumers
@gluon.jit
def _again(x, j):
    """x, to the compiler another one in every iteration j >= 0 of a loop: the addresses that derive
    from it do not fill registers over the loop.
    """
    return x + gl.inline_asm_elementwise(
        "shr.s32 $0, $1, 31;", "=r,r", [j], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def operands(f, kv, s, j, CONSUMER: gl.constexpr):
    """Return the operands of a block, in places kv and s of their rings."""
    kv = _again(kv, j)
    k = f.bufs.k.index(kv).reshape([f.BLOCK_N, f.BLOCK_D])
    v = f.bufs.v.index(kv).reshape([f.BLOCK_N, f.BLOCK_DV])
    q = f.bufs.q.index(s).reshape([f.BLOCK_M, f.BLOCK_D])
    dout = f.bufs.dout.index(s).reshape([f.BLOCK_M, f.BLOCK_DV])
    kw = k.slice(CONSUMER * 64, 64, 0)
    vw = v.slice(CONSUMER * 64, 64, 0)
    return Operands(q=q, dout=dout, k=k, kw=kw, vw=vw)


@gluon.jit
def kept_rows(f, place, COLUMNS: gl.constexpr, CONSUMER: gl.constexpr):
    """Return this consumer's rows of K or V in registers; without KEEP_KV an empty tuple."""
    if f.KEEP_KV:
        rows = place.reshape([f.BLOCK_N, place.shape[3]]).slice(CONSUMER * 64, 64, 0)
        return in_registers(rows, COLUMNS, accumulator(f.BLOCK_M))
    else:
        return ()


@gluon.jit
def start_with(kept, a, b, start, COLUMNS: gl.constexpr, ADD: gl.constexpr):
    """`start_scores` of `kept_rows`, or else of the same rows a in shared memory."""
    if len(kept) == 0:
        return start_scores(a, b, start, COLUMNS, ADD)
    else:
        return start_scores_of(kept, b, start, ADD)
