"""Soft-capping in the portable kernels: a tanh for each score."""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from sparseflash.kernels.common.softmax import LOG2E

# Where x^2 <= 0.16, tanh(x) = x (1 + A3 x^2 + A5 x^4 + A7 x^6) with a relative error below 2e-7,
# and x (B0 + B1 z + B2 z^2) of z = x^2 - 0.16 with one below 7e-6.
NEAR = tl.constexpr(0.16)
A3, A5, A7 = tl.constexpr(-0.33331882), tl.constexpr(0.13277629), tl.constexpr(-0.04779421)
B0, B1, B2 = tl.constexpr(0.94987834), tl.constexpr(-0.29381688), tl.constexpr(0.12127787)
PACK = tl.constexpr(16)  # scores of a thread that choose together


def _ptx(pack: int) -> str:
    """`capped` of `pack` scores of a thread: a polynomial each, and where one of them is too large
    for it, an exponential and a division each.

    All are small where all z are negative, which the sign of z0 & z1 & .. tells. That needs no
    other thread, and only warps with large scores pay for them.
    """
    out, s, minus_near, b0, b1, b2, cap, amplitude = (
        [f"${i}" for i in range(first, first + pack)] for first in range(0, 8 * pack, pack)
    )
    near = [
        f"""
        fma.rn.f32 z, {s[i]}, {s[i]}, {minus_near[i]};
        mov.b32 bits, z;
        and.b32 sign, sign, bits;
        fma.rn.f32 r, z, {b2[i]}, {b1[i]};
        fma.rn.f32 r, z, r, {b0[i]};
        mul.f32 {out[i]}, {s[i]}, r;"""
        for i in range(pack)
    ]
    far = [
        f"""
        mul.f32 r, {s[i]}, rate;
        ex2.approx.ftz.f32 r, r;
        add.f32 r, r, 0f3F800000;
        rcp.approx.ftz.f32 r, r;
        fma.rn.f32 {out[i]}, r, minus_twice, {amplitude[i]};"""
        for i in range(pack)
    ]
    return f"""{{
        .reg .pred near;
        .reg .b32 sign, bits;
        .reg .f32 z, r, rate, minus_twice;
        mov.b32 sign, 0x80000000;{"".join(near)}
        setp.ne.b32 near, sign, 0;
        @near bra END;
        rcp.approx.ftz.f32 rate, {cap[0]};
        mul.f32 rate, rate, 0f4038AA3B; // 2 log2(e)
        mul.f32 minus_twice, {amplitude[0]}, 0fC0000000;{"".join(far)}
        END:
    }}"""


PTX = tl.constexpr(_ptx(PACK.value))
CONSTRAINTS = tl.constexpr(",".join(["=&f"] * PACK.value + ["f"] * (7 * PACK.value)))


@triton.jit
def capped(s, cap, amplitude, FAST: tl.constexpr):
    """amplitude * tanh(s / cap) of scores [M, N], cap from 1e-7 to 1e7. FAST: an error of 7e-6 of
    it is small.
    """
    if FAST and is_cuda():
        a = amplitude / cap
        per_square = 1.0 / (cap * cap)
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS,
            [s, -NEAR * cap * cap, B0 * a, B1 * a * per_square, B2 * a * per_square * per_square,
             cap, amplitude],
            tl.float32, is_pure=True, pack=PACK,
        )  # fmt: skip
    else:
        x = s / cap
        y = x * x
        near = x * (1.0 + y * (A3 + y * (A5 + y * A7)))
        far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)  # of any x: exp2 gives 0 or inf
        return amplitude * tl.where(y <= NEAR, near, far)
