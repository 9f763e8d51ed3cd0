"""Cases of soft-capping in the portable kernels, for the interpreter and for a GPU."""

import torch
import triton
import triton.language as tl

from sparseflash.kernels.portable.capping import NEAR, capped

CAPS = (1e-7, 0.5, 30.0, 1000.0, 1e7)
# of |score| over the cap, on both sides of where the forms change
LARGEST = (1e-6, 0.1, 0.3999, 0.4, 0.4001, 1.0, 5.0, 1e4)
ROWS, COLUMNS = 64, 64


@triton.jit
def cap_kernel(S, Out, cap, amplitude, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(Out + at, capped(tl.load(S + at), cap, amplitude, FAST))


def run(s: torch.Tensor, cap: float, amplitude: float, fast: bool) -> torch.Tensor:
    """amplitude * tanh(s / cap) of [ROWS, COLUMNS]."""
    out = torch.empty_like(s)
    cap_kernel[(1,)](s, out, cap, amplitude, M=ROWS, N=COLUMNS, FAST=fast)
    return out


def check(largest: float, cap: float, fast: bool, device: str) -> None:
    """Assert that scores up to largest * cap are capped."""
    x = torch.linspace(-largest, largest, ROWS * COLUMNS, dtype=torch.float64, device=device)
    s = (x * cap).float().reshape(ROWS, COLUMNS)
    wanted = 3.0 * (s.double() / cap).tanh()
    rtol = 7e-6 if fast else 6e-7
    # of 16 numbers one may have been too large for the polynomial: then they are differences from 1
    atol = 1e-6 if fast and largest**2 > NEAR.value else 0.0
    torch.testing.assert_close(run(s, cap, 3.0, fast).double(), wanted, rtol=rtol, atol=atol)


def check_what_is_not_finite(fast: bool, device: str) -> None:
    s = torch.zeros(ROWS, COLUMNS, device=device)
    s[0, 0], s[1, 1], s[2, 2] = torch.inf, -torch.inf, torch.nan
    out = run(s, 2.0, 2.0, fast)
    assert out[0, 0] == 2.0 and out[1, 1] == -2.0 and out[2, 2].isnan() and not out[3:].any()
