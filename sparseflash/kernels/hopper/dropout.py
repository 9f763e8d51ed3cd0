"""Dropout in the registers of wgmma: P gets a sign, and is negative where an entry is dropped.

So what was decided takes no registers of its own until the gradient of P needs it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.common.dropout import (
    KEY_STEP,
    QUERY_STEP,
    group_hash,
    is_table,
    key_of,
    noise,
)  # fmt: skip
from sparseflash.kernels.hopper.common import accumulator
from sparseflash.kernels.hopper.masking import bit_layout


@gluon.jit
def eights(COLUMNS: gl.constexpr):
    """0, 1, .. for each 8 columns of `bit_layout`."""
    PAIRS: gl.constexpr = gl.SliceLayout(3, bit_layout(COLUMNS))
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, PAIRS))
    return gl.arange(0, COLUMNS // 8, LAYOUT).expand_dims(0).expand_dims(2).expand_dims(3)


@gluon.jit
def entry_blocks(entry, COLUMNS: gl.constexpr, BLOCK: gl.constexpr):
    """Return the mask blocks of a list entry: one, or that of each 8 columns, [1, COLUMNS // 8, 1,
    1]; `entry` points to the first.
    """
    if BLOCK == COLUMNS:
        return gl.load(entry)
    else:
        return gl.load(entry + eights(COLUMNS) * 8 // BLOCK)


@gluon.jit
def tile_hash(row, row_head, block, column_head, COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
              TRANSPOSED: gl.constexpr):  # fmt: skip
    """`group_hash` of the 64 tokens from `row` on and the COLUMNS of `entry_blocks`: [64, COLUMNS].

    The heads are numbers, or there is one for each 8 columns. TRANSPOSED: the rows are keys.
    """
    ROW_STEP: gl.constexpr = KEY_STEP if TRANSPOSED else QUERY_STEP
    COLUMN_STEP: gl.constexpr = QUERY_STEP if TRANSPOSED else KEY_STEP
    LAYOUT: gl.constexpr = bit_layout(COLUMNS)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    rows = (row + gl.arange(0, 64, ROWS)).expand_dims(1).expand_dims(2).expand_dims(3)
    lanes = gl.arange(0, 4, LANES).expand_dims(0).expand_dims(1).expand_dims(3)
    pair = gl.arange(0, 2, PAIR).expand_dims(0).expand_dims(1).expand_dims(2)
    eight = eights(COLUMNS) * 8 % BLOCK
    if is_table(column_head):
        columns = key_of(block * BLOCK + eight + lanes * 2 + pair, COLUMN_STEP, column_head)
    else:  # a number of the thread, plus one that is a compile-time constant of its register
        first = key_of(block * BLOCK, COLUMN_STEP, column_head)
        columns = first + key_of(lanes * 2, COLUMN_STEP, 0) + key_of(eight + pair, COLUMN_STEP, 0)
    x = group_hash(key_of(rows, ROW_STEP, row_head), columns)  # [64, COLUMNS / 8, 4, 2]
    return gl.convert_layout(x.reshape([64, COLUMNS]), accumulator(COLUMNS), assert_trivial=True)


@gluon.jit
def signed(p, group, threshold, TRANSPOSED: gl.constexpr):
    """P, negative where dropout drops it; group: `tile_hash`.

    A dot product with (0, 1) subtracts the threshold from the upper half of the noise. Its pipe has
    less to do than that of comparisons.
    """
    row = gl.arange(0, 64, gl.SliceLayout(1, p.type.layout))[:, None]
    column = gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
    x = noise(group, column, row) if TRANSPOSED else noise(group, row, column)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 d;
        dp2a.lo.u32.u32 d, $2, 0x100, $3;
        lop3.b32 $0, d, 0x80000000, $1, 0x6a;
        }""",
        "=f,f,r,r", [p, x, -threshold], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def kept(signed, DTYPE: gl.constexpr):
    """Return what dropout keeps of P, in 16 bits."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [signed], gl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [signed], gl.float16,
            is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def dropped_gradient(signed, dp, keep_scale, neg_delta):
    """dS of P with its sign: P (keep_scale dP - delta) where it is kept, -P delta elsewhere."""
    return gl.maximum(signed, 0.0) * (dp * keep_scale) + gl.abs(signed) * neg_delta
