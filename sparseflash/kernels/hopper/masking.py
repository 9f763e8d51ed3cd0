"""Which scores of a tile count: bits of partial blocks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def bit_layout(columns):
    """Return the accumulator of 64 x columns as (row, 8 columns, pair of them, one of the pair)."""
    groups = [[0, 1 << i, 0, 0] for i in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], *groups],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, columns // 8, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def words_layout(columns):
    """Of (64, 4), four words or four sums to a row, one for each lane that has a part of it."""
    return gl.SliceLayout(1, gl.SliceLayout(3, bit_layout(columns)))


@gluon.jit
def bit_words(
    bits_ptr, tile, on, CONSUMER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Return the words [64, 4] of this consumer's rows of a bit tile with ROWS rows; all ones where
    not `on`.
    """
    LAYOUT: gl.constexpr = words_layout(COLUMNS)
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    if ROWS < 64:  # heads below each other
        r = r % ROWS
    c = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    p = bits_ptr + tile.to(gl.int64) * (ROWS * 4) + (CONSUMER * 64 + r) * 4 + c
    return gl.load(p, mask=(r >= 0) & on, other=-1)  # [64, 4]


@gluon.jit
def words_below(
    bits_ptr, tile, limit, CONSUMER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """`bit_words`, all ones for tile -1 (a full entry). Rows from `limit` on are not allowed."""
    words = bit_words(bits_ptr, gl.maximum(tile, 0), tile >= 0, CONSUMER, ROWS, COLUMNS)
    r = gl.arange(0, 64, gl.SliceLayout(1, words.type.layout))[:, None]
    return gl.where(r < limit, words, 0)  # [64, 4]


@gluon.jit
def where_allowed(x, words, other):
    """x [64, COLUMNS] where the bits allow it, else `other`.

    Which bit a value has is a compile-time constant of its register.
    """
    LAYOUT: gl.constexpr = bit_layout(x.shape[1])
    w = words.expand_dims(1).expand_dims(3)
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    group = gl.arange(0, x.shape[1] // 8, GROUP).expand_dims(0).expand_dims(2).expand_dims(3)
    pair = gl.arange(0, 2, PAIR).expand_dims(0).expand_dims(1).expand_dims(2)
    bit = (w >> (group * 2 + pair)) & 1  # [64, COLUMNS / 8, 4, 2]
    keep = gl.convert_layout(bit.reshape(x.shape), x.type.layout, assert_trivial=True)
    return gl.where(keep != 0, x, other)  # [64, COLUMNS]
