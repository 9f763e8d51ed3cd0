"""The providers that are measured: our backends and their peers, behind the same two methods.

`unsupported(case, device, direction)` returns the reason why a provider cannot run, or None.
`prepare(case, device)` does all work that is needed once per mask, and returns a function
(q, k, v) -> out.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseflash
from experiments.bench.cases import DENSE, Case
from experiments.bench.peers import cudnn, fa4, flashinfer, vsa
from experiments.common.checks import choose
from experiments.common.devices import free_memory
from masks import interop
from sparseflash.backends.nvidia import nvidia_capability

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
DIRECTIONS = ("forward", "backward")


class Provider(Protocol):
    @property
    def dense_only(self) -> bool:
        """Whether it has no masks to skip blocks by: only dense and causal cases concern it."""
        ...

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None: ...

    def prepare(self, case: Case, device: torch.device) -> Attention: ...


@dataclass(frozen=True)
class SparseFlash:
    """`sparseflash.attention` with one backend, which itself refuses what it cannot run.

    A deterministic one is measured backward only, its forward being the same.
    """

    backend: str
    deterministic: bool = False
    dense_only = False

    @property
    def directions(self) -> tuple[str, ...]:
        return ("backward",) if self.deterministic else DIRECTIONS

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if self.backend != "reference":
            return None
        # Scores, probabilities and what autograd keeps of them, in float64.
        need = 6 * 8 * case.batch * case.heads * case.n_q * case.n_k
        free = free_memory(device)
        if need > free:
            return f"dense float64 takes about {need / 2**30:.0f} GiB of {free / 2**30:.0f} free"
        return None

    def prepare(self, case: Case, device: torch.device) -> Attention:
        blocks, same = case.blocks, self.deterministic

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = sparseflash.attention(q, k, v, blocks, deterministic=same, backend=self.backend)
            assert isinstance(out, Tensor)
            return out

        return run


@dataclass(frozen=True)
class Sdpa:
    """torch's scaled_dot_product_attention: the one it chooses itself, or the one named."""

    kernel: SDPBackend | None = None
    dense_only = True

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if case.mask != DENSE and not case.causal:
            return "computes every block: dense only, or causal"
        if self.kernel is not None and device.type != "cuda":
            return f"needs a CUDA device, not {device}"
        return None

    def prepare(self, case: Case, device: torch.device) -> Attention:
        attend, gqa = F.scaled_dot_product_attention, case.heads != case.kv_heads

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
                return attend(q, k, v, is_causal=case.causal, enable_gqa=gqa)

        return run


@dataclass(frozen=True)
class Flex:
    """Compiled FlexAttention, given full blocks as full ones.

    Partial blocks look up their bit tile, but for those of `causal`, which have their formula.
    autotuned: torch times several kernels for the shape while compiling, and takes the fastest.
    flash: FlashAttention-4 in place of its Triton kernels.
    """

    autotuned: bool = False
    flash: bool = False
    dense_only = False

    @property
    def package(self) -> str:
        return fa4.FlashAttention4.package if self.flash else ""

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if self.flash:
            return _no_flash(case, device, direction)
        if device.type == "cpu" and direction == "backward":
            return "FlexAttention has no backward on a CPU"
        if device.type == "cpu" and not any(map(shutil.which, _compilers())):
            choices = _compilers()
            return f"needs a C++ compiler to compile itself: install one of {choices}, or set CXX"
        return None

    def prepare(self, case: Case, device: torch.device) -> Attention:
        from torch.nn.attention.flex_attention import flex_attention, noop_mask

        torch._dynamo.reset()  # or the eighth case would be over its recompilation limit
        functorch_config.donated_buffer = False  # so that the backward can be timed on a kept graph
        mode = "max-autotune-no-cudagraphs" if self.autotuned else None
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        block_mask = None
        if case.blocks is not None:
            block_mask = interop.to_flex(case.blocks, device)
            if not (self.flash or block_mask.kv_num_blocks.any()):  # nothing to look up
                block_mask.mask_mod = noop_mask  # by which flash would take every block for full
            elif case.causal:
                block_mask.mask_mod = lambda b, h, q, k: q >= k
        options: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
        if self.flash:
            options["kernel_options"] = {"BACKEND": "FLASH"}
        return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, **options)


PROVIDERS: dict[str, Provider] = {
    "reference": SparseFlash("reference"),
    "cpu": SparseFlash("cpu"),
    "triton": SparseFlash("triton"),
    "hopper": SparseFlash("hopper"),
    "hopper_deterministic": SparseFlash("hopper", deterministic=True),
    "sdpa": Sdpa(),
    "sdpa_flash": Sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": Sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": Flex(),
    "flex_autotuned": Flex(autotuned=True),
    "flex_flash": Flex(flash=True),
    "fa4": fa4.FlashAttention4(),
    "fa4_window": fa4.FlashAttention4("window"),
    "fa4_varlen": fa4.FlashAttention4("varlen"),
    "cudnn_blocks": cudnn.CudnnBlocks(),
    "cudnn_flex": cudnn.CudnnFlex(),
    "flashinfer": flashinfer.FlashInfer(),
    "vsa": vsa.Vsa(),
}


def default_providers(device: torch.device) -> list[str]:
    if device.type == "cuda":
        hopper = ["hopper"] if nvidia_capability(device) == (9, 0) else []
        peers = installed("fa4", *(("cudnn_blocks", "cudnn_flex") if hopper else ()))
        return [*hopper, "triton", "sdpa_flash", "sdpa_cudnn", "flex", *peers]
    return ["cpu", "sdpa", "flex"]


def installed(*names: str) -> tuple[str, ...]:
    """Those of the providers, all of packages of their own, whose package can be imported."""
    packages = {"fa4": fa4, "cudnn": cudnn, "flashinfer": flashinfer, "vsa": vsa}
    return tuple(name for name in names if not packages[name.partition("_")[0]].missing())


def concerns(provider: Provider, case: Case, direction: str) -> bool:
    """Whether a provider is of interest for a case at all, able to run it or not."""
    if provider.dense_only and case.mask != DENSE and not case.causal:
        return False
    choice = getattr(provider, "concerns", None)
    if choice is not None and not choice(case):
        return False
    return direction in getattr(provider, "directions", DIRECTIONS)


def find(name: str) -> Provider:
    """The provider of that name. Raises ValueError, with the choices, if there is none."""
    choose("providers", name, PROVIDERS)
    return PROVIDERS[name]


def _no_flash(case: Case, device: torch.device, direction: str) -> str | None:
    """Why FlexAttention cannot call FlashAttention-4, or None."""
    from torch.nn.attention import flex_attention

    if "FLASH" not in get_args(getattr(flex_attention, "_Backend", None)):
        return f"torch {torch.__version__} has no such backend"
    if direction == "backward" and case.mask != DENSE and case.block_k % 128:
        return f"its backward takes multiples of 128 as block_k, not {case.block_k}"
    return fa4.FlashAttention4().unsupported(case, device, direction)


def _compilers() -> list[str]:
    return [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
