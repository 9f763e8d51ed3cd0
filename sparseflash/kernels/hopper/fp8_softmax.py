"""Softmax of the fp8 forward, and P as wgmma's operand."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _pack(p, W4_L: gl.constexpr):
    """P as int32 words of four e4m3 values: (64, 32).

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
    return gl.convert_layout(words, gl.SliceLayout(2, W4_L), assert_trivial=True)


@gluon.jit
def unpack(words, zero, W4_L: gl.constexpr, P_L: gl.constexpr):
    """The words as the A operand of wgmma, in registers of their own.

    zero: 0, unknown to the compiler. Without an instruction between, ptxas lets the next P share
    the registers that the wgmma in flight reads, and then serialises everything.
    """
    w = words.expand_dims(2) + gl.zeros([64, 32, 4], gl.int32, W4_L)
    p = gl.inline_asm_elementwise(
        "xor.b32 $0, $1, $5;", "=r,r,r,r,r,r,r,r,r", [w.reshape([64, 128]), zero], gl.int8,
        is_pure=False, pack=4,
    )  # fmt: skip
    return gl.convert_layout(p.to(gl.float8e4nv, bitcast=True), P_L, assert_trivial=True)


@gluon.jit
def row_max(s):
    """In two steps: in one it is a chain of 32 dependent instructions to a thread, not 4 + 8."""
    m = gl.max(gl.max(s.reshape([64, 4, 32]), 1), 1)
    return gl.convert_layout(m, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _row_sum(p):
    total = gl.sum(gl.sum(p.reshape([64, 4, 32]), 1), 1)
    return gl.convert_layout(total, gl.SliceLayout(1, p.type.layout), assert_trivial=True)


@gluon.jit
def finite(m):
    """The row maxima, 0 for a row that has seen no key yet."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def probabilities(s, c, shift, m, W4_L: gl.constexpr):
    """(P in e4m3, packed, its row sums without the shift) for the row maxima m."""
    p = gl.exp2(s * c + (shift - finite(m))[:, None])
    total = _row_sum(p) * gl.exp2(-shift)
    return _pack(p, W4_L), total
