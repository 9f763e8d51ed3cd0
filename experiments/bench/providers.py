"""The providers that are measured: our backends and their peers, by the names in rows.

A provider of your own is a subclass of `Provider`, named as MODULE:NAME, such as
`providers=[cpu,my_attention:Mine]`.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseflash
from experiments.bench.cases import DENSE, Case
from experiments.bench.peers.cudnn import CudnnBlocks, CudnnFlex
from experiments.bench.peers.fa4 import FlashAttention4
from experiments.bench.provider import DIRECTIONS, Attention, Provider
from experiments.common.config import choose
from experiments.common.figures import Style
from masks import interop
from sparseflash.kernels.common.device import nvidia_capability


@dataclass(frozen=True)
class SparseFlash(Provider):
    """`sparseflash.attention` with one backend, which itself refuses what it cannot run.

    A deterministic one is measured backward only, its forward being the same.
    """

    backend: str = "auto"
    deterministic: bool = False

    own = True

    @property
    def directions(self) -> tuple[str, ...]:
        return ("backward",) if self.deterministic else DIRECTIONS

    def prepare(self, case: Case, device: torch.device) -> Attention:
        blocks, same = case.blocks, self.deterministic

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = sparseflash.attention(q, k, v, blocks, deterministic=same, backend=self.backend)
            assert isinstance(out, Tensor)
            return out

        return run


@dataclass(frozen=True)
class Sdpa(Provider):
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
                return attend(q, k, v, is_causal=bool(case.causal), enable_gqa=gqa)

        return run


@dataclass(frozen=True)
class Flex(Provider):
    """Compiled FlexAttention, given full blocks as full ones.

    Partial blocks look up their bit tile, but for those of `causal`, which have their formula.
    autotuned: torch times several kernels for the shape while compiling, and takes the fastest.
    flash: the kernels of FlashAttention-4 in place of those in Triton.
    """

    autotuned: bool = False
    flash: bool = False

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if device.type == "cpu" and direction == "backward":
            return "FlexAttention has no backward on a CPU"
        return PROVIDERS["fa4"].unsupported(case, device, direction) if self.flash else None

    def prepare(self, case: Case, device: torch.device, **more: Any) -> Attention:
        """`Provider.prepare`; more: arguments of `flex_attention`, such as score_mod."""
        from torch.nn.attention.flex_attention import flex_attention, noop_mask

        torch._dynamo.reset()  # or the eighth case would be over its recompilation limit
        functorch_config.donated_buffer = False  # so that the backward can be timed on a kept graph
        mode = "max-autotune-no-cudagraphs" if self.autotuned else None
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        block_mask = None
        if case.blocks is not None:
            block_mask = interop.to_flex(case.blocks, device)
            if not block_mask.kv_num_blocks.any():  # nothing to look up
                block_mask.mask_mod = noop_mask
            elif case.causal:
                block_mask.mask_mod = lambda b, h, q, k: q >= k
        options: Any = {"block_mask": block_mask, "enable_gqa": case.heads != case.kv_heads}
        if self.flash:
            options["kernel_options"] = {"BACKEND": "FLASH"}

        def attend(*qkv: Any) -> Any:
            if device.type == "cpu":  # it refuses inputs that need gradients, under no_grad as well
                qkv = tuple(t.detach() for t in qkv)
            return compiled(*qkv, **options, **more)

        return attend


# In the order of tables. Colours are Okabe and Ito's, which the colour-blind can tell apart.
BLUE, SKY, ORANGE, RED = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
PINK, YELLOW, GREEN, BLACK = "#CC79A7", "#F0E442", "#009E73", "#000000"
DOTS = (0, (3, 1, 1, 1))
PROVIDERS: dict[str, Provider] = {
    "hopper": SparseFlash("SparseFlash (Hopper)", Style(RED, "s", "-"), "hopper"),
    "cpu": SparseFlash("SparseFlash (CPU)", Style(BLUE, "o", "-"), "cpu"),
    "hopper_deterministic": SparseFlash(
        "SparseFlash, deterministic", Style(RED, "h", ":"), "hopper", True
    ),
    "triton": SparseFlash("SparseFlash (Triton)", Style(BLUE, "o", "-"), "triton"),
    "reference": SparseFlash("float32 reference", Style(BLACK, "x", ":"), "reference"),
    "fa4": FlashAttention4("FlashAttention-4", Style(SKY, "P", DOTS)),
    "fa4_window": FlashAttention4("FlashAttention-4, window", Style(SKY, "X", "--"), "window"),
    "fa4_varlen": FlashAttention4("FlashAttention-4, varlen", Style(SKY, ">", "--"), "varlen"),
    "cudnn_blocks": CudnnBlocks("cuDNN Frontend, blocks", Style(YELLOW, "<", "-.")),
    "cudnn_flex": CudnnFlex("cuDNN Frontend, intervals", Style(YELLOW, "d", "--")),
    "sdpa_cudnn": Sdpa("PyTorch's cuDNN", Style(PINK, "D", "-."), SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": Sdpa(
        "FlashAttention-2", Style(ORANGE, "v", (0, (5, 1, 1, 1, 1, 1))), SDPBackend.FLASH_ATTENTION
    ),
    "sdpa": Sdpa("PyTorch SDPA", Style(PINK, "D", "-.")),
    "flex": Flex("FlexAttention", Style(GREEN, "^", "--")),
    "flex_autotuned": Flex("FlexAttention, autotuned", Style(GREEN, "*", "-."), True),
    "flex_flash": Flex("FlexAttention, flash", Style(GREEN, "v", ":"), flash=True),
}


def default_providers(device: torch.device) -> list[str]:
    """Return ours, PyTorch's, and the peers that are installed."""
    if device.type == "cuda":
        hopper = ["hopper"] if nvidia_capability(device) == (9, 0) else []
        peers = installed("fa4", *(("cudnn_blocks", "cudnn_flex") if hopper else ()))
        return [*hopper, "triton", "sdpa_flash", "sdpa_cudnn", "flex", *peers]
    return ["cpu", "sdpa", "flex"]


def installed(*names: str) -> tuple[str, ...]:
    """Return those of the providers whose package can be imported."""
    return tuple(name for name in names if not PROVIDERS[name].missing())


def find(name: str) -> Provider:
    """Return the provider of that name, or of a module of the user's own, MODULE:NAME.

    Raises ValueError if there is none.
    """
    module, colon, attribute = str(name).partition(":")
    if colon and name not in PROVIDERS:
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"providers={name!r} cannot be imported ({error}): name a subclass of"
                " experiments.bench.provider.Provider"
            ) from error
        PROVIDERS[name] = found(attribute) if isinstance(found, type) else found
    choose("providers", name, PROVIDERS)
    return PROVIDERS[name]
