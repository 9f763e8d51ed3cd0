"""NaN and numbers that overflow: they reach what may see them, and nothing else."""

from dataclasses import replace

import pytest
import torch

from tests import op_cases
from tests.nan_cases import check, check_decode, random_nan_case
from tests.op_cases import INTERPRETED

LENGTHS = 16, 63, 100
SEEDS = range(10)


@pytest.mark.parametrize("seed", SEEDS)
def test_reference(seed):
    check(random_nan_case(seed, LENGTHS, (torch.float32, torch.float64)), "reference")


@pytest.mark.parametrize("seed", SEEDS)
def test_cpu(seed):
    case = random_nan_case(seed, LENGTHS, (torch.float32, torch.bfloat16, torch.float16))
    check(case, "cpu", contained=True)


@pytest.mark.parametrize("value", [3e38, -3e38])
@pytest.mark.parametrize("seed", SEEDS)
def test_products_that_overflow(seed, value):
    case = random_nan_case(seed, LENGTHS, (torch.float32, torch.bfloat16))
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


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize("backend", op_cases.BACKENDS)
def test_lengths(backend, seed):
    """As with a mask that hides what is beyond the lengths."""
    case = random_nan_case(seed, (63, 100), (torch.float32,))
    case = replace(case, n_k=case.n_q, mask=None, terms=(), dropout_p=0.0)
    check(case, backend, lengths=[case.n_q - 5, case.n_q // 2])
