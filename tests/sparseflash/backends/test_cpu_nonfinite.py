"""NaN and infinities in the inputs of the CPU backend: which results they may reach."""

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import make_qkv, relative_error

N, TOKEN = 48, 20
DENSE = np.tril(np.ones((N, N), bool))
DENSE[40:, 18:22] = False  # late queries skip the tokens around the bad one
VALUES = [float("nan"), float("inf"), float("-inf")]
TERMS = sparseflash.Terms(torch.tensor([0.5, 2.0]), softcap=3.0, bias=torch.eye(2, 5))
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
    "options", [{}, {"dropout_p": 0.4, "seed": 3}, {"terms": TERMS}], ids=["", "dropout", "terms"]
)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", "kv")
def test_a_bad_key_does_not_reach_the_rows_that_do_not_see_it(name, value, kv_heads, options):
    found, expected = results(name, value, kv_heads, **options)
    agree(found[:3], expected[:3], BLIND)
    agree(found[3:], expected[3:], slice(40, N))  # keys that no row with the bad one sees
    assert name == "k" or not found[0][1, 0, ~BLIND].isfinite().all(-1).any()
    assert name == "v" or value == value or found[1][1, 0, ~BLIND].isnan().all()


@pytest.mark.parametrize("value", VALUES)
def test_a_bad_query_does_not_reach_the_keys_that_it_does_not_see(value):
    found, expected = results("q", value)
    agree(found[:3], expected[:3], OTHERS)
    agree(found[3:], expected[3:], UNSEEN)


@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_a_cotangent_that_is_not_finite_stays_in_its_row(name):
    found, expected = results(name, float("nan"))
    agree(found[2:3], expected[2:3], OTHERS)
    agree(found[3:], expected[3:], UNSEEN)


def test_results_that_overflow_are_left_alone():
    q, k, v = (1e30 * t for t in make_qkv(1, 1, N, N, 16))
    out, *_ = run(q, k, v, *torch.ones(2, 1, 1, N, 16))
    assert out.shape == q.shape
