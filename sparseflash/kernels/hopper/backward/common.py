"""What the two passes of the Hopper backward share: descriptors, and claiming work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from sparseflash.kernels.hopper.common import fields
from sparseflash.kernels.hopper.work import (
    BATCH_HEAD,
    BEGIN,
    FIRST_BIT,
    N_ENTRIES,
    N_PARTIAL,
    PART,
    TILE,
    claim,
    locate,
    write,
)  # fmt: skip


@fields
class Inputs:
    """Descriptors of what is copied in, for TMA; (B, H, N, D), the last two of (B * H * n_pad,)."""

    q: tensor_descriptor
    dout: tensor_descriptor
    k: tensor_descriptor
    v: tensor_descriptor
    lse_log2: tensor_descriptor  # float32: the LSE in base 2
    neg_delta: tensor_descriptor  # float32: -delta, where the sums of dP begin


@gluon.jit
def scheduler(f, heads, together):
    """One warp: claims an item when the producer nears the end of the last one, and publishes it in
    a ring of two. The last record has tile -1.

    heads: of one batch entry, with lists of their own; together: of them, that run side by side.
    """
    record, bars = f.bufs.record, f.bars
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
        while (w < n_work) & (tile < 0):
            bh, item = locate(f, w, heads, together)
            tile = gl.load(item + TILE)
            begin = gl.load(item + BEGIN)
            n = gl.load(item + N_ENTRIES)
            n_partial = gl.load(item + N_PARTIAL)
            part = gl.load(item + PART)
            if tile < 0:
                w = gl.num_programs(0) + claim(f.counter)
        slot = t & 1
        first_bit = gl.load(f.bit + begin, mask=n_partial > 0, other=-1)
        mbarrier.wait(bars.record_empty.index(slot), ((t >> 1) & 1) ^ 1)
        write(record, slot, TILE, tile)
        write(record, slot, BEGIN, begin)
        write(record, slot, N_ENTRIES, n)
        write(record, slot, N_PARTIAL, n_partial)
        write(record, slot, PART, part)
        write(record, slot, BATCH_HEAD, bh)
        write(record, slot, FIRST_BIT, first_bit)
        mbarrier.arrive(bars.record_full.index(slot), count=1)
        if tile >= 0:
            mbarrier.wait(bars.record_go, t & 1)
            w = gl.num_programs(0) + claim(f.counter)
            t += 1
        else:
            t = -1
