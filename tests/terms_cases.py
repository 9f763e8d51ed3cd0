"""Cases of terms of the scores, for the interpreter and for a GPU: biases and soft-capping."""

import torch
import triton
import triton.language as tl

import masks
from sparseflash.kernels.portable.capping import NEAR, capped
from tests.attention_cases import Case

_BLOCKS = masks.documents([64] * 6)
_SHORT = {"n_q": 200, "n_k": 200}
_SMALL = {"block_size": (32, 32), "radius": 20}
CASES = {
    "no near tile": {"mask": masks.causal() & ~masks.local(240), **_SMALL},
    "near tiles on one side": {"mask": masks.causal() & ~masks.local(16), **_SMALL},
    "all near and partial": {"mask": masks.local(16), **_SMALL},
    "all near and full": {"mask": _BLOCKS, "block_size": (64, 64), "radius": 40},
    "near full, far partial": {
        "mask": _BLOCKS | masks.global_tokens(9), "block_size": (64, 64), "radius": 7,
    },
    "near partial, far full": {
        "mask": masks.local(30) | masks.global_tokens(64), "block_size": (64, 64), "radius": 7,
    },
    "first and last diagonal": {"radius": 1, "n_q": 64, "n_k": 384},
    "no key at distance 0 of the first queries": {"radius": 30, "n_q": 384, "n_k": 90},
    "a radius beyond the ends": {"radius": 1000, "n_k": 300},
    "one query": {"n_q": 1, "radius": 128},
    "many parts": {
        "mask": masks.causal(), "block_size": (16, 16), "radius": 25, "n_q": 150, "n_k": 160,
    },
    "blocks that are not square": {
        "mask": masks.causal(), "block_size": (16, 64), "radius": 50, **_SHORT,
    },
    "blocks that are no powers of two": {
        "mask": masks.causal(), "block_size": (48, 80), **_SHORT,
    },
    "long lists": {
        "mask": masks.random_blocks(0.97, block=16), "block_size": (16, 16), "n_q": 20,
        "n_k": 2300, "radius": 90,
    },
    "wide tiles of dq": {"head_dim": 64, "radius": 60},
    "wide tiles of dq, lists": {
        "head_dim": 64, "radius": 128, "mask": masks.random_blocks(0.5, block=128),
    },
}  # fmt: skip


def case(name: str, **changes: object) -> Case:
    given = {"n_q": 384, "n_k": 384, "head_dim": 16, "terms": ("bias",), "kv_heads": 1}
    return Case(**(given | CASES[name] | changes))  # pyright: ignore[reportArgumentType]


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
