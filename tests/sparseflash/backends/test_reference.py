"""The dense backend against the float64 oracle."""

import pytest
import torch

import masks
from sparseflash.backends import reference
from sparseflash.schedule import schedule_for
from sparseflash.testing import make_qkv
from tests.attention_cases import GPU_LENGTHS, HEAD_DIMS, check, random_case
from tests.problems import problem_of, refusal

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", range(40))
def test_random_problem(seed):
    check(random_case(seed, GPU_LENGTHS[:4], HEAD_DIMS, DTYPES), "reference", "cpu")


@pytest.mark.parametrize("n_q, n_k", [(64, 64), (1, 100), (257, 63)])
def test_dense_mask_is_the_mask(n_q, n_k):
    mask = (masks.local(20) | masks.butterfly(16)) & masks.causal()
    schedule = schedule_for(mask, n_q, n_k, 2, 2, "cpu", (32, 48))
    expected = torch.from_numpy(mask.build(n_q, n_k, (32, 48)).to_dense())
    assert torch.equal(reference.dense_mask(schedule), expected)


def test_long_inputs_are_refused():
    q = torch.zeros(1).expand(1, 1, 2**16, 1)
    assert "block by block" in (refusal("reference", problem_of(q, q, q)) or "")
    assert refusal("reference", problem_of(*make_qkv(1, 1, 4, 4, 4))) is None
