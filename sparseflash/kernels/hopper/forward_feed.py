"""The warps that feed the consumers of the Hopper forward: scheduler, producer and storer."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparseflash.kernels.hopper.common import (
    BATCH,
    BEGIN,
    FIRST_BIT,
    FIRST_IDX,
    HEAD,
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

LATE = gl.constexpr(4)  # blocks before its end at which a tile lets the next one be claimed


@gluon.constexpr_function
def shared_layout(rows, width, dtype):
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


@gluon.jit
def shared_rows(ring, i, WIDTH: gl.constexpr):
    """Place i of the ring that Q and O share, as (64, WIDTH)."""
    LAYOUT: gl.constexpr = shared_layout(64, WIDTH, ring.dtype)
    return ring.index(i)._reinterpret(ring.dtype, [64, WIDTH], LAYOUT)


# ------------------------------------------------------------------ scheduler warp
@gluon.jit
def scheduler(descs, bufs, bars, lists, tensors, shape, MAJOR: gl.constexpr):
    """Claims work, publishes it, and writes the tiles that have nothing to attend to."""
    record = bufs[3]
    record_full, record_go = bars[7], bars[8]
    items_ptr, idx_ptr, bit_ptr, _, n_items, n_long, list_batch, list_heads = lists
    heads, group, n_bh = shape[2], shape[3], shape[4]
    GATHER: gl.constexpr = bufs[1].shape[1] // descs[1].block_shape[2]
    n_work = n_items * n_bh
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
            bh, item = locate(w, n_items, n_long, n_bh, heads, group, list_batch, list_heads)
            item = items_ptr + item * 8
            tile = gl.load(item)
            begin = gl.load(item + 1)
            n = gl.where(tile >= 0, gl.load(item + 2), 0)
            n_partial = gl.load(item + 3)
            part = gl.load(item + 4)
            if n == 0:
                if tile >= 0:
                    _write_empty(descs[3], tensors, shape, bh, tile * MAJOR, MAJOR)
                w = gl.num_programs(0) + claim(tensors[2])
        found = n > 0
        # a ring of four needs no barrier: before Q of tile t is copied, all are done with t - 2
        slot = t & 3
        first_idx = gl.load(idx_ptr + begin.to(gl.int64) * GATHER, mask=found, other=0)
        first_bit = gl.load(bit_ptr + begin, mask=found & (n_partial > 0), other=0)
        write(record, slot, TILE, gl.where(found, tile, -1))
        write(record, slot, BEGIN, begin)
        write(record, slot, N, n)
        write(record, slot, N_PARTIAL, n_partial)
        write(record, slot, PART, part)
        write(record, slot, BATCH, bh // heads)
        write(record, slot, HEAD, bh % heads)
        write(record, slot, FIRST_BIT, first_bit)
        write(record, slot, FIRST_IDX, first_idx)
        mbarrier.arrive(record_full.index(slot), count=1)
        if found:
            mbarrier.wait(record_go, t & 1)  # the producer is near the end of this tile
            w = gl.num_programs(0) + claim(tensors[2])
            t += 1
        else:
            t = -1
    # the last program to run out of work clears the counters for the next launch
    if claim(tensors[2] + 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(tensors[2], 0)
        gl.atomic_xchg(tensors[2] + 1, 0)


@gluon.jit
def _write_empty(o_desc, tensors, shape, bh, row0, MAJOR: gl.constexpr):
    out_ptr, lse_ptr = tensors[0], tensors[1]
    stride_b, stride_h, stride_n = tensors[6], tensors[7], tensors[8]
    n_q, dim_v, heads = shape[0], shape[1], shape[2]
    DV: gl.constexpr = o_desc.block_shape[3]
    LANES: gl.constexpr = DV // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    q = row0 + gl.arange(0, MAJOR, WARP)
    lse = gl.full([MAJOR], float("-inf"), gl.float32, WARP)
    gl.store(lse_ptr + bh.to(gl.int64) * n_q + q, lse, mask=q < n_q)
    origin = out_ptr + (bh // heads).to(gl.int64) * stride_b + (bh % heads).to(gl.int64) * stride_h
    dim = gl.arange(0, DV, gl.SliceLayout(0, L))
    STEP: gl.constexpr = 32 // LANES
    zeros = gl.zeros([STEP, DV], o_desc.dtype, L)
    for r in range(0, MAJOR, STEP):
        row = row0 + r + gl.arange(0, STEP, gl.SliceLayout(1, L))
        inside = (row < n_q)[:, None] & (dim < dim_v)[None, :]
        gl.store(origin + row.to(gl.int64)[:, None] * stride_n + dim[None, :], zeros, mask=inside)


# ------------------------------------------------------------------ producer warp
@gluon.jit
def _indices(p, GATHER: gl.constexpr):
    """The pieces of an entry."""
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
def _kept(pieces, GATHER: gl.constexpr):
    """The same values under new names: the frontend drops `a = b` of loop-carried values."""
    if GATHER == 1:
        return (pieces[0] + 0,)
    elif GATHER == 2:
        return pieces[0] + 0, pieces[1] + 0
    elif GATHER == 4:
        return pieces[0] + 0, pieces[1] + 0, pieces[2] + 0, pieces[3] + 0
    else:
        return (
            pieces[0] + 0, pieces[1] + 0, pieces[2] + 0, pieces[3] + 0,
            pieces[4] + 0, pieces[5] + 0, pieces[6] + 0, pieces[7] + 0,
        )  # fmt: skip


@gluon.jit
def _copy(desc, ring, full, i, b, h, pieces):
    """A tile into place i of its ring."""
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = ring.shape[2]
    PIECE: gl.constexpr = desc.block_shape[2]
    GATHER: gl.constexpr = ROWS // PIECE
    if GATHER == 1:
        place = ring.index(i).reshape([1, 1, ROWS, WIDTH])
        tma.async_copy_global_to_shared(desc, [b, h, pieces[0] * ROWS, 0], full, place)
    else:
        # shared memory holds the columns in panels of at most 128 bytes, each with all rows
        PANEL: gl.constexpr = desc.block_shape[3]
        PANELS: gl.constexpr = WIDTH // PANEL
        view = ring._reinterpret(
            desc.dtype, [STAGES * PANELS * GATHER, 1, 1, PIECE, PANEL], desc.layout
        )
        for panel in gl.static_range(PANELS):
            for p in gl.static_range(GATHER):
                tma.async_copy_global_to_shared(
                    desc, [b, h, pieces[p] * PIECE, panel * PANEL], full,
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
def _copy_v(v_desc, v_s, v_full, v_empty, g, b, h, pieces):
    BYTES: gl.constexpr = v_s.shape[1] * v_s.shape[2] * 2
    i = _free_place(v_s, v_full, v_empty, g, BYTES, 0)
    _copy(v_desc, v_s, v_full.index(i), i, b, h, pieces)


@gluon.jit
def producer(
    descs, bufs, bars, lists, tensors, shape,
    CONSUMERS: gl.constexpr, DRAIN: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Copies K and, a block behind in the order of use, V, and Q of a tile."""
    q_desc, k_desc, v_desc, _ = descs
    q_s, k_s, v_s, record = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, record_full, record_go = bars
    idx_ptr, group = lists[1], shape[3]
    GATHER: gl.constexpr = k_s.shape[1] // k_desc.block_shape[2]
    RING: gl.constexpr = 1 if DRAIN else 2
    D: gl.constexpr = q_desc.block_shape[3]
    K_BYTES: gl.constexpr = k_s.shape[1] * k_s.shape[2] * 2
    V_BYTES: gl.constexpr = v_s.shape[1] * v_s.shape[2] * 2
    t = 0
    g = 0
    v_b = 0
    v_h = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARP)
    pieces = _indices(idx_ptr, GATHER)
    v_pieces = _kept(pieces, GATHER)
    while tile >= 0:
        slot = t & 3
        begin = read(record, slot, BEGIN, WARP)
        n = read(record, slot, N, WARP)
        b = read(record, slot, BATCH, WARP)
        h = read(record, slot, HEAD, WARP)
        entry = idx_ptr + begin.to(gl.int64) * GATHER
        if GATHER == 1:
            pieces = (read(record, slot, FIRST_IDX, WARP),)
        else:
            pieces = _indices(entry, GATHER)
        kv_h = h // group
        late = gl.maximum(n - LATE, 0)
        for j in range(n):
            following = _indices(entry + (j + 1) * GATHER, GATHER)  # lists have spare entries
            if PAIRS:
                i = _free_place(k_s, k_full, k_empty, g, K_BYTES, V_BYTES)
                _copy(k_desc, k_s, k_full.index(i), i, b, kv_h, pieces)
                if g > 0:
                    _copy(v_desc, v_s, k_full.index(i), i, v_b, v_h, v_pieces)
            else:
                i = _free_place(k_s, k_full, k_empty, g, K_BYTES, 0)
                _copy(k_desc, k_s, k_full.index(i), i, b, kv_h, pieces)
                # with DRAIN the last V of a tile comes before the next tile
                if (j if DRAIN else g) > 0:
                    _copy_v(v_desc, v_s, v_full, v_empty, g - 1, v_b, v_h, v_pieces)
            if j == 0:
                ring = t % RING
                mbarrier.wait(q_empty.index(ring), ((t // RING) & 1) ^ 1)
                for c in gl.static_range(CONSUMERS):
                    i = ring * CONSUMERS + c
                    mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
                    row = (tile * CONSUMERS + c) * 64
                    place = shared_rows(q_s, i, D).reshape(q_desc.block_shape)
                    tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], q_full.index(i), place)
            # the next tile is claimed late, so that a long one holds no other back
            mbarrier.arrive(record_go, count=1, pred=j == late)
            v_b = b + 0
            v_h = kv_h + 0
            v_pieces = _kept(pieces, GATHER)
            pieces = _kept(following, GATHER)
            g += 1
        if DRAIN:
            _copy_v(v_desc, v_s, v_full, v_empty, g - 1, v_b, v_h, v_pieces)
        t += 1
        mbarrier.wait(record_full.index(t & 3), (t >> 2) & 1)
        tile = read(record, t & 3, TILE, WARP)
    if not DRAIN:
        if g > 0:
            if PAIRS:
                i = _free_place(k_s, k_full, k_empty, g, V_BYTES, 0)
                _copy(v_desc, v_s, k_full.index(i), i, v_b, v_h, v_pieces)
            else:
                _copy_v(v_desc, v_s, v_full, v_empty, g - 1, v_b, v_h, v_pieces)


# ------------------------------------------------------------------ storer warp
@gluon.jit
def storer(descs, bufs, bars, CONSUMERS: gl.constexpr, DRAIN: gl.constexpr):
    """Copies O out of the place of Q, and hands the place back to the producer."""
    o_desc = descs[3]
    q_s, record = bufs[0], bufs[3]
    q_empty, o_full, record_full = bars[1], bars[6], bars[7]
    RING: gl.constexpr = 1 if DRAIN else 2
    DV: gl.constexpr = o_desc.block_shape[3]
    t = 0
    mbarrier.wait(record_full.index(0), 0)
    tile = read(record, 0, TILE, WARP)
    while tile >= 0:
        slot = t & 3
        b = read(record, slot, BATCH, WARP)
        h = read(record, slot, HEAD, WARP)
        part = read(record, slot, PART, WARP)
        for c in gl.static_range(CONSUMERS):
            i = (t % RING) * CONSUMERS + c
            mbarrier.wait(o_full.index(i), (t // RING) & 1)
            if part < 0:
                place = shared_rows(q_s, i, DV).reshape(o_desc.block_shape)
                row = (tile * CONSUMERS + c) * 64
                tma.async_copy_shared_to_global(o_desc, [b, h, row, 0], place)
        tma.store_wait(0)  # it has read the place
        mbarrier.arrive(q_empty.index(t % RING), count=1)
        t += 1
        mbarrier.wait(record_full.index(t & 3), (t >> 2) & 1)
        tile = read(record, t & 3, TILE, WARP)
