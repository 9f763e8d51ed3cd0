"""The scheduler and the producer warp of the fp8 forward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparseflash.kernels.hopper.common import (
    BEGIN,
    BH,
    FIRST_BIT,
    FIRST_IDX,
    N_PARTIAL,
    PART,
    TILE,
    WARP,
    N,
    claim,
    locate,
    read,
    write,
)  # fmt: skip


@gluon.jit
def scheduler(bufs, bars, lists, shape, counter_ptr, out_ptr, lse_ptr, dim_v, DV: gl.constexpr):
    """One warp: claims work, publishes it, and writes the tiles that have nothing to attend to."""
    record = bufs[4]
    record_full, record_empty, record_go = bars[5], bars[6], bars[7]
    items_ptr, idx_ptr, bit_ptr, _, n_items, n_long, list_batch, list_heads = lists
    n_q, heads, group, n_bh = shape
    n_work = n_items * n_bh
    w = gl.program_id(0)
    t = 0
    while t >= 0:
        tile = -1
        n = 0
        begin = 0
        n_partial = 0
        bh = 0
        part = -1
        while (w < n_work) & (n == 0):
            bh, item = locate(w, n_items, n_long, n_bh, heads, group, list_batch, list_heads)
            item = items_ptr + item * 8
            tile = gl.load(item)
            begin = gl.load(item + 1)
            n = gl.where(tile >= 0, gl.load(item + 2), 0)
            n_partial = gl.load(item + 3)
            part = gl.load(item + 4)
            if n == 0:
                if tile >= 0:
                    _write_empty(out_ptr, lse_ptr, bh, tile, n_q, dim_v, DV)
                w = gl.num_programs(0) + claim(counter_ptr)
        found = n > 0
        slot = t & 1
        mbarrier.wait(record_empty.index(slot), ((t >> 1) & 1) ^ 1)
        write(record, slot, TILE, gl.where(found, tile, -1))
        write(record, slot, BEGIN, begin)
        write(record, slot, N_PARTIAL, n_partial)
        write(record, slot, N, n)
        write(record, slot, BH, bh)
        write(record, slot, PART, part)
        write(record, slot, FIRST_IDX, gl.load(idx_ptr + begin, mask=found, other=0))
        write(
            record, slot, FIRST_BIT, gl.load(bit_ptr + begin, mask=found & (n_partial > 0), other=0)
        )
        mbarrier.arrive(record_full.index(slot), count=1)
        if found:
            mbarrier.wait(record_go, t & 1)  # the producer is near the end of this tile
            w = gl.num_programs(0) + claim(counter_ptr)
            t += 1
        else:
            t = -1


@gluon.jit
def _write_empty(out_ptr, lse_ptr, bh, tile, n_q, dim_v, DV: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    q = tile * 128 + gl.arange(0, 128, L1)
    lse = gl.full([128], float("-inf"), gl.float32, L1)
    gl.store(lse_ptr + bh.to(gl.int64) * n_q + q, lse, mask=q < n_q)
    dim = gl.arange(0, DV, gl.SliceLayout(0, L))
    zeros = gl.zeros([16, DV], gl.bfloat16, L)
    for r in range(0, 128, 16):
        row = tile * 128 + r + gl.arange(0, 16, gl.SliceLayout(1, L))
        p = out_ptr + (bh.to(gl.int64) * n_q + row[:, None]) * dim_v + dim[None, :]
        gl.store(p, zeros, mask=(row < n_q)[:, None] & (dim < dim_v)[None, :])


@gluon.jit
def producer(descs, bufs, bars, lists, shape):
    """One warp: copies Q of a tile, then its K and, a block behind in the order of use, its V."""
    q_desc, k_desc, v_desc, _ = descs
    q_s, k_s, v_s, _, record, _ = bufs
    q_full, q_empty, k_full, v_full, empty, record_full, _, record_go = bars
    idx_ptr = lists[1]
    heads, group = shape[1], shape[2]
    STAGES: gl.constexpr = k_s.shape[0]
    t = 0
    g = 0
    v_col = 0
    v_b = 0
    v_h = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        slot = t & 1
        begin = read(record, slot, BEGIN, WARP)
        n = read(record, slot, N, WARP)
        bh = read(record, slot, BH, WARP)
        block = read(record, slot, FIRST_IDX, WARP)
        b = bh // heads
        h = bh % heads
        mbarrier.wait(q_empty.index(slot), ((t >> 1) & 1) ^ 1)
        for c in gl.static_range(2):
            mbarrier.expect(q_full.index(slot * 2 + c), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [b, h, tile * 128 + c * 64, 0],
                q_full.index(slot * 2 + c), q_s.index(slot * 2 + c),
            )  # fmt: skip
        h = h // group
        late = gl.maximum(n - 4, 0)
        for j in range(n):
            block_next = gl.load(idx_ptr + begin + j + 1)
            # the next tile is claimed late, so that a long one holds no other back
            mbarrier.arrive(record_go, count=1, pred=j == late)
            i = g % STAGES
            mbarrier.wait(empty.index(i), ((g // STAGES) & 1) ^ 1)  # also of V of block g - 1
            mbarrier.expect(k_full.index(i), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [b, h, block * 128, 0], k_full.index(i), k_s.index(i)
            )
            _copy_v(v_desc, v_s, v_full, g - 1, v_b, v_h, v_col)
            v_b = b
            v_h = h
            v_col = block * 128
            block = block_next
            g += 1
        t += 1
        mbarrier.wait(record_full.index(t & 1), (t >> 1) & 1)
        tile = read(record, t & 1, TILE, WARP)
    mbarrier.wait(empty.index(g % STAGES), ((g // STAGES) & 1) ^ 1)
    _copy_v(v_desc, v_s, v_full, g - 1, v_b, v_h, v_col)


@gluon.jit
def _copy_v(v_desc, v_s, v_full, g, b, h, col):
    if g >= 0:
        i = g % v_s.shape[0]
        mbarrier.expect(v_full.index(i), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [b, h, 0, col], v_full.index(i), v_s.index(i))
