"""The warps that feed the consumers of the Hopper forward: scheduler, producer and storer."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparseflash.kernels.hopper.common import WARP
from sparseflash.kernels.hopper.copies import (
    copied_bytes,
    copies,
    load_rows,
    store_rows,
    tile_layout,
)  # fmt: skip
from sparseflash.kernels.hopper.gluon import async_load, reinterpret
from sparseflash.kernels.hopper.work import (
    BATCH,
    BEGIN,
    FIRST_BIT,
    FIRST_IDX,
    HEAD,
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

LATE = gl.constexpr(4)  # blocks before its end at which a tile lets the next one be claimed


@gluon.jit
def shared_rows(ring, i, desc, WIDTH: gl.constexpr):
    """Place i of the ring that Q and O share, as [64, WIDTH]; desc: of the one in question."""
    PARTS: gl.constexpr = ring.shape[2] // WIDTH  # of a place: two views must have equal sizes
    LAYOUT: gl.constexpr = tile_layout(desc.layout)
    parts = reinterpret(ring, ring.dtype, [ring.shape[0] * PARTS, 64, WIDTH], LAYOUT)
    return parts.index(i * PARTS)


@gluon.jit
def head_and_row(f, h, tile, CONSUMER: gl.constexpr):
    """First query head and first query of a consumer; h: the first head of the tile."""
    ROW: gl.constexpr = CONSUMER // f.HEADS  # of 64 queries
    if f.PACK > 1:
        return h + CONSUMER * f.PACK, tile * f.BLOCK_M
    else:
        return h + CONSUMER % f.HEADS, (tile * (f.CONSUMERS // f.HEADS) + ROW) * 64


# ------------------------------------------------------------------ scheduler warp
@gluon.jit
def scheduler(f):
    """Claims work, publishes it, and writes the tiles that have nothing to attend to."""
    record = f.bufs.record
    GATHER: gl.constexpr = f.BLOCK_N // f.descs.k.block_shape[2]
    n_work = f.n_items * f.n_bh
    w = gl.program_id(0)  # the first item needs no atomic
    t = 0
    while t >= 0:
        tile = -1
        begin = 0
        n = 0
        n_partial = 0
        part = -1
        bh = 0
        while (w < n_work) & (n == 0):
            pair, item = locate(f, w, f.heads // f.HEADS, f.together)
            bh = pair * f.HEADS  # the first of the heads that share the tile
            tile = gl.load(item + TILE)
            begin = gl.load(item + BEGIN)
            n = gl.where(tile >= 0, gl.load(item + N_ENTRIES), 0)
            n_partial = gl.load(item + N_PARTIAL)
            part = gl.load(item + PART)
            if n == 0:
                if tile >= 0:
                    for c in gl.static_range(f.HEADS):
                        _write_empty(f, bh + c, tile * f.BLOCK_M)
                w = gl.num_programs(0) + claim(f.counter)
        found = n > 0
        # a ring of four needs no barrier: before Q of tile t is copied, all are done with t - 2
        slot = t & 3
        first_idx = gl.load(f.idx + begin.to(gl.int64) * GATHER, mask=found, other=0)
        first_bit = gl.load(f.bit + begin, mask=found & (n_partial > 0), other=0)
        write(record, slot, TILE, gl.where(found, tile, -1))
        write(record, slot, BEGIN, begin)
        write(record, slot, N_ENTRIES, n)
        write(record, slot, N_PARTIAL, n_partial)
        write(record, slot, PART, part)
        write(record, slot, BATCH, bh // f.heads)
        write(record, slot, HEAD, bh % f.heads)
        write(record, slot, FIRST_BIT, first_bit)
        write(record, slot, FIRST_IDX, first_idx)
        mbarrier.arrive(f.bars.record_full.index(slot), count=1)
        if found:
            mbarrier.wait(f.bars.record_go, t & 1)  # the producer is near the end of this tile
            w = gl.num_programs(0) + claim(f.counter)
            t += 1
        else:
            t = -1
    # the last program to run out of work clears the counters for the next launch
    if claim(f.counter + 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(f.counter, 0)
        gl.atomic_xchg(f.counter + 1, 0)


@gluon.jit
def _write_empty(f, bh, row0):
    """Out 0, LSE -inf, or those of the sink, and maxima -inf for the queries row0.. of a tile."""
    LANES: gl.constexpr = f.BLOCK_DV // 8  # a lane writes 8 columns
    STEP: gl.constexpr = 32 // LANES  # rows at a time
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [STEP, LANES], [1, 1], [1, 0])
    PIECE: gl.constexpr = f.BLOCK_M & -f.BLOCK_M  # a power of two, as shapes have to be
    nothing = gl.full([PIECE], float("-inf"), gl.float32, WARP)
    lse = nothing
    out = 0.0
    if f.sink is not None:
        sink = gl.load(f.sink + bh % f.heads)
        lse = gl.full([PIECE], 0.0, gl.float32, WARP) + sink
        out = gl.where(sink == sink, 0.0, sink)
    for r in gl.static_range(0, f.BLOCK_M, PIECE):
        q = row0 + r + gl.arange(0, PIECE, WARP)
        gl.store(f.lse + bh.to(gl.int64) * f.n_q + q, lse, mask=q < f.n_q)
        if f.max_scores is not None:
            gl.store(f.max_scores + bh.to(gl.int64) * f.n_q + q, nothing, mask=q < f.n_q)
    b = (bh // f.heads).to(gl.int64)
    h = (bh % f.heads).to(gl.int64)
    origin = f.out + b * f.stride_b + h * f.stride_h
    dim = gl.arange(0, f.BLOCK_DV, gl.SliceLayout(0, LAYOUT))
    values = gl.full([STEP, f.BLOCK_DV], out, f.descs.out.dtype, LAYOUT)
    for r in range(0, f.BLOCK_M, STEP):
        row = row0 + r + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
        inside = (row < f.n_q)[:, None] & (dim < f.dim_v)[None, :]
        to = origin + row.to(gl.int64)[:, None] * f.stride_n + dim[None, :]
        gl.store(to, values, mask=inside)  # [STEP, BLOCK_DV]


# ------------------------------------------------------------------ producer warp
@gluon.jit
def _blocks(p, GATHER: gl.constexpr):
    """Return the mask blocks of an entry."""
    if GATHER == 1:
        return (gl.load(p),)
    elif GATHER == 2:
        return gl.load(p), gl.load(p + 1)
    elif GATHER == 4:
        return gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3)
    else:
        return (
            gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3),
            gl.load(p + 4), gl.load(p + 5), gl.load(p + 6), gl.load(p + 7),
        )  # fmt: skip


@gluon.jit
def _kept(blocks, GATHER: gl.constexpr):
    """Return the same values under new names: the frontend drops `a = b` of loop-carried values."""
    if GATHER == 1:
        return (blocks[0] + 0,)
    elif GATHER == 2:
        return blocks[0] + 0, blocks[1] + 0
    elif GATHER == 4:
        return blocks[0] + 0, blocks[1] + 0, blocks[2] + 0, blocks[3] + 0
    else:
        return (
            blocks[0] + 0, blocks[1] + 0, blocks[2] + 0, blocks[3] + 0,
            blocks[4] + 0, blocks[5] + 0, blocks[6] + 0, blocks[7] + 0,
        )  # fmt: skip


@gluon.jit
def _copy(desc, ring, full, i, b, h, blocks, COLUMNS: gl.constexpr):
    """Copy the mask blocks of an entry, as one tile [ROWS, WIDTH], into place i of a ring."""
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = ring.shape[2]
    BLOCK: gl.constexpr = desc.block_shape[2]
    GATHER: gl.constexpr = ROWS // BLOCK
    if GATHER == 1:
        place = ring.index(i).reshape([1, 1, ROWS, WIDTH])
        load_rows(desc, b, h, blocks[0] * ROWS, place, full, COLUMNS)
    else:
        PANEL: gl.constexpr = desc.block_shape[3]
        PANELS: gl.constexpr = WIDTH // PANEL
        view = reinterpret(
            ring, desc.dtype, [STAGES * PANELS * GATHER, 1, 1, BLOCK, PANEL], desc.layout
        )
        for panel in gl.static_range(copies(desc.block_type, COLUMNS)):
            for p in gl.static_range(GATHER):
                async_load(
                    desc, [b, h, blocks[p] * BLOCK, panel * PANEL], full,
                    view.index((i * PANELS + panel) * GATHER + p),
                )  # fmt: skip


@gluon.jit
def _free_place(ring, full, empty, g, BYTES: gl.constexpr, MORE: gl.constexpr):
    """Place of tile g in a ring, once it is free; announces BYTES, from the second tile on MORE."""
    STAGES: gl.constexpr = ring.shape[0]
    i = g % STAGES
    mbarrier.wait(empty.index(i), ((g // STAGES) & 1) ^ 1)
    if MORE == 0:
        mbarrier.expect(full.index(i), BYTES)
    else:
        mbarrier.expect(full.index(i), BYTES, pred=g == 0)
        mbarrier.expect(full.index(i), BYTES + MORE, pred=g > 0)
    return i


@gluon.jit
def _copy_v(f, g, b, h, blocks):
    GATHER: gl.constexpr = f.BLOCK_N // f.descs.v.block_shape[2]
    BYTES: gl.constexpr = GATHER * copied_bytes(f.descs.v.block_type, f.COLUMNS_V)
    i = _free_place(f.bufs.v, f.bars.v_full, f.bars.v_empty, g, BYTES, 0)
    _copy(f.descs.v, f.bufs.v, f.bars.v_full.index(i), i, b, h, blocks, f.COLUMNS_V)


@gluon.jit
def producer(f):
    """Copy K and, a block behind in the order of use, V, and Q of a tile."""
    bufs, bars, record = f.bufs, f.bars, f.bufs.record
    GATHER: gl.constexpr = f.BLOCK_N // f.descs.k.block_shape[2]
    CONSUMERS: gl.constexpr = f.CONSUMERS
    DRAIN: gl.constexpr = f.DRAIN
    K_BYTES: gl.constexpr = GATHER * copied_bytes(f.descs.k.block_type, f.COLUMNS)
    V_BYTES: gl.constexpr = GATHER * copied_bytes(f.descs.v.block_type, f.COLUMNS_V)
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    v_b = 0
    v_h = 0
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARP)
    blocks = _blocks(f.idx, GATHER)
    v_blocks = _kept(blocks, GATHER)
    while tile >= 0:
        slot = t & 3
        begin = read(record, slot, BEGIN, WARP)
        n = read(record, slot, N_ENTRIES, WARP)
        b = read(record, slot, BATCH, WARP)
        h = read(record, slot, HEAD, WARP)
        entry = f.idx + begin.to(gl.int64) * GATHER
        if GATHER == 1:
            blocks = (read(record, slot, FIRST_IDX, WARP),)
        else:
            blocks = _blocks(entry, GATHER)
        kv_h = h // f.group
        late = gl.maximum(n - LATE, 0)
        for j in range(n):
            following = _blocks(entry + (j + 1) * GATHER, GATHER)  # lists have spare entries
            if f.PAIRS:
                i = _free_place(bufs.k, bars.k_full, bars.k_empty, g, K_BYTES, V_BYTES)
                _copy(f.descs.k, bufs.k, bars.k_full.index(i), i, b, kv_h, blocks, f.COLUMNS)
                if g > 0:
                    _copy(
                        f.descs.v, bufs.v, bars.k_full.index(i), i, v_b, v_h, v_blocks, f.COLUMNS_V
                    )
            else:
                i = _free_place(bufs.k, bars.k_full, bars.k_empty, g, K_BYTES, 0)
                _copy(f.descs.k, bufs.k, bars.k_full.index(i), i, b, kv_h, blocks, f.COLUMNS)
                # with DRAIN the last V of a tile comes before the next tile
                if (j if DRAIN else g) > 0:
                    _copy_v(f, g - 1, v_b, v_h, v_blocks)
            if j == 0:
                ring = t % f.Q_STAGES
                mbarrier.wait(bars.q_empty.index(ring), ((t // f.Q_STAGES) & 1) ^ 1)
                for c in gl.static_range(CONSUMERS):
                    i = ring * CONSUMERS + c
                    full = bars.q_full.index(i)
                    mbarrier.expect(full, copied_bytes(f.descs.q.block_type, f.COLUMNS))
                    head, row = head_and_row(f, h, tile, c)
                    place = shared_rows(bufs.q, i, f.descs.q, f.BLOCK_D).reshape(
                        [1, f.PACK, 64 // f.PACK, f.BLOCK_D]
                    )
                    load_rows(f.descs.q, b, head, row, place, full, f.COLUMNS)
            # the next tile is claimed late, so that a long one holds no other back
            mbarrier.arrive(bars.record_go, count=1, pred=j == late)
            v_b = b + 0
            v_h = kv_h + 0
            v_blocks = _kept(blocks, GATHER)
            blocks = _kept(following, GATHER)
            g += 1
        if DRAIN:
            _copy_v(f, g - 1, v_b, v_h, v_blocks)
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 3, TILE, WARP)
    if not DRAIN:
        if g > 0:
            if f.PAIRS:
                i = _free_place(bufs.k, bars.k_full, bars.k_empty, g, V_BYTES, 0)
                _copy(f.descs.v, bufs.v, bars.k_full.index(i), i, v_b, v_h, v_blocks, f.COLUMNS_V)
            else:
                _copy_v(f, g - 1, v_b, v_h, v_blocks)


# ------------------------------------------------------------------ storer warp
@gluon.jit
def storer(f):
    """Copy O out of the place of Q, and hand the place back to the producer."""
    bars, record = f.bars, f.bufs.record
    CONSUMERS: gl.constexpr = f.CONSUMERS
    t = 0
    wait_record(bars.record_full, 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        slot = t & 3
        b = read(record, slot, BATCH, WARP)
        h = read(record, slot, HEAD, WARP)
        part = read(record, slot, PART, WARP)
        for c in gl.static_range(CONSUMERS):
            i = (t % f.Q_STAGES) * CONSUMERS + c
            mbarrier.wait(bars.out_full.index(i), (t // f.Q_STAGES) & 1)
            if part < 0:
                place = shared_rows(f.bufs.q, i, f.descs.out, f.BLOCK_DV).reshape(
                    [1, f.PACK, 64 // f.PACK, f.BLOCK_DV]
                )
                head, row = head_and_row(f, h, tile, c)
                store_rows(f.descs.out, b, head, row, place, f.COLUMNS_V)
        tma.store_wait(0)  # it has read the place
        mbarrier.arrive(bars.q_empty.index(t % f.Q_STAGES), count=1)
        t += 1
        wait_record(bars.record_full, t)
        tile = read(record, t & 3, TILE, WARP)
