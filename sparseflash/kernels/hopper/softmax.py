"""Softmax of a block in the registers of wgmma."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.common.softmax import probabilities, rescale_factor, running_max
from sparseflash.kernels.hopper.common import accumulator
from sparseflash.kernels.hopper.masking import bit_layout, words_layout


@gluon.constexpr_function
def _tree_layout(columns):
    """Return the accumulator of 64 x columns as (row, 32 columns, 8 of them, pair of these, one of
    it).
    """
    outer = [[0, 1 << i, 0, 0, 0] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *outer],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [], [64, columns // 32, 4, 4, 2],
    )  # fmt: skip


@gluon.jit
def _tree_max(s):
    """Of S [64, BLOCK_N], as a tree, for each lane of a row [64, 4]: a chain of maxima would wait
    for itself.
    """
    BLOCK_N: gl.constexpr = s.shape[1]
    TREE: gl.constexpr = _tree_layout(BLOCK_N)
    t = gl.convert_layout(s.reshape([64, BLOCK_N // 32, 4, 4, 2]), TREE, assert_trivial=True)
    return gl.max(gl.max(gl.max(t, 4), 2), 1)


@gluon.jit
def online_softmax(s, m, scale_log2, MASKED: gl.constexpr, LAZY: gl.constexpr):
    """(P, new maxima, factor of the old sums) of scores S [64, BLOCK_N] and maxima m [64]; LAZY as
    `running_max` has it.
    """
    top = gl.max(_tree_max(s), 1)
    top = gl.convert_layout(top, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    m_new, shift = running_max(m, top, scale_log2, MASKED, LAZY)
    return probabilities(s, scale_log2, shift[:, None]), m_new, rescale_factor(m, shift)


@gluon.jit
def softmax_with(s, m, unit, add, LAZY: gl.constexpr, BOUNDED: gl.constexpr):
    """`online_softmax` of the logits s unit + add in base 2, which may be -inf; add: a number, or
    one for each row and lane [64, 4]. BOUNDED: exponentials of all are far from the ends of
    float32; the maxima stay as they are.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    WORDS: gl.constexpr = words_layout(s.shape[1])
    add = gl.zeros([64, 4], gl.float32, WORDS) + add
    m_new, shift = m, gl.zeros([64], gl.float32, ROWS)
    if not BOUNDED:
        top = _tree_max(s)
        top = gl.max(top * unit + gl.convert_layout(add, top.type.layout, assert_trivial=True), 1)
        m_new, shift = running_max(
            m, gl.convert_layout(top, ROWS, assert_trivial=True), 1.0, True, LAZY
        )
    by_lane = gl.convert_layout(shift, gl.SliceLayout(1, WORDS), assert_trivial=True)
    by_lane = (by_lane[:, None] - add).expand_dims(1).expand_dims(3)
    p = probabilities(s, unit, as_tile(by_lane, s.shape[1]))
    return p, m_new, rescale_factor(m, shift)


@gluon.jit
def as_tile(x, COLUMNS: gl.constexpr):
    """x, which broadcasts to [64, COLUMNS / 8, 4, 2] of `bit_layout`, as [64, COLUMNS]."""
    x = x.broadcast_to([64, COLUMNS // 8, 4, 2]).reshape([64, COLUMNS])
    return gl.convert_layout(x, accumulator(COLUMNS), assert_trivial=True)


@gluon.jit
def row_sums(p):
    """Of P [64, BLOCK_N], one for each of the four lanes that share a row: [64, 4].

    Only the maxima of a block must be known to all four; the sums are joined when a tile ends.
    """
    BLOCK_N: gl.constexpr = p.shape[1]
    LANES: gl.constexpr = bit_layout(BLOCK_N)
    p = gl.convert_layout(p.reshape([64, BLOCK_N // 8, 4, 2]), LANES, assert_trivial=True)
    return gl.sum(gl.sum(p, 3), 1)


@gluon.jit
def some_rescaled(factor, l):
    """Whether a warp has a row with another factor than 1, int32 [64, 4], the same in all lanes;
    factor, l [64, 4]: of the row sums, and these with the block.

    l is asked for a NaN, which cannot do harm, so that the vote takes all of P: ptxas computes
    exponentials after the wait for P V otherwise.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.neu.f32 some, $2, 0f3F800000;
        setp.neu.or.f32 some, $3, 0f3F800000, some;
        setp.nan.or.f32 some, $4, $5, some;
        vote.sync.any.pred some, some, 0xffffffff;
        selp.s32 $0, 1, 0, some;
        mov.b32 $1, $0;
        }""",
        "=r,=r,f,f,f,f", [factor, l], gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
