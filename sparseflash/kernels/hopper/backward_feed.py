"""What comes and goes beside the products of the pass over columns: the warp that copies tiles in,
and the one that copies dK and dV out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparseflash.kernels.hopper.common import BEGIN, BH, PART, TILE, WARP, N, read


@gluon.jit
def split_index(idx, n_blocks, GROUPED: gl.constexpr):
    """Head in the group and block of queries of a list entry."""
    if GROUPED:
        return idx // n_blocks, idx % n_blocks
    else:
        return idx * 0, idx


@gluon.jit
def producer(descs, bufs, bars, ptrs, shape, n_bh, STAGES: gl.constexpr, KV: gl.constexpr,
              GATHER: gl.constexpr, GROUPED: gl.constexpr, LATE: gl.constexpr):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    q_s, do_s, k_s, v_s, _, lse_s, delta_s, record = bufs
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars[:6]
    record_full, record_empty, record_go = bars[8:]
    idx_ptr, start_ptr, delta_ptr = ptrs
    kv_heads, group, n_pad, n_blocks, _ = shape
    BM: gl.constexpr = GATHER * q_desc.block_shape[2]
    BN: gl.constexpr = k_desc.block_shape[2]
    PIECE: gl.constexpr = q_desc.block_shape[2]
    # the copies of vectors want 128-byte places, so shorter ones are brought by this warp itself
    BY_HAND: gl.constexpr = PIECE < 32
    VECTOR_BYTES: gl.constexpr = 0 if BY_HAND else lse_desc.block_type.nbytes
    Q_BYTES: gl.constexpr = GATHER * (q_desc.block_type.nbytes + VECTOR_BYTES)
    DO_BYTES: gl.constexpr = GATHER * (do_desc.block_type.nbytes + VECTOR_BYTES)
    n_rows = n_bh * group * n_pad
    t = 0
    g = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        slot = t & 1
        begin = read(record, slot, BEGIN, WARP)
        n = read(record, slot, N, WARP)
        bh = read(record, slot, BH, WARP)
        mbarrier.arrive(record_empty.index(slot), count=1)
        b = bh // kv_heads
        h = bh % kv_heads
        entry = idx_ptr + begin.to(gl.int64) * GATHER
        idx = gl.load(entry)
        kv = t % KV
        mbarrier.wait(kv_empty.index(kv), ((t // KV) & 1) ^ 1)
        mbarrier.expect(kv_full.index(kv), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [b, h, tile * BN, 0], kv_full.index(kv), k_s.index(kv)
        )
        tma.async_copy_global_to_shared(
            v_desc, [b, h, tile * BN, 0], kv_full.index(kv), v_s.index(kv)
        )
        # the next tile is claimed late, so that a long one holds no other back
        mbarrier.arrive(record_go, count=1, pred=n == 0)
        late = gl.maximum(n - LATE, 0)
        for j in range(n):
            nxt = gl.load(entry + (j + 1) * GATHER)
            mbarrier.arrive(record_go, count=1, pred=j == late)
            s = g % STAGES
            phase = ((g // STAGES) & 1) ^ 1
            if BY_HAND:
                column = gl.arange(0, BM, WARP)
                hg, block = split_index(
                    gl.load(entry + j * GATHER + column // PIECE), n_blocks, GROUPED
                )
                at = (b * kv_heads * group + h * group + hg) * n_pad + block * PIECE
                at += column % PIECE
                inside = at < n_rows
                start = gl.load(start_ptr + at, mask=inside, other=0.0)
                delta = gl.load(delta_ptr + at, mask=inside, other=0.0)
            mbarrier.wait(q_empty.index(s), phase)
            if BY_HAND:
                lse_s.index(s).store(start)
            mbarrier.expect(q_full.index(s), Q_BYTES)
            for i in gl.static_range(GATHER):
                if i > 0:
                    idx = gl.load(entry + j * GATHER + i)
                hg, block = split_index(idx, n_blocks, GROUPED)
                head = h * group + hg
                row = block * PIECE
                tma.async_copy_global_to_shared(
                    q_desc, [b, head, row, 0], q_full.index(s),
                    q_s.index(s).slice(i * PIECE, PIECE, 2),
                )  # fmt: skip
                if not BY_HAND:
                    tma.async_copy_global_to_shared(
                        lse_desc, [(b * kv_heads * group + head) * n_pad + row], q_full.index(s),
                        lse_s.index(s).slice(i * PIECE, PIECE, 0),
                    )  # fmt: skip
            if GATHER > 1:
                idx = gl.load(entry + j * GATHER)
            mbarrier.wait(do_empty.index(s), phase)
            if BY_HAND:
                delta_s.index(s).store(delta)
            mbarrier.expect(do_full.index(s), DO_BYTES)
            for i in gl.static_range(GATHER):
                if i > 0:
                    idx = gl.load(entry + j * GATHER + i)
                hg, block = split_index(idx, n_blocks, GROUPED)
                head = h * group + hg
                row = block * PIECE
                tma.async_copy_global_to_shared(
                    do_desc, [b, head, row, 0], do_full.index(s),
                    do_s.index(s).slice(i * PIECE, PIECE, 2),
                )  # fmt: skip
                if not BY_HAND:
                    tma.async_copy_global_to_shared(
                        delta_desc, [(b * kv_heads * group + head) * n_pad + row], do_full.index(s),
                        delta_s.index(s).slice(i * PIECE, PIECE, 0),
                    )  # fmt: skip
            idx = nxt
            g += 1
        t += 1
        mbarrier.wait(record_full.index(t & 1), (t >> 1) & 1)
        tile = read(record, t & 1, TILE, WARP)


@gluon.jit
def storer(descs, bufs, bars, shape, KV: gl.constexpr, SPLIT: gl.constexpr):
    dk_desc, dv_desc = descs
    k_s, v_s, record = bufs[2], bufs[3], bufs[7]
    kv_empty, out_full, record_full, record_empty = bars[1], bars[7], bars[8], bars[9]
    kv_heads = shape[0]
    BN: gl.constexpr = dk_desc.block_shape[2]
    t = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        bh = read(record, t & 1, BH, WARP)
        part = read(record, t & 1, PART, WARP)
        mbarrier.arrive(record_empty.index(t & 1), count=1)
        kv = t % KV
        mbarrier.wait(out_full.index(kv), (t // KV) & 1)
        if (part < 0) | (not SPLIT):
            at = [bh // kv_heads, bh % kv_heads, tile * BN, 0]
            tma.async_copy_shared_to_global(dv_desc, at, v_s.index(kv))
            tma.async_copy_shared_to_global(dk_desc, at, k_s.index(kv))
            tma.store_wait(0)
        mbarrier.arrive(kv_empty.index(kv), count=1)
        t += 1
        mbarrier.wait(record_full.index(t & 1), (t >> 1) & 1)
        tile = read(record, t & 1, TILE, WARP)
