"""The attentions of the papers' tables, each made for one setting behind one interface."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import masks
from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.common.devices import free_memory
from experiments.common.figures import Style
from experiments.lra.models.attention import KINDS, Attention, make_attention
from experiments.studies.published_forms import BlockedGather, SlidingChunks
from sparseflash.lengths import real_tokens

GIB = 2**30
EFFICIENT, PATTERNS = "efficient attention", "Longformer and BigBird"
PUBLISHED = {
    "chunks": (SlidingChunks, {"window": 512}),
    "gather": (BlockedGather, {"block": 64, "random": 3}),
}
CAUSAL = ("standard", "sdpa", "flash", "sparse")  # kinds that are measured with a causal mask
SOURCES = ("masks", "sparseflash", "experiments/studies", "experiments/lra/models")


@dataclass(frozen=True)
class Method:
    """An attention of the tables.

    kind: of experiments.lra.models.attention, sdpa, or one of PUBLISHED, a form as published.
    exact: computes softmax attention under its mask, which a gate can check.
    quadratic: its work grows with the square of the length.
    stores: it keeps N x N matrices.
    group: the panel of a figure that shows it; ours under a mask is in each.
    """

    label: str
    style: Style
    kind: str
    mask: str | None = None
    kernel: SDPBackend | None = None
    compiled: bool = False
    exact: bool = False
    quadratic: bool = False
    stores: bool = False
    group: str = "exact attention"


def _as_lra(name: str, label: str = "", **options: Any) -> Method:
    kind = KINDS[name]
    return Method(label or kind.label, Style(*kind.style), name, **options)


_DENSE: dict[str, Any] = {"exact": True, "quadratic": True}
_STORED: dict[str, Any] = _DENSE | {"stores": True}
_SHOWN: dict[str, Any] = {"exact": True, "group": PATTERNS}
_LONG, _BIRD = ("#009E73", "P"), ("#8C564B", "<")
METHODS: dict[str, Method] = {  # in the order of tables; at most eight in a group
    "standard": _as_lra("standard", "standard", **_STORED),
    "compiled": Method(
        "standard, compiled", Style("#555555", "h", "--"), "standard", compiled=True, **_STORED
    ),
    "sdpa": Method("SDPA", Style("#E69F00", "^", "-."), "sdpa", **_DENSE),
    "sdpa_flash": Method(
        "FlashAttention-2", Style("#E69F00", "^", "-."), "sdpa",
        kernel=SDPBackend.FLASH_ATTENTION, **_DENSE,
    ),
    "sdpa_cudnn": Method(
        "cuDNN", Style("#CC79A7", "v", "-."), "sdpa", kernel=SDPBackend.CUDNN_ATTENTION, **_DENSE
    ),
    "flash": _as_lra("flash", "ours, dense", **_DENSE),
    "sparse": _as_lra("sparse", "ours, block-sparse", exact=True),
    **{
        name: _as_lra(name, group=EFFICIENT)
        for name in ("linformer", "local", "reformer", "smyrf", "linear", "performer")
    },
    "longformer": Method(
        "Longformer on ours", Style(*_LONG, ":"), "sparse", "longformer(512)", **_SHOWN
    ),
    "bigbird": Method("BigBird on ours", Style(*_BIRD, ":"), "sparse", "bigbird(64, 3)", **_SHOWN),
    "chunks": Method("Longformer, sliding chunks", Style(*_LONG, "-"), "chunks", **_SHOWN),
    "gather": Method("BigBird, blocked gather", Style(*_BIRD, "-"), "gather", **_SHOWN),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A method at one shape, with or without dropout and key padding."""

    method: str
    batch: int
    heads: int
    n: int
    head_dim: int
    dtype: str
    dropout: float = 0.0
    padding: bool = False
    causal: bool = False

    @property
    def about(self) -> Method:
        """The method itself."""
        return METHODS[self.method]

    def lengths(self, device: torch.device) -> Tensor | None:
        """Return int32 (batch,), uniform between n - 20 and n as in the paper, or None."""
        if not self.padding:
            return None
        generator = torch.Generator().manual_seed(self.n)
        least = max(1, self.n - 20)
        drawn = torch.randint(least, self.n + 1, (self.batch,), generator=generator)
        return drawn.to(device, torch.int32)

    def unsupported(self, device: torch.device) -> str | None:
        """Return why it cannot run here, found without running it, or None."""
        if self.about.kernel is not None and device.type != "cuda":
            return f"unsupported: needs a CUDA device, not {device}"
        if self.about.kernel is SDPBackend.FLASH_ATTENTION and self.padding:
            return "unsupported: torch's FlashAttention takes no key padding"
        if self.causal and self.about.kind not in CAUSAL:
            return f"unsupported: {self.about.label} is not measured with a causal mask"
        need, free = self.matrix_bytes(), free_memory(device)
        if need > free:
            return f"out of memory: needs about {need / GIB:.3g} GiB of {free / GIB:.3g} free"
        return None

    def matrix_bytes(self) -> int:
        """Return what a step holds of N x N matrices: P, dP and dS, and with dropout two more."""
        count = (5 if self.dropout else 3) if self.about.stores else 0
        return count * DTYPES[self.dtype].itemsize * self.batch * self.heads * self.n**2

    def make(self, device: torch.device) -> Attention:
        """Return the attention as a module on the device, in training mode."""
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "length": self.n}
        sizes |= {"dropout": self.dropout, "causal": self.causal}
        if self.about.kind == "sdpa":
            made = Sdpa(kernel=self.about.kernel, **sizes)
        elif self.about.kind in PUBLISHED:
            form, own = PUBLISHED[self.about.kind]
            made = form(**own, **sizes)
        else:
            made = make_attention(self.about.kind, mask=self.about.mask, **sizes)
        return made.to(device).train()

    def case(self, attention: Attention) -> Case:
        """Return what an exact method computes."""
        pattern, block = attention.pattern(), 0
        if pattern is None and self.causal:
            pattern = masks.causal()
        if pattern is not None:
            block = 64 if self.n <= 2048 else 128
        mask = DENSE if pattern is None else str(pattern)
        sizes = self.heads, self.heads, self.n, self.n, self.head_dim, self.dtype
        return Case(mask, self.batch, *sizes, block, block)


class Sdpa(Attention):
    """torch's scaled_dot_product_attention: the one it chooses, or the kernel named."""

    def __init__(self, *, kernel: SDPBackend | None, **sizes: Any):
        super().__init__(**sizes)
        self.kernel = kernel

    def plan(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        n = self.length
        allowed = real_tokens(lengths, n)[:, None, None].expand(-1, 1, n, -1)
        return allowed.tril() if self.causal else allowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        options = {"dropout_p": self.dropout_p, "is_causal": self.causal and lengths is None}
        with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(q, k, v, lengths, **options)


def compiled(attention: Attention, device: torch.device) -> Any:
    """Return the attention under torch.compile; on a CPU one compilation serves all lengths."""
    functorch_config.donated_buffer = False  # so that a backward can be timed on a kept graph
    if device.type == "cuda":
        torch._dynamo.reset()  # or the ninth length would be over its recompilation limit
    return torch.compile(attention, dynamic=device.type == "cpu")
