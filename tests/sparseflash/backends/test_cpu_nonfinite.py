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


def run(q, k, v, dout, **options):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    mask = masks.mask_from(DENSE).build(N, N, 16)
    out, lse = sparseflash.attention(*inputs, mask, backend="cpu", return_lse=True, **options)
    return out, lse, *torch.autograd.grad((out * dout).sum(), inputs)


def problem(kv_heads: int, value: float, name: str):
    """Inputs, the same with a bad token, and a cotangent."""
    clean = dict(zip("qkv", make_qkv(2, 2, N, N, 16, kv_heads=kv_heads), strict=True))
    bad = {key: t.clone() for key, t in clean.items()}
    bad[name][1, 0, TOKEN, 3] = value
    dout = torch.randn(2, 2, N, 16, generator=torch.Generator().manual_seed(1))
    return clean, bad, dout


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4, "seed": 3}], ids=["", "dropout"])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", "kv")
def test_a_bad_key_does_not_reach_the_rows_that_do_not_see_it(name, value, kv_heads, options):
    clean, bad, dout = problem(kv_heads, value, name)
    blind = torch.from_numpy(~DENSE[:, TOKEN])
    results, wanted = (run(**inputs, dout=dout, **options) for inputs in (bad, clean))
    for found, expected, what in zip(results[:3], wanted[:3], ("out", "lse", "dq"), strict=True):
        assert found[:, :, blind].isfinite().all(), what
        assert relative_error(found[:, :, blind], expected[:, :, blind]) < 1e-5, what
    seeing = results[0][1, 0, torch.from_numpy(DENSE[:, TOKEN])]
    assert name == "k" or not seeing.isfinite().all(-1).any()


@pytest.mark.parametrize("value", VALUES)
def test_a_bad_query_does_not_reach_the_keys_that_it_does_not_see(value):
    clean, bad, dout = problem(1, value, "q")
    unseen = torch.from_numpy(~DENSE[TOKEN])
    others = torch.arange(N) != TOKEN
    results, wanted = (run(**inputs, dout=dout) for inputs in (bad, clean))
    for found, expected in zip(results[:3], wanted[:3], strict=True):
        assert relative_error(found[:, :, others], expected[:, :, others]) < 1e-5
    for found, expected in zip(results[3:], wanted[3:], strict=True):
        assert relative_error(found[:, :, unseen], expected[:, :, unseen]) < 1e-5


def test_a_cotangent_that_is_not_finite_stays_in_its_row():
    clean, _, dout = problem(1, 0.0, "q")
    wanted = run(**clean, dout=dout)
    dout[1, 0, TOKEN, 3] = float("nan")
    found = run(**clean, dout=dout)
    others, unseen = torch.arange(N) != TOKEN, torch.from_numpy(~DENSE[TOKEN])
    assert relative_error(found[2][:, :, others], wanted[2][:, :, others]) < 1e-5
    for i in (3, 4):
        assert relative_error(found[i][:, :, unseen], wanted[i][:, :, unseen]) < 1e-5


def test_results_that_overflow_are_left_alone():
    q, k, v = (1e30 * t for t in make_qkv(1, 1, N, N, 16))
    out, *_ = run(q, k, v, torch.ones(1, 1, N, 16))
    assert out.shape == q.shape
