"""A score in the registers of wgmma: the places of a tile, for functions of `score.by_triton`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.common.softmax import LN2
from sparseflash.kernels.hopper.common import accumulator
from sparseflash.kernels.hopper.dropout import eights
from sparseflash.kernels.hopper.masking import bit_layout, words_layout
from sparseflash.kernels.hopper.softmax import as_tile, row_sums
from sparseflash.kernels.portable.score import SPAN


@gluon.jit
def _hidden(x):
    """Return x, without telling LLVM what it is."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=True, pack=1)


@gluon.jit
def places(row, block, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, T: gl.constexpr):
    """Return the numbers of the 64 tokens from `row` on [64, 1], those of the columns of
    `entry_blocks` [64, COLUMNS], some of them beyond the end, and the distances of keys from
    queries that a function for Gluon takes. T: the rows are keys.

    The distances are two tiles of float32 that add up to them, the second one of constants, and two
    of integers; then the least and the greatest one; then, unless T, the first tile for each row
    and lane [64, 4]. Where an entry has several blocks, the last one says nothing, and the two
    before it are None.
    """
    LAYOUT: gl.constexpr = bit_layout(COLUMNS)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    WORDS: gl.constexpr = words_layout(COLUMNS)
    rows = (row + gl.arange(0, 64, ROWS)).expand_dims(1).expand_dims(2).expand_dims(3)
    lanes = gl.arange(0, 4, LANES).expand_dims(0).expand_dims(1).expand_dims(3)
    pair = gl.arange(0, 2, PAIR).expand_dims(0).expand_dims(1).expand_dims(2)
    start = block * BLOCK + lanes * 2
    step = eights(COLUMNS) * 8 % BLOCK + pair  # a compile-time constant of a register
    columns = as_tile(start + step, COLUMNS)
    near = start - rows
    if T:
        near = -near
        step = -step
    own = (row + gl.arange(0, 64, gl.SliceLayout(1, accumulator(COLUMNS))))[:, None]
    of_row = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :] * 2
    of_row = of_row - gl.arange(0, 64, gl.SliceLayout(1, WORDS))[:, None]  # [64, 4]
    low, high = None, None
    if BLOCK == COLUMNS:
        # hidden: LLVM would find the distances of tiles around 0, and keep them in registers
        low = block * BLOCK - _hidden(row) - 63
        high = low + COLUMNS + 62
        of_row += block * BLOCK - row
        if T:
            low, high = -high, -low
    first = (
        as_tile(near.to(gl.float32), COLUMNS), as_tile(step.to(gl.float32), COLUMNS),
        as_tile(near, COLUMNS), as_tile(step, COLUMNS), low, high, of_row.to(gl.float32),
    )  # fmt: skip
    return own, columns, first


@gluon.jit
def numbers_of(f, b, h):
    """Return what `scored` and `sloped` take of a batch entry and a head: loads, which are asked
    for long before.
    """
    return f.NUMBERS(b, h, f.score_args[-2], f.score_args[-1], f.score_args)


@gluon.jit
def scored(f, s, numbers, b, h, row, n_rows, block, n_columns, BLOCK: gl.constexpr,
           T: gl.constexpr):  # fmt: skip
    """Return x, unit and add of products s [64, COLUMNS], so that the logits in base 2 are x unit +
    add, and what `sloped` takes of them; b, h, block: numbers, or as `entry_blocks` has them. add
    is a number or, unless T, one for each row and lane [64, 4].
    """
    COLUMNS: gl.constexpr = s.shape[1]
    own, columns, first = places(row, block, COLUMNS, BLOCK, T)
    q, k, n_q, n_k = own, columns, n_rows, n_columns
    if T:
        q, k, n_q, n_k = columns, own, n_columns, n_rows
    M: gl.constexpr = COLUMNS if T else 64
    N: gl.constexpr = 64 if T else COLUMNS
    return f.SCORE(
        s, f.scale_log2 * LN2, numbers, b, h, q, k, n_q, n_k, first, f.score_args, M, N, T, True
    )


@gluon.jit
def sloped(f, s, ds, kept, numbers, sums, b, h, k_start, n_k, block, n_q, BLOCK: gl.constexpr):
    """Return the gradient of the scaled products s, transposed like ds, the gradient of the logits,
    and the sums [64, 4] by key with those of the tile; kept: from `scored`.
    """
    far = k_start // SPAN * SPAN - block * BLOCK // SPAN * SPAN
    if len(sums) > 0 and f.BLOCK_D > 64:
        k_start = _hidden(k_start)  # distances are computed again, and not kept in registers
    k, q, first = places(k_start, block, s.shape[1], BLOCK, True)
    ds, values = f.SLOPE(
        s, f.scale_log2 * LN2, ds, kept, numbers, b, h, q, k, n_q, n_k, first, far, f.score_args,
        (), ds.shape[1], 64, True, True,
    )  # fmt: skip
    found = ()
    for i in gl.static_range(len(values)):
        value, there = values[i]
        for j in gl.static_range(len(there)):
            found = found + (sums[len(found)] + _sums_where(value, there[j]),)  # noqa: RUF005
    return ds, found


@gluon.jit
def _sums_where(value, there):
    if there is True:
        return row_sums(value)
    elif there.type.is_block():
        return row_sums(gl.where(as_tile(there, value.shape[1]), value, 0.0))
    else:
        return gl.where(there, row_sums(value), 0.0)
