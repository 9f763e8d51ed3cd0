"""The CPU backend against the float64 oracle."""

import math

import numpy as np
import pytest
import torch

import masks
from sparseflash import attention, score_rules
from sparseflash.backends import cpu, cpu_blocks, reference
from sparseflash.schedule.blocks import schedule_for
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.attention_cases import GPU_LENGTHS, HEAD_DIMS, Case, check, random_case
from tests.notes import seeds
from tests.problems import run_backend

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", seeds(9))
def test_random_problem(seed):
    check(random_case(seed, GPU_LENGTHS[:5], HEAD_DIMS, DTYPES), "cpu", "cpu")


@pytest.mark.parametrize("seed", seeds(2, 100))
def test_random_problem_in_small_chunks_and_by_threads(seed, monkeypatch, two_threads):
    check(random_case(seed, GPU_LENGTHS[:4], HEAD_DIMS, DTYPES), "cpu", "cpu")
    monkeypatch.setattr(cpu_blocks, "BUFFER_NUMBERS", 2**13)
    check(random_case(seed, GPU_LENGTHS[:4], HEAD_DIMS, (torch.float64,)), "cpu", "cpu")


def calls_of_the_fused_operator(mask, n=256, dtype=torch.float32, **options) -> int:
    """In a forward and its backward, whose gradients are those of the reference."""
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 4, n, n, 32, kv_heads=2, dtype=dtype))
    dout = torch.randn(q.shape).to(dtype)

    def gradients(backend):
        out = attention(q, k, v, mask, backend=backend, **options)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    with torch.profiler.profile() as profile:
        found = gradients("cpu")
    for a, b in zip(found, gradients("reference"), strict=True):
        assert relative_error(a, b.double()) < 3 * torch.finfo(dtype).eps ** 0.8
    events = {event.key: event.count for event in profile.key_averages()}
    names = [f"aten::_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]
    forward, backward = (events.get(name, 0) for name in names)
    assert forward == backward
    return forward


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_calls_take_the_fused_operator(dtype):
    assert calls_of_the_fused_operator(None, 200, dtype) == 1
    assert calls_of_the_fused_operator(masks.dense(), 256, dtype) == 1


def test_what_the_fused_operator_does_not_compute_goes_by_blocks():
    assert calls_of_the_fused_operator(masks.causal()) == 0
    assert calls_of_the_fused_operator(None, dropout_p=0.2, seed=3) == 0
    assert calls_of_the_fused_operator(None, score=score_rules.softcap(2.0)) == 0


def test_a_query_without_a_finite_score_is_empty_in_a_dense_call():
    q, k, v = make_qkv(1, 1, 64, 64, 16)
    q[0, 0, 3], k = -math.inf, k.abs()
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    assert lse[0, 0, 3] == -math.inf and not out[0, 0, 3].any() and lse.isfinite().sum() == 63


def test_a_nan_in_a_cotangent_stays_in_its_row_of_a_dense_call():
    q, k, v = make_qkv(1, 1, 64, 64, 16, requires_grad=True)
    dout = torch.randn(q.shape)
    dout[0, 0, 3, 5] = math.nan
    dq, _, dv = torch.autograd.grad(attention(q, k, v, backend="cpu"), (q, k, v), dout)
    assert dq[0, 0, 3].isnan().all() and dq.isfinite().sum() == 63 * 16
    assert dv[..., 5].isnan().all() and dv.isfinite().sum() == 64 * 15


@pytest.mark.parametrize("outer, kv_heads", [((), 1), ((4,), 2), ((3, 1), 4), ((3, 4), 1)])
def test_masks_that_differ_with_shared_keys(outer, kv_heads):
    array = np.random.default_rng(0).random((*outer, 100, 80)) < 0.2
    mask = masks.mask_from(array)
    case = Case(100, 80, 16, torch.float64, 3, 4, kv_heads, mask, (32, 16), token_major=True)
    check(case, "cpu", "cpu")


def run(backend, qkv, schedule, dout=None, dlse=None, seed=None, **options):
    dout = qkv[0] if dout is None else dout
    return run_backend(backend, qkv, schedule, dout, dlse, seed=seed, **options)


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", [cpu, reference])
def test_empty_rows_stay_clean_whatever_comes_back(backend):
    mask = masks.mask_from(np.tril(np.ones((100, 100), dtype=bool), -30))  # 30 empty rows
    qkv = make_qkv(1, 2, 100, 100, 16)
    schedule = schedule_for(mask, 100, 100, 1, 2, "cpu", 16)
    dlse = torch.full((1, 2, 100), -math.inf)
    dlse[..., 30:] = 1.0
    out, lse, dq, dk, dv = run(backend, qkv, schedule, torch.randn_like(qkv[0]), dlse)
    assert (lse[..., :30] == -math.inf).all() and lse[..., 30:].isfinite().all()
    assert (out[:, :, :30] == 0).all() and (dq[:, :, :30] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_large_scores_do_not_overflow():
    q, k, v = (1000 * x for x in make_qkv(1, 1, 64, 64, 16))
    schedule = schedule_for(masks.causal(), 64, 64, 1, 1, "cpu", 16)
    out, lse = run_backend(cpu, (q, k, v), schedule, scale=0.25)
    expected = oracle(q, k, v, torch.ones(64, 64).tril().bool(), 0.25)
    assert relative_error(lse, expected[1]) < 1e-6
    assert relative_error(out, expected[0]) < 1e-3  # the scores are exact to 1 in about 10 ** 7


def test_threads_keep_their_number_and_the_gradients_their_bits(two_threads):
    qkv = make_qkv(2, 2, 200, 200, 16)
    schedule = schedule_for(masks.butterfly(16), 200, 200, 2, 2, "cpu", 16)
    assert_equal(*(run(cpu, qkv, schedule, deterministic=True) for _ in range(2)))
    assert torch.get_num_threads() == 2


def test_default_device_does_not_matter():
    qkv = make_qkv(1, 2, 40, 40, 8)
    schedule = schedule_for(masks.causal(), 40, 40, 1, 2, "cpu", 16)
    options = {"seed": torch.tensor([1]), "dropout_p": 0.5}
    expected = run(cpu, qkv, schedule, **options)
    with torch.device("meta"):
        assert_equal(run(cpu, qkv, schedule, **options), expected)
