"""Maps of blocks that a user gives: on the host, on the device, and for each key head."""

import random

import numpy as np
import pytest
import torch

import masks
import sparseflash
from masks import BlockMask
from sparseflash.select import Selection
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.op_cases import BACKENDS


def random_map(seed: int) -> tuple[np.ndarray, np.ndarray, dict, tuple[int, int, int]]:
    """A map (batch, heads, rows, cols), the same for every pair of tokens, arguments, and batch,
    heads and key heads of q.
    """
    rng = random.Random(seed)
    batch, kv_heads, group = rng.choice([1, 2]), rng.choice([1, 2, 3]), rng.choice([1, 2])
    heads = kv_heads * group
    block = rng.choice([16, 32, 48]), rng.choice([16, 32, 80])
    n_q, n_k = rng.randrange(1, 130), rng.randrange(1, 130)
    shape = rng.choice([1, batch]), rng.choice([1, kv_heads, heads]), -(-n_q // block[0])
    layout = np.random.default_rng(seed).integers(0, 3, (*shape, -(-n_k // block[1])))
    dense = np.kron(layout != 0, np.ones(block, bool))[..., :n_q, :n_k]
    given = {"block_size": block, "n_q": n_q, "n_k": n_k}
    return layout, dense, given, (batch, heads, kv_heads)


@pytest.mark.parametrize(
    "backend, seed", [(b, seed) for b in BACKENDS for seed in (range(6) if b != "triton" else (3,))]
)
def test_a_map_of_blocks(backend: str, seed: int):
    layout, dense, given, (batch, heads, kv_heads) = random_map(seed)
    built = BlockMask.from_layout(layout, **given)
    picked = Selection.from_layout(torch.from_numpy(layout), **given, max_blocks=layout.size)
    assert np.array_equal(built.to_dense(), dense) and picked.to_block_mask() == built
    assert np.array_equal(built.layout(), 2 * (layout != 0))
    assert BlockMask.from_layout(built.layout(), **given) == built
    qkv = make_qkv(
        batch, heads, given["n_q"], given["n_k"], 16, kv_heads=kv_heads, requires_grad=True
    )
    seen = torch.from_numpy(dense)
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(heads // seen.shape[1], 1)
    weight = torch.randn(batch, heads, given["n_q"], 16)

    def run(out, lse, inputs):
        return out, lse, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)

    exact = [t.detach().double().requires_grad_() for t in qkv]
    wanted = run(*oracle(*exact, seen), exact)
    for mask in (built, picked, sparseflash.plan(picked, *qkv, backend=backend)):
        found = run(*sparseflash.attention(*qkv, mask, return_lse=True, backend=backend), qkv)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            assert relative_error(a, b) < 1e-5, f"{name} of {type(mask).__name__}"


def test_a_map_inside_a_compiled_function(fresh_dynamo):
    q, k, v = make_qkv(2, 4, 100, 90, 16, kv_heads=2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, layout):
        mask = Selection.from_layout(layout, 32, n_q=100, n_k=90, max_blocks=20)
        return sparseflash.attention(q, k, v, mask, backend="cpu")

    for seed in range(2):
        layout = torch.rand(2, 2, 4, 3, generator=torch.Generator().manual_seed(seed)) < 0.3
        mask = BlockMask.from_layout(layout, 32, n_q=100, n_k=90)
        expected = sparseflash.attention(q, k, v, mask, backend="cpu")
        torch.testing.assert_close(step(q, k, v, layout), expected)


def test_an_array_for_each_key_head():
    q, k, v = make_qkv(1, 4, 40, 40, 16, kv_heads=2)
    array = torch.rand(2, 40, 40) < 0.4
    expected, _ = oracle(q, k, v, array.repeat_interleave(2, 0))
    for mask in (array, masks.mask_from(array)):
        assert relative_error(sparseflash.attention(q, k, v, mask), expected) < 1e-5
        assert relative_error(sparseflash.decode(q, k, v, masks.mask_from(array)), expected) < 1e-5


@pytest.mark.parametrize("make", [BlockMask.from_layout, Selection.from_layout])
def test_refusals(make):
    layout = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="float32"):
        make(layout.float())
    with pytest.raises(ValueError, match=r"layout has shape \(3,\)"):
        make(layout[0])
    with pytest.raises(ValueError, match="n_k is 200"):
        make(layout, 64, n_k=200)
    with pytest.raises(ValueError, match="block_size is 24"):
        make(layout, 24)
    q, k, v = make_qkv(1, 6, 256, 384, 16, kv_heads=3)
    with pytest.raises(ValueError, match="heads 2"):
        sparseflash.attention(q, k, v, make(torch.ones(2, 2, 3, dtype=torch.bool)))


def test_a_bound_that_is_too_low():
    with pytest.raises(RuntimeError, match="max_blocks"):
        Selection.from_layout(torch.ones(2, 3, dtype=torch.bool), max_blocks=5)
