"""Score functions in the portable kernels, in Triton's interpreter."""

import inspect
import json
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import masks
import sparseflash
from sparseflash.kernels.portable.capping import NEAR, capped
from sparseflash.kernels.portable.score import by_distance
from sparseflash.score import function
from sparseflash.score.by_triton import kernel_score
from sparseflash.testing import make_qkv
from tests.op_cases import INTERPRETED
from tests.sparseflash.score.cases import CASES, Case, check, tables_of

pytestmark = INTERPRETED

RAGGED = masks.causal(align="bottom_right") | masks.global_tokens(20)
SCATTERED = masks.local(24) | masks.where(lambda q, k: (q * 7 + k * 3) % 11 == 0)
FLOAT = {"backends": ["triton"], "dtype": torch.float32, "limit": 3e-5}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    """Ragged lengths of one tile and more; heads that share keys; masks, dropout and sinks."""
    case = CASES[name]
    check(case, (1, 2, 40, 70), kv_heads=1, return_max_scores=True, **FLOAT)
    check(case, (2, 1, 100, 100), SCATTERED, **FLOAT)
    more = {"dropout_p": 0.3, "seed": 5, "sink": True}
    check(case, (1, 2, 70, 133), masks.causal(), kv_heads=1, **FLOAT, **more)


@pytest.mark.parametrize("name", ["swin", "shared pair"])
def test_batches_share_tables(name):
    """Programs sum four or five of nine batch entries."""
    more = {"dropout_p": 0.3, "seed": 5}
    check(CASES[name], (9, 1, 40, 70), **FLOAT)
    check(CASES[name], (9, 1, 40, 70), masks.causal() | masks.global_tokens(40), **FLOAT, **more)


CAPS = (1e-7, 0.5, 30.0, 1000.0, 1e7)
# of |score| over the cap, on both sides of where the forms change
LARGEST = (1e-6, 0.1, 0.3999, 0.4, 0.4001, 1.0, 5.0, 1e4)
ROWS, COLUMNS = 64, 64


