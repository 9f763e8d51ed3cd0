"""Video sparse attention of FastVideo, where it is installed: whole blocks of 64."""

import importlib
from typing import Any

import torch
from torch import Tensor

from experiments.bench.cases import DENSE, LAYOUTS, Case
from experiments.bench.provider import Attention, Provider, not_hopper

BLOCK = 64


class Vsa(Provider):
    """`block_sparse_fwd` and `block_sparse_bwd`, with lists that are made beforehand."""

    package, install, modules = "vsa", "pip install vsa==0.0.4", ("vsa_cuda",)

    def concerns(self, case: Case) -> bool:
        return case.mask != DENSE

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if reason := not_hopper(case, device, ("bfloat16",)):
            return reason
        if case.head_dim != case.value_dim or case.head_dim not in (64, 128):
            return f"takes head dims of 64 and 128, not {case.head_dim}, {case.value_dim}"
        if case.heads != case.kv_heads:
            return f"takes as many key as query heads, not {case.heads} and {case.kv_heads}"
        if case.layout != LAYOUTS[0]:
            return f"takes {LAYOUTS[0]} tensors, not {case.layout}"
        if (case.block_q, case.block_k) != (BLOCK, BLOCK) or case.n_q % BLOCK or case.n_k % BLOCK:
            return f"takes blocks of {BLOCK} x {BLOCK}, and whole ones at the ends"
        if case.n_q != case.n_k:
            return f"takes as many keys as queries, not {case.n_k} and {case.n_q}"
        assert case.blocks is not None
        if len(case.blocks.bits):
            return "takes whole blocks only, and the mask has partial ones"
        layout = case.blocks.layout() > 0
        if not (layout.any(-1).all() and layout.any(-2).all()):
            return "takes rows and columns that have a block each"
        return self.missing()

    def prepare(self, case: Case, device: torch.device) -> Attention:
        kernels = importlib.import_module("vsa_cuda")
        assert case.blocks is not None
        kept = torch.from_numpy(case.blocks.layout()).to(device).bool()
        kept = kept.expand(case.batch, case.heads, -1, -1)
        sizes = torch.full((case.n_k // BLOCK,), BLOCK, dtype=torch.int32, device=device)
        lists = (*lists_of(kept), sizes), (*lists_of(kept.mT), sizes)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return BlockSparse.apply(q, k, v, kernels, lists)

        return run


class BlockSparse(torch.autograd.Function):
    """Its forward with the lists of queries, its backward with those of keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: Any, lists: Any):
        out, lse = kernels.block_sparse_fwd(q, k, v, *lists[0])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backward = lambda *tensors: kernels.block_sparse_bwd(*tensors, *lists[1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        found = ctx.backward(*ctx.saved_tensors, grads[0].contiguous())
        return (*(x.to(grads[0].dtype) for x in found), None, None)


def lists_of(kept: Tensor) -> tuple[Tensor, Tensor]:
    """int32 (B, H, rows, columns) columns that are kept, then -1, and (B, H, rows), how many."""
    counts = kept.sum(-1, dtype=torch.int32)
    index = torch.full(kept.shape, -1, dtype=torch.int32, device=kept.device)
    place = torch.arange(kept.shape[3], device=kept.device)
    index[place < counts[..., None]] = kept.nonzero()[:, -1].int()
    return index, counts
