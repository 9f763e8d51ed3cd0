"""FlashInfer's block-sparse attention, where it is installed, with kernels that need no nvcc."""

import importlib
from pathlib import Path

import torch

from experiments.bench.cases import DENSE, LAYOUTS, Case
from experiments.bench.provider import Attention, Provider, not_hopper

KERNELS = "flashinfer.experimental.cake_vsa_sm90_cute"
MOST = 64  # blocks of a row


class FlashInfer(Provider):
    """`VariableBlockSparseAttentionWrapper` with its CuTe kernels; forward only.

    Its other kernels are compiled by nvcc when they are first called.
    """

    package = "flashinfer-python"
    install = "pip install flashinfer-python==0.7.2.post1 'nvidia-cutlass-dsl[cu13]==4.8.1'"
    modules = ("flashinfer.sparse", "cutlass.cute", "tvm_ffi", KERNELS)

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward",)

    def missing(self) -> str | None:
        """Say also where a wheel has the kernels without their manifest, as 0.7.2.post1 has."""
        if reason := super().missing():
            return reason
        try:
            importlib.import_module(KERNELS).manifest()
        except FileNotFoundError as error:
            found, version = Path(error.filename).name, self.version()["version"]
            return f"{self.package} {version} was packaged without {found}: take another version"
        return None

    def concerns(self, case: Case) -> bool:
        return case.mask != DENSE

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if reason := not_hopper(case, device, ("bfloat16",)):
            return reason
        if (case.head_dim, case.value_dim) != (128, 128):
            return f"takes head dims of 128, not {case.head_dim}, {case.value_dim}"
        if case.heads != case.kv_heads:
            return f"takes as many key as query heads, not {case.heads} and {case.kv_heads}"
        if case.batch > 1 or case.layout != LAYOUTS[0]:
            return f"takes one {LAYOUTS[0]} sequence, not {case.batch} {case.layout}"
        if (case.block_q, case.block_k) != (64, 64) or case.n_q % 64 or case.n_k % 64:
            return "takes blocks of 64 x 64, and whole ones at the ends"
        assert case.blocks is not None
        if len(case.blocks.bits):
            return "takes whole blocks only, and the mask has partial ones"
        counts = (case.blocks.layout() > 0).sum(-1)
        if not 1 <= counts.min() <= counts.max() <= MOST:
            return f"takes rows of 1 to {MOST} blocks, not {counts.min()} to {counts.max()}"
        return self.missing()

    def prepare(self, case: Case, device: torch.device) -> Attention:
        sparse = importlib.import_module("flashinfer.sparse")
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = sparse.VariableBlockSparseAttentionWrapper(workspace, backend="cake_cute")
        assert case.blocks is not None
        kept = torch.from_numpy(case.blocks.layout()[0] > 0).expand(case.heads, -1, -1)
        rows, cols = (
            torch.full((case.heads, blocks), 64, dtype=torch.int32) for blocks in kept.shape[1:]
        )
        heads = case.heads, case.kv_heads
        bf16 = {"q_data_type": torch.bfloat16}
        wrapper.plan(kept.contiguous(), rows, cols, *heads, case.head_dim, **bf16)
        return lambda q, k, v: wrapper.run(q[0], k[0], v[0])[None]
