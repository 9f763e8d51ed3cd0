"""Attention of q, k and v in one tensor, whose gradient the kernels write in place."""

import pytest
import torch

import masks
from sparseflash import BlockSparseAttention
from tests.gpu_calls import EPS, GPU, MASK
from tests.qkv_cases import check_operator, gradients

pytestmark = GPU
LONG = masks.local(100) | masks.global_tokens(64)  # long rows and columns, cut into parts


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("n", "mask", "dropout_p"),
    [(1000, None, 0.0), (1000, MASK, 0.1), (8192, LONG, 0.0)],
    ids=["dense", "sparse", "long"],
)
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(32, 2), (64, 1), (80, 2), (128, 2), (192, 2)])
def test_results_and_gradients_are_those_of_the_parts(
    monkeypatch, backend, head_dim, kv_heads, n, mask, dropout_p, deterministic
):
    if backend == "hopper" and head_dim > 128 and (deterministic or dropout_p):
        pytest.skip("no such backward")
    torch.manual_seed(0)
    shape = 2, n, 2 + 2 * kv_heads, head_dim
    qkv = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    check_operator(
        monkeypatch, backend, qkv, kv_heads, mask, dropout_p=dropout_p,
        deterministic=deterministic, in_place=True, exact=deterministic or backend == "triton",
    )  # fmt: skip


@pytest.mark.parametrize("mask", [None, MASK], ids=["dense", "sparse"])
def test_a_compiled_layer_equals_the_eager_one(mask):
    torch.manual_seed(0)
    layer = BlockSparseAttention(64, 2, mask=mask).cuda()
    x = torch.randn(4, 1024, 64, device="cuda", requires_grad=True)
    results = []
    torch.compiler.reset()
    for call in (layer, torch.compile(layer, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            out = call(x)
        results.append((out, *gradients(out.float(), x, *layer.parameters())))
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).float().norm() < 2 * EPS * theirs.float().norm()