@triton.jit
def cap_kernel(S, Out, cap, amplitude, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(Out + at, capped(tl.load(S + at), cap, amplitude, FAST))


def capped_by_kernel(s: torch.Tensor, cap: float, amplitude: float, fast: bool) -> torch.Tensor:
    """amplitude * tanh(s / cap) of [ROWS, COLUMNS]."""
    out = torch.empty_like(s)
    cap_kernel[(1,)](s, out, cap, amplitude, M=ROWS, N=COLUMNS, FAST=fast)
    return out


def check_cap(largest: float, cap: float, fast: bool, device: str) -> None:
    """Assert that scores up to largest * cap are capped."""
    x = torch.linspace(-largest, largest, ROWS * COLUMNS, dtype=torch.float64, device=device)
    s = (x * cap).float().reshape(ROWS, COLUMNS)
    wanted = 3.0 * (s.double() / cap).tanh()
    rtol = 7e-6 if fast else 6e-7
    # of 16 numbers one may have been too large for the polynomial: then they are differences from 1
    atol = 1e-6 if fast and largest**2 > NEAR.value else 0.0
    torch.testing.assert_close(
        capped_by_kernel(s, cap, 3.0, fast).double(), wanted, rtol=rtol, atol=atol
    )


def check_cap_of_what_is_not_finite(fast: bool, device: str) -> None:
    s = torch.zeros(ROWS, COLUMNS, device=device)
    s[0, 0], s[1, 1], s[2, 2] = torch.inf, -torch.inf, torch.nan
    out = capped_by_kernel(s, 2.0, 2.0, fast)
    assert out[0, 0] == 2.0 and out[1, 1] == -2.0 and out[2, 2].isnan() and not out[3:].any()


def test_capped_numbers():
    for largest, cap in product(LARGEST, CAPS):
        check_cap(largest, cap, False, "cpu")
    check_cap_of_what_is_not_finite(False, "cpu")


@pytest.mark.parametrize(
    "cap, factor, maxima",
    [(1e-30, 8, False), (8, 8, False), (8, 8, True), (50, 20, False), (1e30, 8, False),
     (200, 480, False)],
)  # fmt: skip
def test_caps(cap, factor, maxima):
    """Of scores far beyond it, and below; without running maxima up to 50; that in base 2, or at
    all, are no float32; whose exponentials are none.
    """
    case = Case(lambda s: cap * torch.tanh(s * factor / cap), lambda *sizes: {})
    for sink in (False, True):
        more = {"limit": 1e-3 if cap == 200 else 1e-4, "return_max_scores": maxima, "sink": sink}
        check(case, (1, 2, 70, 90), RAGGED, kv_heads=1, **FLOAT | more)


def test_low_precision_of_inputs_and_tables():
    for name in ("all", "relative"):
        check(CASES[name], (1, 2, 70, 90), **FLOAT | {"dtype": torch.float16, "limit": 1e-2})


def test_tables_of_more_than_2_31_entries(monkeypatch):
    """Their offsets are int64; a small table takes the same text."""
    for name in ("swin", "key bias", "relative", "pair"):
        case = CASES[name]
        score, given = sparseflash.score(case.fn), tables_of(case, (1, 2, 30, 40), torch.float32)
        kinds, nodes = json.loads(score(**given).key())
        text = json.dumps([[[*kind[:2], True, *kind[3:]] for kind in kinds], nodes])
        assert "tl.int64" in inspect.getsource(kernel_score(text).score.fn)
        with monkeypatch.context() as patch:
            patch.setattr(function, "_text", lambda *_, text=text: text)
            check(case, (1, 2, 30, 40), **FLOAT)


def check_beside_reference(n: int, mask: Any, rule: sparseflash.Score, **tables: torch.Tensor):
    """Compare the output and all gradients with those of the reference, which clamps indices."""
    inputs, found = [*make_qkv(1, 2, n, n, 16, requires_grad=True), *tables.values()], []
    for backend in ("triton", "reference"):
        out = sparseflash.attention(*inputs[:3], mask, score=rule(**tables), backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for x, y in zip(*found, strict=True):
        assert (x - y).norm() <= 3e-5 * y.norm()


def test_far_pairs_take_one_entry():
    """Of tables that know short distances alone."""
    relative, t5 = sparseflash.score_rules.relative(20), sparseflash.score_rules.t5(8, 32)
    capped = sparseflash.score(lambda s, h, q, k, bias: torch.tanh(s) - bias[h, k - q + 20])
    for mask, rule, shape in (
        (None, capped, (2, 41)), (masks.causal(), t5, (8, 2)), (SCATTERED, relative, (2, 41)),
        (masks.local(24) | masks.global_tokens(40), relative, (2, 41)),
    ):  # fmt: skip
        check_beside_reference(420, mask, rule, bias=torch.randn(shape, requires_grad=True))


def test_derivatives_that_are_infinite_where_nothing_is_seen():
    rule = sparseflash.score(lambda s, q, k, w: s + torch.log(w[q, k]) - 1 / w[k, q])
    mask = masks.where(lambda q, k: q != k)
    w = torch.rand(70, 70) + 0.5
    check_beside_reference(70, mask, rule, w=w.fill_diagonal_(0.0).requires_grad_())


def test_a_nan_shows_in_the_gradients_of_tables():
    for name in ("alibi", "swin", "relative", "key bias"):
        case, sizes = CASES[name], (1, 1, 20, 20)
        q, k, v = make_qkv(*sizes, 16)
        q[0, 0, 3, 5] = torch.nan
        given = tables_of(case, sizes, torch.float32)
        score = sparseflash.score(case.fn)(**given)
        sparseflash.attention(q, k, v, score=score, backend="triton").sum().backward()
        grads = [t.grad for t in given.values() if t.grad is not None]
        assert grads and all(g.isnan().any() for g in grads), name


def test_nan_in_padding_leaves_the_gradients_of_tables_alone():
    """The largest value and gradient, which set the unit of the sums, are those that are seen."""
    n, real = 256, 128
    q, k, v, dout = (torch.randn(1, 2, n, 16) for _ in range(4))
    table = torch.randn(2, 33)

    def gradient(v, dout):
        bias = table.clone().requires_grad_()
        out = sparseflash.attention(
            q, k, v, masks.causal(), score=sparseflash.score_rules.relative(16)(bias=bias),
            lengths=torch.tensor([real]), backend="triton",
        )  # fmt: skip
        out.backward(dout)
        return bias.grad

    dout[:, :, real:] = 0.0
    nan_v, nan_dout = v.clone(), dout.clone()
    nan_v[:, :, real:], nan_dout[:, :, real:] = torch.nan, torch.nan
    v[:, :, real:] = 0.0
    assert torch.equal(gradient(nan_v, nan_dout), gradient(v, dout))


def test_several_reads_of_one_table_and_none():
    """Gradients add up, however each is summed."""

    def fn(s, h, q, k, t):
        return s * t[h, 0] + t[h, q // 9] + t[h, k] - t[h, abs(q - k)] * t[h, (q * k) % 13]

    case = Case(fn, lambda b, h, n, m: {"t": (h, max(n, m))})
    check(case, (1, 2, 70, 70), **FLOAT)
    q, k, v = make_qkv(1, 1, 20, 20, 16)
    t = [torch.ones(3).requires_grad_() for _ in "ab"]
    score = sparseflash.score(lambda s, x, y, h: torch.floor(s) * 0.5 + x[h])(x=t[0], y=t[1])
    q.requires_grad_()
    sparseflash.attention(q, k, v, score=score, backend="triton").square().sum().backward()
    assert (q.grad == 0).all() and (t[1].grad == 0).all()


@pytest.mark.parametrize("name", ["relative", "buckets"])
def test_what_tables_have_at_a_distance(name):
    """What the kernels for Hopper read in place of tables, in units of the scale."""
    b, h, n, m, middle, length = sizes = 2, 3, 70, 133, 512, 1024
    tables, score = tables_of(CASES[name], sizes[:4], torch.float32), sparseflash.score
    bound = score(CASES[name].fn)(**tables)
    rule = kernel_score(bound.key(), gluon=True)
    out = torch.empty(1, b * h, length)
    args = tuple(x for t in bound.tables for x in (t, *t.shape))
    grid = length // 256, b * h
    made = {"args": args, "BANDS": rule.bands, "COUNT": len(rule.near), "BLOCK": 256}
    by_distance[grid](out, length, middle, 0.5, n, m, h, **made)
    i, j = torch.arange(n)[:, None], torch.arange(m)
    heads = torch.arange(h)[:, None, None]
    wanted = CASES[name].fn(s=torch.zeros(()), h=heads, q=i, k=j, **tables)
    found = out.view(b, h, length)[..., j - i + middle]
    torch.testing.assert_close(found * 0.5, wanted.expand(b, h, n, m))
