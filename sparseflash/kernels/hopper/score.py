"""A score in the registers of wgmma: the places of a tile, for functions of `score.by_triton`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.common.softmax import LN2
from sparseflash.kernels.hopper.common import accumulator
from sparseflash.kernels.hopper.dropout import eights
from sparseflash.kernels.hopper.masking import bit_layout


@gluon.jit
def as_tile(x, COLUMNS: gl.constexpr):
    """x, which broadcasts to [64, COLUMNS / 8, 4, 2] of `bit_layout`, as [64, COLUMNS]."""
    x = x.broadcast_to([64, COLUMNS // 8, 4, 2]).reshape([64, COLUMNS])
    return gl.convert_layout(x, accumulator(COLUMNS), assert_trivial=True)


@gluon.jit
def places(row, n_rows, block, n_columns, COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
           T: gl.constexpr):  # fmt: skip
    """Return the numbers of the 64 tokens from `row` on [64, 1], those of the columns of
    `entry_blocks` [64, COLUMNS], for tokens beyond the end that of the last, and the tiles of
    distances that a function for Gluon takes. T: the rows are keys.
    """
    LAYOUT: gl.constexpr = bit_layout(COLUMNS)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    rows = (row + gl.arange(0, 64, ROWS)).expand_dims(1).expand_dims(2).expand_dims(3)
    lanes = gl.arange(0, 4, LANES).expand_dims(0).expand_dims(1).expand_dims(3)
    pair = gl.arange(0, 2, PAIR).expand_dims(0).expand_dims(1).expand_dims(2)
    start = block * BLOCK + lanes * 2
    step = eights(COLUMNS) * 8 % BLOCK + pair  # a compile-time constant of a register
    columns = as_tile(gl.minimum(start + step, n_columns - 1), COLUMNS)
    near = start - rows
    if T:
        near = -near
        step = -step
    own = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator(COLUMNS)))
    own = gl.minimum(own, n_rows - 1)[:, None]
    first = (
        as_tile(near.to(gl.float32), COLUMNS), as_tile(step.to(gl.float32), COLUMNS),
        as_tile(near, COLUMNS), as_tile(step, COLUMNS),
    )  # fmt: skip
    return own, columns, first


@gluon.jit
def scored(f, s, b, h, row, n_rows, block, n_columns, BLOCK: gl.constexpr, T: gl.constexpr):
    """Return the logits of products s [64, COLUMNS], what `sloped` takes of them, and the place of
    the tile; b, h, block: numbers, or as `entry_blocks` has them.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    s = s * (f.scale_log2 * LN2)
    own, columns, first = places(row, n_rows, block, n_columns, COLUMNS, BLOCK, T)
    if h.type.is_block():
        h = as_tile(h, COLUMNS)
    args = f.score_args
    if T:
        logits, _unit, kept = f.SCORE(
            s, 1.0, b, h, columns, own, n_columns, n_rows, first, args, COLUMNS, 64, True, True
        )
    else:
        logits, _unit, kept = f.SCORE(
            s, 1.0, b, h, own, columns, n_rows, n_columns, first, args, 64, COLUMNS, False, True
        )
    return logits, kept, (s, b, h, own, columns, first)


@gluon.jit
def sloped(f, ds, kept, place, n_q, n_k):
    """Return the gradient of the scaled products, transposed like ds, the gradient of the
    logits; kept and place: from `scored`.
    """
    s, b, h, k, q, first = place
    ds, _sums = f.SLOPE(
        s, 1.0, ds, kept, b, h, q, k, n_q, n_k, first, 0, f.score_args, (),
        ds.shape[1], 64, True, True,
    )  # fmt: skip
    return ds
