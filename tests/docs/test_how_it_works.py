"""The NumPy attentions of the guide against the float64 oracle, at shapes that divide nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

import masks
from sparseflash.testing import assert_close, make_qkv, oracle
from tests.docs.test_guide import BLOCK

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "how_it_works.md"


@pytest.fixture(scope="module")
def guide():
    namespace: dict = {"__name__": PAGE.stem}
    for block in BLOCK.findall(PAGE.read_text()):
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace


def inputs(n_q=150, n_k=101, d=24, v_dim=40):
    return make_qkv(1, 1, n_q, n_k, d, v_head_dim=v_dim, dtype=torch.float64, requires_grad=True)


def arrays(*tensors):
    return [x.detach()[0, 0].numpy() for x in tensors]


def check(name, found, expected):
    assert_close(torch.from_numpy(found), expected[0, 0], name=name)


@pytest.mark.parametrize("tiles", [(64, 32), (7, 13), (150, 101), (1, 1)])
def test_the_attentions_are_the_oracle(guide, tiles):
    q, k, v = inputs()
    out, lse = oracle(q, k, v)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, dout = arrays(q, k, v, dout)

    found, found_lse = guide["flash_forward"](q, k, v, *tiles)
    check("out", found, out)
    check("lse", found_lse, lse)
    backward = guide["flash_backward"](q, k, v, found, found_lse, dout, *tiles)
    plain, p = guide["standard_forward"](q, k, v)
    check("standard out", plain, out)
    standard = guide["standard_backward"](q, k, v, p, dout)
    for name, grad, right, expected in zip("qkv", backward, standard, grads, strict=True):
        check(f"d{name}", grad, expected)
        check(f"standard d{name}", right, expected)


@pytest.mark.parametrize("text", ["local:20", "random:0.2", "global:3", "causal", "none"])
@pytest.mark.parametrize("block", [16, (32, 64)])
def test_the_block_sparse_loop_is_the_oracle(guide, text, block):
    q, k, v = inputs()
    n_q, n_k = q.shape[2], k.shape[2]
    if text == "none":  # the first queries see nothing
        dense = np.random.default_rng(0).random((n_q, n_k)) < 0.02
        dense[:40] = False
        blocks = masks.BlockMask.from_dense(dense, block)
    else:
        blocks = masks.parse(text).build(n_q, n_k, block)
    out, lse = oracle(q, k, v, torch.from_numpy(blocks.to_dense()))
    found, found_lse = guide["block_sparse_forward"](*arrays(q, k, v), blocks)
    check("out", found, out)
    check("lse", found_lse, lse)


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_safe_and_online_softmax_are_that_of_torch(guide, shift):
    x = torch.randn(77, dtype=torch.float64) * 5 + shift
    for name in ("safe_softmax", "online_softmax"):
        assert_close(torch.from_numpy(guide[name](x.numpy())), x.softmax(0), name=name)
