"""Masks made on the device: their blocks, and random packings in one graph against float64."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import masks
import sparseflash
from masks.tiles import FULL
from sparseflash import packed
from sparseflash.testing import make_qkv, oracle

ROWS = 16  # that are compared of every packing
BLOCKS = [16, 32, (16, 48), (64, 16), 128]


def packings(n: int, count: int, documents: int, least: int | None = None) -> Iterator[Tensor]:
    """Random offsets of up to so many documents and some padding, in one shape.

    least: tokens that are no padding; half of n by default.
    """
    rng = np.random.default_rng(n)
    for _ in range(count):
        real = int(rng.integers(n // 2 if least is None else least, n + 1))
        cuts = np.sort(rng.integers(0, real + 1, int(rng.integers(documents))))
        yield packed.pad(torch.tensor([0, *cuts, real], dtype=torch.int32), documents + 1)


def errors_of_packings(
    n: int, count: int, least: int, device: str, compiler: str, backend: str = "auto",
    after_first: Callable[[], object] = lambda: None,
) -> tuple[Tensor, int]:  # fmt: skip
    """(count, 5): the relative errors of out, dq, dk and dv of every packing, and how much of out
    and dq is not 0 where it must be; and how many graphs were compiled.

    The incoming gradient is 0 but for the sampled rows. They alone then determine all of dk and dv,
    and dq is 0 elsewhere. Nothing is read from the device before the end.
    """

    def step(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        mask = packed.documents(cu_seqlens, n, causal=True)
        mask = sparseflash.plan(mask, q, k, v, backend=backend)
        out = sparseflash.attention(q, k, v, mask, backend=backend)
        assert isinstance(out, Tensor)
        return out

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = qkv = make_qkv(
        1, 4, n, n, 64, kv_heads=2, dtype=dtype, device=device, requires_grad=True
    )
    weight, key = torch.randn(1, 4, ROWS, 64, device=device).to(dtype), torch.arange(n)
    generator, found = torch.Generator().manual_seed(0), []
    for offsets in packings(n, count, 64, least):
        rows = torch.randint(int(offsets[-1]), (ROWS,), generator=generator).unique()
        first = offsets[torch.searchsorted(offsets, rows.int(), right=True) - 1]
        seen = ((key >= first[:, None]) & (key <= rows[:, None])).to(device)
        real, rows = int(offsets[-1]), rows.to(device)
        dout = torch.zeros_like(q)
        dout[:, :, rows] = weight[:, :, : len(rows)]
        out = compiled(q, k, v, offsets.to(device))
        grads = torch.autograd.grad(out, qkv, dout)
        exact = [t.detach().double() for t in (q[:, :, rows], k, v)]
        exact = [t.requires_grad_() for t in exact]
        expected, _ = oracle(exact[0], exact[1], exact[2], seen)
        wanted = torch.autograd.grad(expected, exact, dout[:, :, rows].double())
        dq, dk, dv = grads
        elsewhere = dq.index_fill(2, rows, 0.0).abs().amax() + out[:, :, real:].abs().sum()
        pairs = zip((out[:, :, rows], dq[:, :, rows], dk, dv), (expected, *wanted), strict=True)
        errors = [(a.double() - b).norm() / b.norm() for a, b in pairs]
        found.append(torch.stack([*errors, elsewhere.double()]).detach())
        if len(found) == 1:
            after_first()
    return torch.stack(found).cpu(), counter.frame_count


def assert_packings(errors: Tensor, graphs: int, limit: float) -> None:
    """One graph for all, and every error below the limit."""
    assert graphs == 1, f"{graphs} graphs"
    assert not errors.isnan().any(), f"NaN in packing {int(errors.isnan().any(1).nonzero()[0])}"
    for name, worst in zip(("out", "dq", "dk", "dv"), errors[:, :4].amax(0), strict=True):
        assert worst < limit, f"{name}: relative error {worst:.3g} above {limit}"
    assert not errors[:, 4].any(), "padding has an output, or a query without a gradient one"


# ---- blocks


def assert_same_blocks(found, expected: masks.BlockMask) -> None:
    """Block by block empty, partial or full alike, with the same pairs, within the bounds."""
    codes, theirs = found.codes.numpy(), expected.codes()
    for kind in (codes == FULL, theirs == FULL), (codes >= 0, theirs >= 0):
        assert np.array_equal(*kind)
    assert found.to_block_mask() == expected
    assert (codes != -2).sum() <= found.max_blocks and codes.max() < len(found.bits)


def as_tensor(rng, offsets) -> torch.Tensor:
    """Offsets of either type, some padded."""
    dtype = (torch.int32, torch.int64)[rng.integers(2)]
    return packed.pad(torch.tensor(offsets, dtype=dtype), len(offsets) + int(rng.integers(3)))
