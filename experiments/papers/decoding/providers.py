"""The providers of decoding: ours, torch's SDPA and FlashInfer, behind the same methods."""

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import masks
import sparseflash
from experiments.bench.cases import DENSE
from experiments.common.packages import why_missing
from experiments.papers.decoding.cases import SELECTED, Inputs, Step
from sparseflash.schedule import Schedule
from sparseflash.select.schedule import schedule_from_selection

Call = Callable[[], Tensor]


class Provider(ABC):
    """One that decodes a step; a subclass says for which steps and where."""

    package = ""  # whose version a row names; empty for torch and ours

    def concerns(self, step: Step) -> bool:
        """Whether it is of interest for a step at all."""
        return True

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run, or None."""
        return None

    @abstractmethod
    def prepare(self, inputs: Inputs, choosing: bool) -> list[Call]:
        """A call for every cache, which with `choosing` chooses its blocks itself."""


@dataclass(frozen=True)
class SparseFlash(Provider):
    """`sparseflash.decode` with one backend."""

    backend: str

    def prepare(self, inputs: Inputs, choosing: bool) -> list[Call]:
        step = inputs.step
        extents = step.n_q, step.n, step.batch, step.kv_heads, inputs.device
        mask: Any = None
        if step.mask == SELECTED:
            planned = [
                schedule_from_selection(inputs.choose(i), *extents)
                for i in range(len(inputs.caches))
            ]
        else:
            mask = None if step.mask == DENSE else masks.parse(step.mask)
            planned = [mask] * len(inputs.caches)

        def call(which: int, mask: masks.Mask | Schedule | None) -> Tensor:
            k, v = inputs.caches[which]
            return sparseflash.decode(
                inputs.q, k, v, inputs.choose(which) if choosing else mask, lengths=inputs.lengths,
                block_table=inputs.table, backend=self.backend,
            )  # fmt: skip

        return [lambda i=i, mask=mask: call(i, mask) for i, mask in enumerate(planned)]


@dataclass(frozen=True)
class Sdpa(Provider):
    """torch's scaled_dot_product_attention over a contiguous cache, by the kernel named."""

    kernel: SDPBackend | None = None

    def concerns(self, step: Step) -> bool:
        return step.mask == DENSE and not step.page

    def missing(self, device: torch.device) -> str | None:
        needs = self.kernel is not None and device.type != "cuda"
        return f"needs a CUDA device, not {device}" if needs else None

    def prepare(self, inputs: Inputs, choosing: bool) -> list[Call]:
        gqa = inputs.step.heads != inputs.step.kv_heads

        def call(which: int) -> Tensor:
            with warnings.catch_warnings():  # why a kernel refuses: the row says that it does
                warnings.simplefilter("ignore")
                with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
                    k, v = inputs.caches[which]
                    return F.scaled_dot_product_attention(inputs.q, k, v, enable_gqa=gqa)

        return [lambda i=i: call(i) for i in range(len(inputs.caches))]


@dataclass(frozen=True)
class FlashInfer(Provider):
    """FlashInfer over a cache in pages, where it is installed: `pip install flashinfer-python`."""

    package = "flashinfer-python"

    def concerns(self, step: Step) -> bool:
        return step.mask == DENSE and step.page > 0

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device}"
        return why_missing("flashinfer", f"pip install {self.package}", "flashinfer")

    def prepare(self, inputs: Inputs, choosing: bool) -> list[Call]:
        flashinfer, step, q = importlib.import_module("flashinfer"), inputs.step, inputs.q
        assert inputs.table is not None
        pages = inputs.table.shape[1]
        start = torch.arange(step.batch + 1, dtype=torch.int32, device=q.device)
        last = torch.full((step.batch,), step.page, dtype=torch.int32, device=q.device)
        shared = torch.empty(2**27, dtype=torch.uint8, device=q.device)
        paging = start * pages, inputs.table.flatten(), last
        sizes = step.heads, step.kv_heads, step.head_dim, step.page
        if step.n_q == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                shared, "NHD", use_tensor_cores=True
            )
            wrapper.plan(*paging, *sizes, q_data_type=q.dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared, "NHD")
            wrapper.plan(start * step.n_q, *paging, *sizes, causal=False, q_data_type=q.dtype)
        tokens = q.transpose(1, 2).flatten(0, 1).contiguous()  # (B * n_q, H, D)

        def call(which: int) -> Tensor:
            out = wrapper.run(tokens, inputs.caches[which])
            return out.unflatten(0, (step.batch, step.n_q)).transpose(1, 2)

        return [lambda i=i: call(i) for i in range(len(inputs.caches))]


PROVIDERS: dict[str, Provider] = {
    "triton": SparseFlash("triton"),
    "cpu": SparseFlash("cpu"),
    "sdpa": Sdpa(),
    "sdpa_flash": Sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": Sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": Sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": Sdpa(SDPBackend.MATH),
    "flashinfer": FlashInfer(),
}
DEFAULTS = {
    "cuda": ["triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flashinfer"],
    "cpu": ["cpu", "sdpa"],
}
