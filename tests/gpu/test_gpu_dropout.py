"""Dropout on a GPU: the bits of the reference, in every pass."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.dropout import keep_mask, key_table
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.gpu_calls import GPU

pytestmark = GPU


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 32), (16, 48)])
def test_same_entries_are_dropped_as_in_the_reference(block, backend):
    # with equal scores and v the identity, out holds the probabilities themselves
    batch, heads, n_q, n_k, p = 2, 3, 500, 128, 0.3
    mask = masks.dense().build(n_q, n_k, block_size=block)
    dtype = torch.float16
    q = torch.zeros(batch, heads, n_q, n_k, device="cuda", dtype=dtype)
    k = torch.zeros(batch, heads, n_k, n_k, device="cuda", dtype=dtype)
    v = torch.eye(n_k, device="cuda", dtype=dtype).expand(batch, heads, n_k, n_k).contiguous()
    for seed in (0, 7, 2**40 + 9):
        for m in (mask, None):
            options = {"dropout_p": p, "seed": seed}
            kept = sparseflash.attention(q, k, v, m, backend=backend, **options) > 0
            expected = keep_mask(torch.tensor([seed], device="cuda"), batch, heads, n_q, n_k, p)
            assert torch.equal(kept, expected)
            # the columns see them too: dv = (kept probabilities)^T dout, with dout the identity
            v_leaf = v.detach().requires_grad_()
            out = sparseflash.attention(q, k, v_leaf, m, backend=backend, **options)
            dout = torch.zeros_like(out)
            rows = torch.arange(n_k, device="cuda")
            dout[:, :, rows, rows] = 1
            (dv,) = torch.autograd.grad(out, v_leaf, dout)
            assert torch.equal(dv.mT > 0, expected[:, :, :n_k])


@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize(
    ("mask", "block", "kv_heads", "n", "deterministic"),
    [
        ("dense", 128, 4, 1999, False),
        ("dense", 128, 4, 2048, True),
        ("causal", 128, 2, 1999, False),
        ("causal", 128, 4, 2048, True),
        ("random_blocks(0.125, block=128, seed=1)", 128, 4, 2048, False),  # two passes: few keys
        ("random_blocks(0.5, block=64, seed=1)", 64, 2, 2048, False),
        ("random_blocks(0.5, block=64, seed=1)", 16, 4, 1024, False),
    ],
)
def test_output_and_gradients_are_those_of_float64(
    head_dim, mask, block, kv_heads, n, deterministic
):
    torch.manual_seed(0)
    qkv = make_qkv(
        1, 4, n, n, head_dim, kv_heads=kv_heads, dtype=torch.bfloat16, device="cuda",
        requires_grad=True,
    )  # fmt: skip
    blocks = None if mask == "dense" else masks.parse(mask).build(n, block_size=block)
    dout, seed, p = torch.randn_like(qkv[0]), torch.tensor([2**40 + 9], device="cuda"), 0.3
    out, lse = sparseflash.attention(
        *qkv, blocks, dropout_p=p, seed=seed, return_lse=True, deterministic=deterministic
    )
    dlse = torch.full_like(lse, 0.1)
    found = (out, lse, *torch.autograd.grad((out, lse), qkv, (dout, dlse)))
    places, heads = torch.arange(0, n, 16, device="cuda"), torch.arange(4, device="cuda")
    again, lse = sparseflash.attention(
        *qkv, blocks, dropout_p=p, seed=key_table(seed, heads[None], places, places),
        return_lse=True, deterministic=deterministic,
    )  # fmt: skip
    again = (again, lse, *torch.autograd.grad((again, lse), qkv, (dout, dlse)))
    for name, a, b in zip("out lse dq dk dv".split(), found, again, strict=True):
        # parts of dq, and of split tiles, are added in any order
        assert torch.equal(a, b) or (not deterministic and relative_error(a, b) < 5e-3), name
    q, k, v = exact = [t.detach().double().requires_grad_() for t in qkv]
    allowed = None if blocks is None else torch.from_numpy(blocks.to_dense()).cuda()
    keep = keep_mask(seed, 1, 4, n, n, p)
    out, lse = oracle(q, k, v, allowed, keep=keep, dropout_p=p)
    exact = (out, lse, *torch.autograd.grad((out, lse), exact, (dout.double(), dlse.double())))
    for name, a, e in zip("out lse dq dk dv".split(), found, exact, strict=True):
        assert relative_error(a, e) < 1e-2, name
