"""The attentions of the papers' tables, each made for one setting behind one interface."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.bench.cases import DENSE, Case
from experiments.bench.gate import Gate
from experiments.bench.step import Step, draw
from experiments.common.figures import Style
from experiments.common.rows import Row
from experiments.lra.models.attention import KINDS, Attention, make_attention
from sparseflash.dynamic.lengths import real_tokens

EFFICIENT, PATTERNS = "efficient attention", "Longformer and BigBird"
SOURCES = ("masks", "sparseflash", "experiments/studies", "experiments/lra/models")


@dataclass(frozen=True)
class Method:
    """An attention of the tables.

    kind: of experiments.lra.models.attention, or sdpa; empty: not made here, for older rows.
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
    "chunks": Method("Longformer, sliding chunks", Style(*_LONG, "-"), "", **_SHOWN),
    "gather": Method("BigBird, blocked gather", Style(*_BIRD, "-"), "", **_SHOWN),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A method at one shape, with or without dropout and key padding; only sparse takes a mask."""

    method: str
    batch: int
    heads: int
    n: int
    head_dim: int
    dtype: str
    dropout: float = 0.0
    padding: bool = False
    mask: str | None = None  # null: that of the method

    def row(self) -> Row:
        if self.about.kind != "sparse":
            return asdict(self) | {"mask": "", "density": None}
        case = self.case(self.make(torch.device("cpu")))
        return asdict(self) | {"mask": case.mask, "density": case.density}

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

    def make(self, device: torch.device) -> Attention:
        """Return the attention as a module on the device, in training mode."""
        sizes: dict[str, Any] = {"heads": self.heads, "head_dim": self.head_dim, "length": self.n}
        sizes |= {"dropout": self.dropout}
        if self.about.kind == "sdpa":
            made = Sdpa(kernel=self.about.kernel, **sizes)
        else:
            made = make_attention(self.about.kind, mask=self.mask or self.about.mask, **sizes)
        return made.to(device).train()

    def case(self, attention: Attention) -> Case:
        """Return what an exact method computes."""
        pattern = attention.pattern()
        mask, block = (DENSE, 0) if pattern is None else (str(pattern), block_of(self.n))
        sizes = self.heads, self.heads, self.n, self.n, self.head_dim, self.dtype
        return Case(mask, self.batch, *sizes, block, block)

    def prepared(self, device: torch.device) -> tuple[Step, float | None]:
        """Return forward and backward, and their error where the method is exact."""
        made, lengths = self.make(device), self.lengths(device)
        ends = () if lengths is None else tuple(lengths.tolist())
        padded = PaddedCase(**asdict(self.case(made)), lengths=ends)
        q, k, v = draw(padded, device)
        plan = None if lengths is None else made.plan(lengths, q.dtype)
        call = compiled(made, device) if self.about.compiled else made
        qkv = (q, q if made.shared_qk else k, v)
        step = Step(lambda q, k, v: call(q, k, v, plan), qkv, tuple(made.parameters()))
        if not self.about.exact:
            return step, None
        made.eval()  # without dropout
        error = step.error(PaddedGate(padded, *qkv))
        made.train()
        return step, error


def block_of(n: int) -> int:
    """Return the tokens of a block for a mask of n tokens."""
    return 64 if n <= 2048 else 128


@dataclass(frozen=True)
class PaddedCase(Case):
    """A case whose keys end at the length of each sequence."""

    lengths: tuple[int, ...] = ()

    def allowed(self, batch: int, head: int, rows: np.ndarray) -> np.ndarray:
        found = super().allowed(batch, head, rows)
        return found & (np.arange(self.n_k) < self.lengths[batch]) if self.lengths else found


class PaddedGate(Gate):
    """The gate for queries within every length: the others mean nothing."""

    @cached_property
    def rows(self) -> Tensor:
        found = super().rows
        lengths = self.case.lengths if isinstance(self.case, PaddedCase) else ()
        return found[found < min(lengths)] if lengths else found


class Sdpa(Attention):
    """torch's scaled_dot_product_attention: the one it chooses, or the kernel named."""

    def __init__(self, *, kernel: SDPBackend | None, **sizes: Any):
        super().__init__(**sizes)
        self.kernel = kernel

    def plan(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        return real_tokens(lengths, self.length)[:, None, None].expand(-1, 1, self.length, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(q, k, v, lengths, dropout_p=self.dropout_p)


def compiled(attention: Attention, device: torch.device) -> Any:
    """Return the attention under torch.compile; on a CPU one compilation serves all lengths."""
    functorch_config.donated_buffer = False  # so that a backward can be timed on a kept graph
    if device.type == "cuda":
        torch._dynamo.reset()  # or the ninth length would be over its recompilation limit
    return torch.compile(attention, dynamic=device.type == "cpu")
