"""NaN on a GPU: it shows in all that may see it, and in no other row's LSE and maxima."""

from dataclasses import replace

import pytest
import torch

import sparseflash
from sparseflash.testing import make_qkv
from tests import nan_cases
from tests.attention_cases import DTYPES, GPU_LENGTHS, LOW
from tests.gpu_calls import GPU

pytestmark = GPU


@pytest.mark.parametrize("seed", range(60))
def test_attention(seed, backend):
    dtypes = LOW if backend == "hopper" else DTYPES
    case = nan_cases.random_nan_case(seed, GPU_LENGTHS, dtypes, (40, 64, 96, 128, 256))
    if backend == "hopper":
        case = replace(case, terms=tuple(name for name in case.terms if name == "sink"))
    nan_cases.check(case, backend, "cuda")


@pytest.mark.parametrize("seed", range(30))
def test_decode(seed):
    dtype = DTYPES[seed % 3]
    nan_cases.check_decode(seed, "triton", "cuda", dtype=dtype)


@pytest.mark.parametrize("n", [300, 1024, 2048])
def test_lengths(n, backend):
    """Below 1024 tokens padding is hidden, from there on it is skipped."""
    qkv = make_qkv(2, 2, n, n, 64, dtype=torch.bfloat16, device="cuda")
    qkv[0][0, 0, 7, 3] = torch.nan
    out, lse, maxima = sparseflash.attention(
        *qkv, lengths=[n - 40, n // 2], return_lse=True, return_max_scores=True, backend=backend
    )
    bad = torch.zeros(2, 2, n, dtype=torch.bool, device="cuda")
    bad[0, 0, 7] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(lse.isnan(), bad) and torch.equal(maxima.isnan(), bad)
