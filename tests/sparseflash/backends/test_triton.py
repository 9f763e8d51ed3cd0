"""The Triton kernels in Triton's interpreter: float32 and float16 against the float64 oracle."""

import pytest
import torch

import masks
from tests.attention_cases import HEAD_DIMS, INTERPRETER_LENGTHS, Case, check, random_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the kernels on it"
)


@pytest.mark.parametrize("seed", range(24))
def test_random_problem(seed):
    check(
        random_case(seed, INTERPRETER_LENGTHS, HEAD_DIMS, (torch.float32, torch.float16)),
        "triton",
        "cpu",
    )


@pytest.mark.parametrize("length", [1, 63, 128, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense(length, dtype):
    check(Case(length, length, 64, dtype), "triton", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_partial_blocks_and_full_blocks_in_one_row(dtype):
    mask = masks.local(150) | masks.global_tokens(40)
    check(Case(390, 390, 64, dtype, mask=mask, block_size=(128, 128)), "triton", "cpu")


def test_everything_masked_gives_zeros():
    empty = masks.causal() & ~masks.causal()
    check(Case(70, 70, 16, mask=empty, block_size=(32, 32)), "triton", "cpu")
