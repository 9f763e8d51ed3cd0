"""The arguments, the scheduler and the producer warp of the fp8 forward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from sparseflash.kernels.gluon import async_load
from sparseflash.kernels.hopper.common import WARP, fields, wait_empty
from sparseflash.kernels.hopper.work import (
    BATCH_HEAD,
    BEGIN,
    FIRST_BIT,
    FIRST_IDX,
    N_ENTRIES,
    N_PARTIAL,
    PART,
    TILE,
    claim,
    locate,
    read,
    wait_record,
    write,
)  # fmt: skip


@fields
class Descriptors:
    """For TMA; q, k and out of (B, H, N, D), v of (B, H, D_v, N)."""

    q: tensor_descriptor
    k: tensor_descriptor
    v: tensor_descriptor
    out: tensor_descriptor


@fields
class Buffers:
    """Shared memory."""

    q: gl.shared_memory_descriptor  # [4, 1, 1, 64, BLOCK_D]: two tiles of two consumers
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, 128, BLOCK_D]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_DV, 128]
    out: gl.shared_memory_descriptor  # [2, 1, 1, 64, BLOCK_DV]
    record: gl.shared_memory_descriptor  # [2 * RECORD, 1]: the work to do
    sums: gl.shared_memory_descriptor  # float32 [2, 64, BLOCK_DV]: sums of P V


@fields
class Barriers:
    """A place is full once its copy has arrived, and empty once it has been read."""

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor  # of K of a block and V of the one before
    record_full: gl.shared_memory_descriptor
    record_empty: gl.shared_memory_descriptor
    record_go: gl.shared_memory_descriptor  # the next tile may be claimed


@fields
class Fp8Forward:
    descs: Descriptors
    bufs: Buffers
    bars: Barriers
    # the tile lists; see sparseflash/tiles
    items: gl.tensor  # int32 (list_batch * list_heads * n_items, 8): TILE to PART of a tile
    idx: gl.tensor  # int32: the mask blocks of an entry
    bit: gl.tensor  # int32: the bit tile of an entry
    bits: gl.tensor  # int32: bit tiles
    n_items: gl.tensor  # of a batch x head
    n_long: gl.tensor  # of these, the ones that run before all others
    list_batch: gl.tensor  # 1: all batch entries have the same lists
    list_heads: gl.tensor  # likewise
    # tensors, and what describes them
    q_scale: gl.tensor  # float32 (B * H, blocks)
    k_table: gl.tensor  # float32 (B * H_kv, blocks, 2): scale of K, log2 of what P is scaled by
    scale_log2: gl.tensor
    lse: gl.tensor  # float32 (B * H, N_q)
    out_scale: gl.tensor  # float32 (B * H_kv)
    part_out: gl.tensor  # float32 (B * H, n_parts, 128, BLOCK_DV)
    part_lse: gl.tensor  # float32 (B * H, n_parts, 128)
    n_parts: gl.tensor
    n_q: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads to a key head
    n_bh: gl.tensor
    counter: gl.tensor  # int32: tiles claimed
    out: gl.tensor  # (B, H, N_q, D_v), contiguous
    dim_v: gl.tensor
    # what the kernel is compiled for
    BLOCK_D: gl.constexpr  # head dims, padded
    BLOCK_DV: gl.constexpr
    STAGES: gl.constexpr
    PARTIAL: gl.constexpr  # there are partial blocks
    SPLIT: gl.constexpr  # some tiles are split along the keys


@gluon.jit
def scheduler(f):
    """One warp: claims work, publishes it, and writes the tiles that have nothing to attend to."""
    record = f.bufs.record
    n_work = f.n_items * f.n_bh
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
            bh, item = locate(f, w, f.heads, f.group)
            tile = gl.load(item + TILE)
            begin = gl.load(item + BEGIN)
            n = gl.where(tile >= 0, gl.load(item + N_ENTRIES), 0)
            n_partial = gl.load(item + N_PARTIAL)
            part = gl.load(item + PART)
            if n == 0:
                if tile >= 0:
                    _write_empty(f, bh, tile)
                w = gl.num_programs(0) + claim(f.counter)
        found = n > 0
        slot = t & 1
        mbarrier.wait(f.bars.record_empty.index(slot), ((t >> 1) & 1) ^ 1)
        write(record, slot, TILE, gl.where(found, tile, -1))
        write(record, slot, BEGIN, begin)
        write(record, slot, N_PARTIAL, n_partial)
        write(record, slot, N_ENTRIES, n)
        write(record, slot, BATCH_HEAD, bh)
        write(record, slot, PART, part)
        write(record, slot, FIRST_IDX, gl.load(f.idx + begin, mask=found, other=0))
        first_bit = gl.load(f.bit + begin, mask=found & (n_partial > 0), other=0)
        write(record, slot, FIRST_BIT, first_bit)
        mbarrier.arrive(f.bars.record_full.index(slot), count=1)
        if found:
            mbarrier.wait(f.bars.record_go, t & 1)  # the producer is near the end of this tile
            w = gl.num_programs(0) + claim(f.counter)
            t += 1
        else:
            t = -1


@gluon.jit
def _write_empty(f, bh, tile):
    """Out 0 and LSE -inf for the queries of a tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    q = tile * 128 + gl.arange(0, 128, ROWS)
    lse = gl.full([128], float("-inf"), gl.float32, ROWS)
    gl.store(f.lse + bh.to(gl.int64) * f.n_q + q, lse, mask=q < f.n_q)
    dim = gl.arange(0, f.BLOCK_DV, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([16, f.BLOCK_DV], gl.bfloat16, LAYOUT)
    for r in range(0, 128, 16):
        row = tile * 128 + r + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        to = f.out + (bh.to(gl.int64) * f.n_q + row[:, None]) * f.dim_v + dim[None, :]
        gl.store(to, zeros, mask=(row < f.n_q)[:, None] & (dim < f.dim_v)[None, :])


@gluon.jit
def producer(f):
    """One warp: copies Q of a tile, then its K and, a block behind in the order of use, its V."""
    descs, bufs, bars, record = f.descs, f.bufs, f.bars, f.bufs.record
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    v_col = 0
    v_b = 0
    v_h = 0
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        slot = t & 1
        begin = read(record, slot, BEGIN, WARP)
        n = read(record, slot, N_ENTRIES, WARP)
        bh = read(record, slot, BATCH_HEAD, WARP)
        block = read(record, slot, FIRST_IDX, WARP)
        b = bh // f.heads
        h = bh % f.heads
        mbarrier.wait(bars.q_empty.index(slot), ((t >> 1) & 1) ^ 1)
        for c in gl.static_range(2):
            full = bars.q_full.index(slot * 2 + c)
            mbarrier.expect(full, descs.q.block_type.nbytes)
            async_load(descs.q, [b, h, tile * 128 + c * 64, 0], full, bufs.q.index(slot * 2 + c))
        h = h // f.group
        late = gl.maximum(n - 4, 0)
        for j in range(n):
            block_next = gl.load(f.idx + begin + j + 1)
            # the next tile is claimed late, so that a long one holds no other back
            mbarrier.arrive(bars.record_go, count=1, pred=j == late)
            i = g % f.STAGES
            wait_empty(bars.empty, g)  # also of V of block g - 1
            mbarrier.expect(bars.k_full.index(i), descs.k.block_type.nbytes)
            async_load(descs.k, [b, h, block * 128, 0], bars.k_full.index(i), bufs.k.index(i))
            _copy_v(f, g - 1, v_b, v_h, v_col)
            v_b = b
            v_h = h
            v_col = block * 128
            block = block_next
            g += 1
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 1, TILE, WARP)
    wait_empty(bars.empty, g)
    _copy_v(f, g - 1, v_b, v_h, v_col)


@gluon.jit
def _copy_v(f, g, b, h, col):
    if g >= 0:
        i = g % f.STAGES
        full = f.bars.v_full.index(i)
        mbarrier.expect(full, f.descs.v.block_type.nbytes)
        async_load(f.descs.v, [b, h, 0, col], full, f.bufs.v.index(i))
