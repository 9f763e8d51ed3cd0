"""Softmax of a block in the registers of wgmma: in the 16-bit forward, and in the one for e4m3."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.hopper.masking import bit_layout
from sparseflash.kernels.softmax import finite, probabilities, rescale_factor, running_max


# ------------------------------------------------------------------ 16 bits
@gluon.constexpr_function
def _tree_layout(columns):
    """The accumulator of 64 x columns as (row, 32 columns, 8 of them, pair of these, one of it)."""
    outer = [[0, 1 << i, 0, 0, 0] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *outer],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [], [64, columns // 32, 4, 4, 2],
    )  # fmt: skip


@gluon.jit
def _tree_max(s):
    """Of S [64, BLOCK_N], as a tree: a chain of maxima would wait for itself."""
    BLOCK_N: gl.constexpr = s.shape[1]
    TREE: gl.constexpr = _tree_layout(BLOCK_N)
    t = gl.convert_layout(s.reshape([64, BLOCK_N // 32, 4, 4, 2]), TREE, assert_trivial=True)
    t = gl.max(gl.max(gl.max(t, 4), 2), 1)  # [64, 4]
    return gl.convert_layout(gl.max(t, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def online_softmax(s, m, scale_log2, MASKED: gl.constexpr):
    """(P, new maxima, factor of the old sums) of scores S [64, BLOCK_N] and maxima m [64]."""
    m_new, shift = running_max(m, _tree_max(s), scale_log2, MASKED)
    return probabilities(s, scale_log2, shift[:, None]), m_new, rescale_factor(m, shift)


@gluon.jit
def row_sums(p):
    """Of P [64, BLOCK_N], one for each of the four lanes that share a row: [64, 4].

    Only the maxima of a block must be known to all four; the sums are joined when a tile ends.
    """
    BLOCK_N: gl.constexpr = p.shape[1]
    LANES: gl.constexpr = bit_layout(BLOCK_N)
    p = gl.convert_layout(p.reshape([64, BLOCK_N // 8, 4, 2]), LANES, assert_trivial=True)
    return gl.sum(gl.sum(p, 3), 1)


# ------------------------------------------------------------------ e4m3
@gluon.constexpr_function
def byte_layout():
    """wgmma's left operand [64, 128] in e4m3 as (row, word, byte of the word)."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 32, 4],
    )  # fmt: skip


@gluon.jit
def _pack(p):
    """P [64, 128] as int32 words of four e4m3 values: [64, 32].

    As an e4m3 tensor it would cross the loop one byte to a register.
    """
    # (group of 16, half, quad, pair) -> (group of 16, quad, half, pair)
    p = p.reshape([64, 8, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([64, 32, 2, 2])
    even, odd = p.split()
    p0, p2 = even.split()
    p1, p3 = odd.split()
    words = gl.inline_asm_elementwise(
        """{
        .reg .b16 h<2>;
        cvt.rn.satfinite.e4m3x2.f32 h0, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 h1, $4, $3;
        mov.b32 $0, {h0, h1};
        }""",
        "=r,r,r,r,r", [p0, p1, p2, p3], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    WORDS: gl.constexpr = gl.SliceLayout(2, byte_layout())
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def unpack(words, zero, OPERAND: gl.constexpr):
    """The words as the left operand of wgmma, [64, 128] in the layout OPERAND, in registers of
    their own.

    zero: 0, unknown to the compiler. Without an instruction between, ptxas lets the next P share
    the registers that the wgmma in flight reads, and then serialises everything.
    """
    w = words.expand_dims(2) + gl.zeros([64, 32, 4], gl.int32, byte_layout())
    p = gl.inline_asm_elementwise(
        "xor.b32 $0, $1, $5;", "=r,r,r,r,r,r,r,r,r", [w.reshape([64, 128]), zero], gl.int8,
        is_pure=False, pack=4,
    )  # fmt: skip
    return gl.convert_layout(p.to(gl.float8e4nv, bitcast=True), OPERAND, assert_trivial=True)


@gluon.jit
def fp8_row_max(s):
    """Of S [64, 128], in two steps: in one it is a chain of 32 instructions to a thread, not of 4
    and 8.
    """
    m = gl.max(gl.max(s.reshape([64, 4, 32]), 1), 1)
    return gl.convert_layout(m, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _fp8_row_sum(p):
    total = gl.sum(gl.sum(p.reshape([64, 4, 32]), 1), 1)
    return gl.convert_layout(total, gl.SliceLayout(1, p.type.layout), assert_trivial=True)


@gluon.jit
def fp8_probabilities(s, score_scale, shift, m):
    """(P in e4m3, packed, its row sums without the shift) of S [64, 128] for the row maxima m [64].

    shift: log2 of what P is multiplied by.
    """
    p = gl.exp2(s * score_scale + (shift - finite(m))[:, None])
    total = _fp8_row_sum(p) * gl.exp2(-shift)
    return _pack(p), total
