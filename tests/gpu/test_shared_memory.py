"""What other kernels left in shared memory may not reach a result."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import make_qkv, relative_error
from tests.gpu_calls import HOPPER, RESULTS, pairwise

gluon = pytest.importorskip("triton.experimental.gluon", exc_type=ImportError)
gl = gluon.language

pytestmark = HOPPER

MASKS = {
    # name: mask, block size
    "dense": (None, 128),
    "causal": (masks.causal(), 128),
    "structured": (masks.local(300) | masks.global_tokens(30), 64),
    "small blocks": (masks.random_blocks(0.2, block=16), 16),
}


@gluon.jit
def fill_with_nan(found, ROWS: gl.constexpr, num_warps: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = gl.allocate_shared_memory(gl.float32, [ROWS, 256], PLAIN)
    shared.store(gl.full([ROWS, 256], float("nan"), gl.float32, LAYOUT))
    x = shared.load(LAYOUT)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    gl.store(found + row, gl.sum(gl.where(x != x, 1.0, 0.0), 1))


def spoil():
    """NaN in 128 and in the other 64 KiB of every multiprocessor's shared memory."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found = torch.zeros(128, device="cuda")
    for rows in (128, 64):
        fill_with_nan[(4 * multiprocessors,)](found, rows, num_warps=8)
    assert (found == 256).all()


@pairwise(head_dim=[32, 40, 64, 128, 256], name=MASKS, kv_heads=[2, 4], deterministic=[False, True])
def test_nan_in_shared_memory_does_not_leak(head_dim, name, kv_heads, deterministic):
    mask, block_size = MASKS[name]
    n = 1500
    qkv = make_qkv(
        2, 4, n, n, head_dim, kv_heads=kv_heads, dtype=torch.bfloat16, device="cuda",
        requires_grad=True,
    )  # fmt: skip
    blocks = None if mask is None else mask.build(n, block_size=block_size)
    # above head dim 128 hopper has no deterministic backward: "auto" takes its forward
    backend = "auto" if deterministic and head_dim > 128 else "hopper"
    options = {"backend": backend, "deterministic": deterministic, "return_lse": True}
    dout = torch.randn_like(qkv[0])

    def call(before):
        before()
        out, lse = sparseflash.attention(*qkv, blocks, **options)
        before()
        return out, lse, *torch.autograd.grad(out, qkv, dout)

    expected = call(lambda: None)
    for _ in range(3):
        found = call(spoil)
        for name, a, e in zip(RESULTS, found, expected, strict=True):
            if deterministic or name in ("out", "lse"):
                assert torch.equal(a, e), name
            else:
                assert relative_error(a, e) < 1e-3, name
