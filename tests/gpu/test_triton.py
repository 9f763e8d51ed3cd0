"""The Triton kernels on a GPU, in every dtype, against the float64 oracle."""

import pytest
import torch
from attention_cases import GPU_LENGTHS, HEAD_DIMS, Case, check, random_case

import masks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("seed", range(150))
def test_random_problem(seed):
    check(random_case(seed, GPU_LENGTHS, (*HEAD_DIMS, 96, 192, 256), DTYPES), "triton", "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("length", [1, 100, 128, 1000, 4097])
def test_dense(length, head_dim, dtype):
    check(Case(length, length, head_dim, dtype), "triton", "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_structured_masks_at_ragged_length(head_dim, dtype):
    mask = masks.local(150) | masks.butterfly(128) | masks.global_tokens(40)
    for block in ((128, 128), (64, 64), (64, 128), (32, 16)):
        check(Case(4097, 4097, head_dim, dtype, mask=mask, block_size=block), "triton", "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_and_dropout(dtype):
    mask = masks.random_blocks(0.3, block=64, per_head=True)
    shape = {"n_q": 1000, "n_k": 700, "head_dim": 64, "batch": 2, "heads": 6, "kv_heads": 2}
    case = Case(**shape, dtype=dtype, mask=mask, dropout_p=0.2, token_major=True)
    check(case, "triton", "cuda")
