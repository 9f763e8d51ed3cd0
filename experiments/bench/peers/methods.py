"""The attentions of the papers' tables, each made for one setting behind one interface."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
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
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask, bigbird, longformer
from sparseflash.dynamic.lengths import real_tokens

EFFICIENT, PATTERNS = "efficient attention", "Longformer and BigBird"
PUBLISHED = ("chunks", "gather")  # kinds that are made here in the form of their papers
FOLDERS = "bench/peers", "studies", "lra/models"
SOURCES = ("masks", "sparseflash", *(f"experiments/{folder}" for folder in FOLDERS))


@dataclass(frozen=True)
class Method:
    """An attention of the tables.

    kind: of experiments.lra.models.attention, sdpa, or one of PUBLISHED, a form as published.
    exact: computes softmax attention under its mask, which a gate can check.
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
    stores: bool = False
    group: str = "exact attention"


def _as_lra(name: str, label: str = "", **options: Any) -> Method:
    kind = KINDS[name]
    return Method(label or kind.label, Style(*kind.style), name, **options)


_DENSE: dict[str, Any] = {"exact": True}
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
        if self.about.kind not in ("sparse", *PUBLISHED):
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
        elif self.about.kind in PUBLISHED:
            form, own = FORMS[self.about.kind]
            made = form(**own, **sizes)
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
        q, k, v = draw(case := self.case(made), device)
        plan = None if lengths is None else made.plan(lengths, q.dtype)
        call = compiled(made, device) if self.about.compiled else made
        qkv = (q, q if made.shared_qk else k, v)
        step = Step(lambda q, k, v: call(q, k, v, plan), qkv, tuple(made.parameters()))
        if not self.about.exact:
            return step, None
        made.eval()  # without dropout
        error = step.error(Gate(case, *qkv, lengths=ends))
        made.train()
        return step, error


def block_of(n: int) -> int:
    """Return the tokens of a block for a mask of n tokens."""
    return 64 if n <= 2048 else 128


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


# ---- Longformer and BigBird in their published forms: overlapping chunks, and gathered blocks


class SlidingChunks(Attention):
    """The window and the global first token of Beltagy et al. (arXiv 2004.05150), in torch.

    Chunks of `window` tokens, which overlap by half, are multiplied, and what is outside of the
    window is masked: twice the work and memory of the window. All tokens share one projection.

    window: keys to both sides together, even.
    """

    def __init__(self, *, window: int = 512, **sizes):
        super().__init__(**sizes)
        self.window, self.side = window, window // 2

    def pattern(self) -> Mask:
        return longformer(self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n, w = q.shape[2], self.side
        real = None if lengths is None else torch.arange(n, device=q.device) < lengths[:, None]
        first = softmax_attention(
            q[:, :, :1], k, v, None if real is None else real[:, None, None], self.dropout_p
        )
        padded = (F.pad(t, (0, 0, w, w + -n % w)) for t in (q * self.head_dim**-0.5, k, v))
        qs, ks, vs = padded
        # [B, H, chunks + 1, 2w, 2w]: chunk c and the next one, which overlaps the next pair
        pairs = qs.unfold(2, 2 * w, w).mT @ ks.unfold(2, 2 * w, w)
        # [B, H, chunks, w, 3w]: a query's own chunk of keys and those beside it
        scores = torch.cat([pairs[:, :, :-1, w:, :w], pairs[:, :, 1:, :w]], -1)
        scores = scores.masked_fill(~self._allowed(scores, n, lengths), -torch.inf)
        token = qs[:, :, w:-w].unflatten(2, (-1, w)) @ k[:, :, None, :1].mT  # the global key
        p = F.dropout(torch.cat([token, scores], -1).softmax(-1), self.dropout_p)
        out = p[..., :1] * v[:, :, None, :1] + p[..., 1:] @ vs.unfold(2, 3 * w, w).mT
        return torch.cat([first, out.flatten(2, 3)[:, :, 1:n]], 2)

    def _allowed(self, scores: Tensor, n: int, lengths: Tensor | None) -> Tensor:
        """Return bool (B or 1, 1, chunks, w, 3w): keys in the window but the global one."""
        w, chunks = self.side, scores.shape[2]
        i = torch.arange(w, device=scores.device)[:, None]
        j = torch.arange(3 * w, device=scores.device)
        key = torch.arange(chunks, device=scores.device)[:, None, None] * w + j - w
        ends = n if lengths is None else lengths[:, None, None, None, None]
        return (i <= j) & (j <= i + 2 * w) & (key > 0) & (key < ends)


class BlockedGather(Attention):
    """The internal construction of Zaheer et al. (arXiv 2007.14062), in torch.

    The first and the last block of queries see all keys. Those between gather their blocks of keys
    and values, and multiply them densely: first, last, window and random ones.

    block: tokens of a block, a multiple of 16. random: random blocks of a row.
    """

    lists: Tensor
    real: Tensor

    def __init__(self, *, block: int = 64, random: int = 3, **sizes):
        super().__init__(**sizes)
        self.block, self.random = block, random
        built = self.pattern().build(self.length, block_size=block, heads=self.heads)
        inner = np.broadcast_to(built.layout()[0], (self.heads, built.rows, built.cols))[:, 1:-1]
        seen = torch.from_numpy(inner > 0)
        width = int(seen.sum(-1).max()) if seen.numel() else 1
        real, lists = seen.int().sort(stable=True, dim=-1, descending=True)
        self.register_buffer("lists", lists[..., :width], persistent=False)  # [H, rows, width]
        self.register_buffer("real", real[..., :width].bool(), persistent=False)

    def pattern(self) -> Mask:
        return bigbird(self.block, self.random)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n, b = q.shape[2], self.block
        ends = q.new_full((1,), n, dtype=torch.int32) if lengths is None else lengths
        keys = torch.arange(n + -n % b, device=q.device)
        allowed = keys < ends[:, None]  # [B or 1, N]
        last = max((n - 1) // b * b, min(b, n))  # start of the last block, or the end of all

        def whole(rows: Tensor) -> Tensor:
            return softmax_attention(rows, k, v, allowed[:, None, None, :n], self.dropout_p)

        outs = [whole(q[:, :, :b])]
        if last > b:
            outs.append(self._inner(q[:, :, b:last], k, v, allowed))
        if last < n:
            outs.append(whole(q[:, :, last:]))
        return torch.cat(outs, 2)

    def _inner(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        n, b = k.shape[2], self.block
        head = torch.arange(self.heads, device=q.device)[:, None, None]

        def gather(t: Tensor) -> Tensor:  # [B, H, rows, width * b, D]
            blocks = F.pad(t, (0, 0, 0, -n % b)).unflatten(2, (-1, b))
            return blocks[:, head, self.lists].flatten(3, 4)

        # [B or 1, H, rows, width, b]
        within = allowed.unflatten(1, (-1, b))[:, self.lists] & self.real[..., None]
        within = within.flatten(3)[:, :, :, None]
        q = q.unflatten(2, (-1, b))
        return softmax_attention(q, gather(k), gather(v), within, self.dropout_p).flatten(2, 3)


FORMS: dict[str, tuple[type[Attention], dict[str, int]]] = {
    "chunks": (SlidingChunks, {"window": 512}),
    "gather": (BlockedGather, {"block": 64, "random": 3}),
}
