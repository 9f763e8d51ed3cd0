"""NaN and numbers that overflow: they reach what may see them, and nothing else.

Kernels in the interpreter read nothing around their inputs, where there is NaN.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash.picks import kernels as picked
from sparseflash.testing import make_qkv, relative_error
from tests import nan_cases, op_cases
from tests.nan_cases import check, check_decode, random_nan_case
from tests.notes import seeds
from tests.op_cases import INTERPRETED

LENGTHS = 16, 63, 100
SEEDS = seeds(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_reference_and_cpu(seed):
    check(random_nan_case(seed, LENGTHS, (torch.float32, torch.float64)), "reference")
    low = torch.float32, torch.bfloat16, torch.float16
    check(random_nan_case(seed, LENGTHS, low), "cpu", contained=True)
    for value in (3e38, -3e38):  # products that overflow
        case = random_nan_case(seed, LENGTHS, low[:2])
        check(replace(case, seed=seed), "cpu", value=value, contained=True)


@INTERPRETED
@pytest.mark.parametrize("seed", SEEDS)
def test_triton(seed):
    check(random_nan_case(seed, LENGTHS, (torch.float32, torch.float16)), "triton")


@pytest.mark.parametrize("seed", SEEDS)
def test_decode(seed):
    check_decode(seed, "cpu")


@INTERPRETED
@pytest.mark.parametrize("seed", SEEDS)
def test_decode_kernels(seed):
    check_decode(seed, "triton")


@pytest.mark.parametrize("backend", op_cases.BACKENDS)
def test_lengths(backend):
    """As with a mask that hides what is beyond the lengths."""
    case = random_nan_case(1, (63, 100), (torch.float32,))
    case = replace(case, n_k=case.n_q, mask=None, sink=False, softcap=0.0, dropout_p=0.0)
    check(case, backend, lengths=[case.n_q - 5, case.n_q // 2])


# ---- kernels read nothing around their inputs


@INTERPRETED
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_attention_reads_nothing_around_its_inputs(seed):
    nan_cases.attention(seed, "triton", "cpu", (torch.float32, torch.float16))


@INTERPRETED
@pytest.mark.parametrize("seed, gathers", [(5, True), (5, False), (9, False)])
def test_picks_read_nothing_around_their_inputs(seed, gathers, monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: gathers)
    nan_cases.picks(seed, "cpu", (torch.float32, torch.float16))


@INTERPRETED
@pytest.mark.parametrize("seed", range(10, 13))
def test_decoding_reads_nothing_around_its_inputs(seed):
    nan_cases.decode(seed, "cpu", (torch.float32, torch.float16)[seed % 2])


# ---- blocks of the CPU backend, which hold pairs that are hidden

N, TOKEN = 48, 20
DENSE = np.tril(np.ones((N, N), bool))
DENSE[40:, 18:22] = False  # late queries skip the tokens around the bad one
VALUES = [float("nan"), float("inf"), float("-inf")]
NEAR = sparseflash.score(lambda s, h, q, k, bias: 3 * np.tanh(s / 3) + bias[h, k - q + 2])
TERMS = {"sink": torch.tensor([0.5, 2.0]), "score": NEAR(bias=torch.eye(2, 5))}
OTHERS = torch.arange(N) != TOKEN
BLIND, UNSEEN = torch.from_numpy(~DENSE[:, TOKEN]), torch.from_numpy(~DENSE[TOKEN])


def run(q, k, v, dout, dlse, **options):
    """out, lse, dq, dk, dv."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    mask = masks.mask_from(DENSE).build(N, N, 16)
    out, lse = sparseflash.attention(*inputs, mask, backend="cpu", return_lse=True, **options)
    loss = (out * dout).sum() + (lse * dlse.sum(-1)).sum()
    return out, lse, *torch.autograd.grad(loss, inputs)


def results(name: str, value: float, kv_heads=1, **options):
    """With a bad number in an input or its cotangent, and without."""
    clean = dict(zip("qkv", make_qkv(2, 2, N, N, 16, kv_heads=kv_heads), strict=True))
    for seed, cotangent in enumerate(("dout", "dlse"), 1):
        clean[cotangent] = torch.randn(2, 2, N, 16, generator=torch.Generator().manual_seed(seed))
    bad = {key: t.clone() for key, t in clean.items()}
    bad[name][1, 0, TOKEN, 3] = value
    return run(**bad, **options), run(**clean, **options)


def agree(found, expected, tokens):
    for a, e in zip(found, expected, strict=True):
        assert a[:, :, tokens].isfinite().all()
        assert relative_error(a[:, :, tokens], e[:, :, tokens]) < 1e-5


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.4, "seed": 3}, TERMS], ids=["", "dropout", "terms"]
)
@pytest.mark.parametrize("name", "kv")
def test_a_bad_key_does_not_reach_the_rows_that_do_not_see_it(name, options):
    for value, kv_heads in product(VALUES, (1, 2)):
        found, expected = results(name, value, kv_heads, **options)
        agree(found[:3], expected[:3], BLIND)
        agree(found[3:], expected[3:], slice(40, N))  # keys that no row with the bad one sees
        assert name == "k" or not found[0][1, 0, ~BLIND].isfinite().all(-1).any()
        assert name == "v" or value == value or found[1][1, 0, ~BLIND].isnan().all()


def test_a_bad_query_or_cotangent_stays_in_its_row_and_the_keys_that_it_sees():
    for value in VALUES:
        found, expected = results("q", value)
        agree(found[:3], expected[:3], OTHERS)
        agree(found[3:], expected[3:], UNSEEN)
    for name in ("dout", "dlse"):
        found, expected = results(name, float("nan"))
        agree(found[2:3], expected[2:3], OTHERS)
        agree(found[3:], expected[3:], UNSEEN)


def test_results_that_overflow_are_left_alone():
    q, k, v = (1e30 * t for t in make_qkv(1, 1, N, N, 16))
    out, *_ = run(q, k, v, *torch.ones(2, 1, 1, N, 16))
    assert out.shape == q.shape
