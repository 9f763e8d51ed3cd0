"""The dense backend against the float64 oracle, and the oracle of a few blocks."""

import pytest
import torch

import masks
from sparseflash.schedule.blocks import schedule_for
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.attention_cases import GPU_LENGTHS, HEAD_DIMS, check, random_case
from tests.notes import seeds
from tests.sampled_oracle import SampledOracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", seeds(7))
def test_random_problem(seed):
    check(random_case(seed, GPU_LENGTHS[:4], HEAD_DIMS, DTYPES), "reference", "cpu")


def test_sampled_blocks_are_those_of_the_whole():
    n, heads, block = 384, 2, (64, 32)
    mask = masks.heads(masks.local(40) | masks.global_tokens(9), masks.butterfly(32))
    mask = mask & ~masks.local(3)  # some rows of the second head are empty
    q, k, v = (t.double().requires_grad_() for t in make_qkv(1, heads, n, n, 16))
    blocks = mask.build(n, block_size=block, heads=heads)
    out, lse = oracle(q, k, v, torch.from_numpy(blocks.to_dense()))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    loss = (out * dout).sum() + (lse.masked_fill(lse.isinf(), 0.0) * dlse).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    schedule = schedule_for(blocks, n, n, 1, heads, "cpu")
    for h in range(heads):
        x = [t[0, h].detach() for t in (q, k, v, dout, dlse)]
        sampled = SampledOracle(*x, schedule, slice_=h)
        for block_q in range(n // block[0]):
            own = slice(block_q * block[0], (block_q + 1) * block[0])
            rows = sampled.rows(block_q)
            for a, e in zip(rows[:3], (out, lse, dq), strict=True):
                assert relative_error(a, e[0, h, own]) < 1e-12
        for block_k in (0, 5, n // block[1] - 1):
            own = slice(block_k * block[1], (block_k + 1) * block[1])
            for a, e in zip(sampled.columns(block_k), (dk, dv), strict=True):
                assert relative_error(a, e[0, h, own]) < 1e-12
