"""A tile of keys, as a consumer of the pass over columns sees it, and the loop over tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparseflash.kernels.common.dropout import head_keys
from sparseflash.kernels.hopper.backward.feed import split_index
from sparseflash.kernels.hopper.columns import store_part, store_shared
from sparseflash.kernels.hopper.common import WARPGROUP, fields
from sparseflash.kernels.hopper.dropout import tile_hash
from sparseflash.kernels.hopper.masking import words_below
from sparseflash.kernels.hopper.work import (
    BATCH_HEAD,
    BEGIN,
    FIRST_BIT,
    N_ENTRIES,
    N_PARTIAL,
    PART,
    TILE,
    read,
    wait_record,
)  # fmt: skip


@fields
class Tile:
    """64 keys of a tile, and where its list lies."""

    kv: gl.tensor  # its place in the rings of K and V
    begin: gl.tensor  # its first entry
    n: gl.tensor  # how many
    n_partial: gl.tensor
    bit: gl.tensor  # bit tile of the first entry
    part: gl.tensor  # -1: it is not split
    entry: gl.tensor  # pointer to the blocks of the first entry
    bh: gl.tensor  # batch x key head
    k_start: gl.tensor  # the first of these keys
    limit: gl.tensor  # how many of them exist
    row0: gl.tensor  # in dQ: the first row of (b, first head of the group)
    row_head: gl.tensor  # keys of dropout, where a tile has one head
    column_head: gl.tensor


@gluon.jit
def over_tiles(f, ON_TILE: gl.constexpr, CONSUMER: gl.constexpr):
    """Run ON_TILE(f, tile, g, CONSUMER) for each tile of this program, once K and V are there. It
    leaves its gradients in their place, and returns g, the blocks so far.
    """
    bars, record = f.bars, f.bufs.record
    t = 0  # tiles
    g = 0  # blocks, over all tiles
    wait_record(bars.record_full, 0)
    index = read(record, 0, TILE, WARPGROUP)
    while index >= 0:
        tile = _open_tile(f, t, index, CONSUMER * 64 % f.BLOCK_N)
        mbarrier.wait(bars.kv_full.index(tile.kv), (t // f.KV_STAGES) & 1)
        g = ON_TILE(f, tile, g, CONSUMER)
        fence_async_shared()
        mbarrier.arrive(bars.out_full.index(tile.kv), count=1)
        t += 1
        wait_record(bars.record_full, t)
        index = read(record, t & 1, TILE, WARPGROUP)


@gluon.jit
def _open_tile(f, t, tile, KEYS: gl.constexpr):
    """Tile t of this program, which the record names; KEYS: the first of it that are meant."""
    record = f.bufs.record
    begin = read(record, t & 1, BEGIN, WARPGROUP)
    n = read(record, t & 1, N_ENTRIES, WARPGROUP)
    bh = read(record, t & 1, BATCH_HEAD, WARPGROUP)
    part = read(record, t & 1, PART, WARPGROUP)
    n_partial = read(record, t & 1, N_PARTIAL, WARPGROUP)
    bit = read(record, t & 1, FIRST_BIT, WARPGROUP)
    mbarrier.arrive(f.bars.record_empty.index(t & 1), count=1)
    kv = t % f.KV_STAGES
    k_start = tile * f.BLOCK_N + KEYS
    row_head = 0
    column_head = 0
    if f.DROPOUT and not f.GROUPED:
        row_head, column_head = head_keys(f.seed, bh)
    return Tile(
        kv=kv, begin=begin, n=n, n_partial=n_partial, bit=bit, part=part,
        entry=f.idx + begin.to(gl.int64) * f.GATHER, bh=bh, k_start=k_start,
        limit=f.n_k - k_start, row0=bh * f.group * f.n_pad, row_head=row_head,
        column_head=column_head,
    )  # fmt: skip


@gluon.jit
def as_rows(vector, SCORES: gl.constexpr, COPY: gl.constexpr):
    """vector [BLOCK_M] as every row of [64, BLOCK_M].

    By an addition unless COPY: plain copies make ptxas spill at head dim 128.
    """
    x = vector[None, :]
    if COPY:
        return x.broadcast_to([64, vector.shape[0]])
    else:
        return gl.full([64, vector.shape[0]], -0.0, gl.float32, SCORES) + x


@gluon.jit
def allowed_words(f, bit, limit, CONSUMER: gl.constexpr):
    """Return the bits of a block, or any number where there are no partial blocks."""
    if f.PARTIAL:
        return words_below(f.bits, bit, limit, CONSUMER, f.BLOCK_N, f.BLOCK_M)
    else:
        return 0


@gluon.jit
def block_hash(f, idx, tile):
    """`tile_hash` of 64 keys and the queries of a list entry; idx: its `entry_blocks`."""
    BLOCK_Q: gl.constexpr = f.BLOCK_M // f.GATHER  # queries of a mask block
    row_head, column_head = tile.row_head, tile.column_head
    hg, block = split_index(f, idx)
    if f.GROUPED:
        row_head, column_head = head_keys(f.seed, tile.bh * f.group + hg)
    return tile_hash(tile.k_start, column_head, block, row_head, f.BLOCK_M, BLOCK_Q, True)


@gluon.jit
def store_gradients(f, tile, dk, dv, CONSUMER: gl.constexpr):
    """Store dK and dV of 64 keys where K and V were, and as a part of a split tile."""
    WIDTH: gl.constexpr = f.BLOCK_D + f.BLOCK_DV
    if f.SPLIT:
        if tile.part >= 0:
            row = (tile.bh.to(gl.int64) * f.n_parts + tile.part) * f.BLOCK_N + CONSUMER * 64
            at = f.parts + row * WIDTH
            store_part(at, 0, dk, WIDTH)
            store_part(at, f.BLOCK_D, dv, WIDTH)
    v = f.bufs.v.index(tile.kv).reshape([f.BLOCK_N, f.BLOCK_DV])
    store_shared(v.slice(CONSUMER * 64, 64, 0), dv)
    k = f.bufs.k.index(tile.kv).reshape([f.BLOCK_N, f.BLOCK_D])
    store_shared(k.slice(CONSUMER * 64, 64, 0), dk)
