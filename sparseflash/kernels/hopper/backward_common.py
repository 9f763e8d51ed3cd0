"""Device functions that the passes of the Hopper backward share: claiming work, bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.kernels.hopper.common import (
    BEGIN,
    BH,
    FIRST_BIT,
    N_PARTIAL,
    PART,
    TILE,
    N,
    bit_words,
    claim,
    locate,
    write,
)  # fmt: skip


@gluon.jit
def scheduler(record, record_full, record_empty, record_go, items_ptr, bit_ptr, counter_ptr, work):
    """One warp: claims an item when the producer nears the end of the last one, and publishes it in
    a ring of two. The last record has tile -1.
    """
    n_items, n_long, list_batch, list_heads, heads, group, n_bh = work
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
        while (w < n_work) & (tile < 0):
            bh, item = locate(w, n_items, n_long, n_bh, heads, group, list_batch, list_heads)
            item = items_ptr + item * 8
            tile = gl.load(item)
            begin = gl.load(item + 1)
            n = gl.load(item + 2)
            n_partial = gl.load(item + 3)
            part = gl.load(item + 4)
            if tile < 0:
                w = gl.num_programs(0) + claim(counter_ptr)
        slot = t & 1
        first_bit = gl.load(bit_ptr + begin, mask=n_partial > 0, other=-1)
        mbarrier.wait(record_empty.index(slot), ((t >> 1) & 1) ^ 1)
        write(record, slot, TILE, tile)
        write(record, slot, BEGIN, begin)
        write(record, slot, N, n)
        write(record, slot, N_PARTIAL, n_partial)
        write(record, slot, PART, part)
        write(record, slot, BH, bh)
        write(record, slot, FIRST_BIT, first_bit)
        mbarrier.arrive(record_full.index(slot), count=1)
        if tile >= 0:
            mbarrier.wait(record_go, t & 1)
            w = gl.num_programs(0) + claim(counter_ptr)
            t += 1
        else:
            t = -1


@gluon.jit
def store_part(ptr, x, stride):
    """Store an accumulator in float32, row-major."""
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(ptr + r * stride + c, x)


@gluon.jit
def words_below(bits_ptr, row, limit, W: gl.constexpr, MAJOR: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of this warpgroup's 64 rows of a bit tile; all ones for row -1 (a full entry).
    What lies at or beyond row `limit` is not allowed.
    """
    words = bit_words(bits_ptr, gl.maximum(row, 0), row >= 0, W, MAJOR, LAYOUT)
    r = gl.arange(0, 64, gl.SliceLayout(1, words.type.layout))[:, None]
    return gl.where(r < limit, words, 0)
