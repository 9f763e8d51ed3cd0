"""The end of a tile of the Hopper forward: from its sums to O, LSE and row maxima."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparseflash.kernels.common.softmax import (
    natural_lse,
    natural_max,
    nonzero,
    with_nan,
    with_sink,
)
from sparseflash.kernels.hopper.columns import scaled_rows, store_part, store_shared
from sparseflash.kernels.hopper.common import WARPGROUP, accumulator
from sparseflash.kernels.hopper.forward_feed import shared_rows
from sparseflash.kernels.hopper.work import HEAD, read


@gluon.jit
def sink_of(f, t, part, CONSUMER: gl.constexpr):
    """Return the sink of tile t, for `store_out`: loaded while its last product is in flight, which
    hides the latency. -inf for a part: `merge_parts` adds the sink. Unused where the call has none.
    """
    if f.sink is None:
        return 0.0
    else:
        head = read(f.bufs.record, t & 3, HEAD, WARPGROUP)  # a record outlives its tile by one
        head += CONSUMER % f.HEADS * f.PACK
        if f.PACK > 1:
            head += gl.arange(0, 64, gl.SliceLayout(1, accumulator(f.BLOCK_N))) // f.BLOCK_M
        return gl.load(f.sink + head, mask=(t >= 0) & (part < 0), other=float("-inf"))


@gluon.jit
def store_out(f, acc, m, sums, sink, i, bh, row, part):
    """Hands O [64, COLUMNS_V] to the storer, in place i of Q, or keeps that of a part. Returns O.

    acc: the sum of P V; m: row maxima; sums [64, 4]: row sums of P; row: the first query.
    """
    ROWS: gl.constexpr = m.type.layout
    l = gl.convert_layout(gl.sum(sums, 1), ROWS, assert_trivial=True)  # [64]
    if f.BOUNDED:
        m = gl.where(l == 0.0, float("-inf"), m)
    if f.max_scores is not None:
        m = with_nan(m, l)
    top = m
    if f.sink is not None:  # one more key, whose value is 0
        m, l, alpha = with_sink(m, l, sink)  # [64]
    l = nonzero(l)
    factor = f.keep_scale / l
    if f.sink is not None:
        factor *= alpha
    o = scaled_rows(acc, factor)
    lse = natural_lse(m, l)
    whole = part < 2**30
    if f.SPLIT:
        whole = part < 0
        if part >= 0:
            if f.PACK > 1:  # heads of a consumer lie side by side
                first = (bh.to(gl.int64) // f.PACK * f.n_parts + part) * 64
            else:
                first = (bh.to(gl.int64) * f.n_parts + part) * f.BLOCK_M + row % f.BLOCK_M
            store_part(f.part_out, first * f.BLOCK_DV, o, f.BLOCK_DV)
            gl.store(f.part_lse + first + gl.arange(0, 64, ROWS), lse)
            if f.max_scores is not None:
                gl.store(f.part_max + first + gl.arange(0, 64, ROWS), natural_max(top))
    if whole:
        store_shared(shared_rows(f.bufs.q, i, f.descs.out, f.BLOCK_DV), o)
        fence_async_shared()
        r = row + gl.arange(0, 64, ROWS)
        own = bh
        if f.PACK > 1:
            own = bh + gl.arange(0, 64, ROWS) // f.BLOCK_M
            r = row + gl.arange(0, 64, ROWS) % f.BLOCK_M
        gl.store(f.lse + own.to(gl.int64) * f.n_q + r, lse, mask=r < f.n_q)
        if f.max_scores is not None:
            at = f.max_scores + own.to(gl.int64) * f.n_q + r
            gl.store(at, natural_max(top), mask=r < f.n_q)
    mbarrier.arrive(f.bars.out_full.index(i), count=1)
    return o
