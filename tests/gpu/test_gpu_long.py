"""Sequences of 262,144 and 1,048,576 tokens, and tensors past 2**31 elements, against the float64
oracle on blocks of queries and of keys: the first, the last, and some between.
"""

import pytest
import torch

import masks
import sparseflash
from sparseflash.schedule.blocks import schedule_for
from sparseflash.testing import relative_error
from tests.gpu_calls import GPU, need_memory, pairwise
from tests.sampled_oracle import SampledOracle

pytestmark = [*GPU, pytest.mark.slow, pytest.mark.usefixtures("empty_gpu")]

BLOCK = 128
# rounding of the probabilities and of the result leaves about 4e-3 of bfloat16; a key that is left
# out of the 4,000 of a row leaves 1.6e-2
LIMIT = 1e-2


def check(n, heads, head_dim, mask, blocks, key_blocks, check_heads, **options):
    """Forward and backward at length n, then the given blocks of the given heads."""
    shape = (1, heads, n, head_dim)
    need_memory(10 * 2 * heads * n * head_dim + 3 * 4 * heads * n * head_dim // 2 + 8 * 2**30)
    generator = torch.Generator("cuda").manual_seed(n + heads)

    def normal():
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = (normal().requires_grad_() for _ in range(3))
    dout = normal()
    out, lse = sparseflash.attention(q, k, v, mask, return_lse=True, **options)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda")
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    schedule = schedule_for(mask, n, n, 1, heads, "cuda:0")
    for h in check_heads:
        inputs = (t[0, h].detach() for t in (q, k, v, dout, dlse))
        sampled = SampledOracle(*inputs, schedule, slice_=h if schedule.heads > 1 else 0)
        for block in blocks:
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            rows = sampled.rows(block)
            assert relative_error(lse[0, h, own], rows.lse) < 1e-4
            for name, x, e in (("out", out, rows.out), ("dq", dq, rows.dq)):
                error = relative_error(x[0, h, own], e)
                assert error < LIMIT, f"{name} of head {h}, block {block}: {error:.3g}"
        for block in key_blocks:
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            for name, x, e in zip(("dk", "dv"), (dk, dv), sampled.columns(block), strict=True):
                error = relative_error(x[0, h, own], e)
                assert error < LIMIT, f"{name} of head {h}, block {block}: {error:.3g}"


PATTERN = masks.local(256) | masks.butterfly(128)


@pairwise(n=[2**18, 2**20], heads=[1, 8], options=[{}, {"deterministic": True}])
def test_sparse_pattern(n, heads, options, backend):
    last = n // BLOCK - 1
    assert PATTERN.build(n).density < 0.01
    check(n, heads, 128, PATTERN, (0, 1, last // 3, last), (0, last // 2 + 5, last), {0, heads - 1},
          backend=backend, **options)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "same_bits"])
@pytest.mark.parametrize("n", [2**18, 2**20])
def test_global_tokens(n, options, backend):
    """Rows and columns that are thousands of times as long as the rest."""
    mask = PATTERN | masks.global_tokens(64)
    last = n // BLOCK - 1
    key_blocks = (0, 1, last) if n == 2**18 else (1, last)  # the first takes all rows to check
    check(n, 1, 64, mask, (0, 1, last), key_blocks, [0], backend=backend, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scattered_blocks(head_dim, backend):
    """At head dim 128 the hopper backward takes two passes by itself."""
    mask = masks.random_blocks(0.005)
    check(2**18, 2, head_dim, mask, (0, 1000, 2047), (3, 2047), [0, 1], backend=backend)


def test_heads_of_their_own(backend):
    mask = masks.random_blocks(count=8, per_head=True) | masks.local(64)
    check(2**18, 4, 64, mask, (0, 1000, 2047), (3, 2047), [0, 3], backend=backend)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "same_bits"])
def test_tensors_past_32_bits_of_elements(options, backend):
    """17 heads of 2**20 tokens of 128: the last head begins at 2**31 elements."""
    n, last = 2**20, 2**13 - 1
    check(n, 17, 128, masks.local(100), (0, last), (0, last), [0, 15, 16],
          backend=backend, **options)  # fmt: skip
