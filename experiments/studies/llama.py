"""A stack of Llama layers (RMSNorm, rotary, SwiGLU) whose attention and checkpointing vary.

`Sizes.layer_bytes` says what a layer keeps for the backward, and `peak_bytes` what a step holds.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import masks
import sparseflash
from experiments.bench.cases import DTYPES
from sparseflash import layers

ATTENTIONS = ("standard", "ours")
CHECKPOINTS = ("none", "layers", "selective")
STATISTIC = 4  # bytes of a float32 statistic, such as the LSE


@dataclass(frozen=True)
class Sizes:
    """A batch of `batch` sequences of n tokens through layers of these sizes."""

    batch: int
    n: int
    dim: int
    hidden: int
    heads: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def tokens_bytes(self) -> int:
        """A tensor (batch, n, dim): the unit of what a layer keeps."""
        return self.batch * self.n * self.dim * self.itemsize

    @property
    def hidden_bytes(self) -> int:
        """A tensor (batch, n, hidden)."""
        return self.batch * self.n * self.hidden * self.itemsize

    @property
    def score_bytes(self) -> int:
        """A matrix (batch, heads, n, n)."""
        return self.batch * self.heads * self.n**2 * self.itemsize

    @property
    def lse_bytes(self) -> int:
        """The LSE (batch, heads, n)."""
        return self.batch * self.heads * self.n * STATISTIC

    def layer_bytes(self, attention: str, checkpoint: str = "none") -> int:
        """Return what a further layer keeps until its backward.

        none: the two inputs of norms, their results, q, k, v, out, and four hidden tensors: gate,
            up, silu(gate) and their product. Standard attention keeps P as well, ours the LSE.
        layers: the input alone. selective: the input, and attention's out and LSE.
        """
        unit = self.tokens_bytes
        if checkpoint == "layers":
            return unit
        if checkpoint == "selective":
            return 2 * unit + self.lse_bytes
        norms = 2 * self.batch * self.n * STATISTIC
        kept = self.score_bytes if attention == "standard" else self.lse_bytes
        return 8 * unit + 4 * self.hidden_bytes + norms + kept


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight that keeps x and one float32 number a token, on every device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        inverse = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        dweight = (dout * normed).flatten(0, -2).sum(0).to(weight.dtype)
        dnormed = dout * weight
        shared = (dnormed * normed).mean(-1, keepdim=True)
        return ((dnormed - normed * shared) * inverse).to(x.dtype), dweight


class Layer(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x)); causal."""

    def __init__(self, sizes: Sizes, attention: str):
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden
        self.heads, self.attention = sizes.heads, attention
        self.norms = nn.ParameterList([torch.ones(dim), torch.ones(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim, False), nn.Linear(dim, dim, False)
        self.gate, self.up = nn.Linear(dim, hidden, False), nn.Linear(dim, hidden, False)
        self.down = nn.Linear(hidden, dim, False)
        self.rotary = _Rotary()

    def forward(self, x: Tensor) -> Tensor:
        normed: Any = RMSNorm.apply(x, self.norms[0])
        q, k, v = self.qkv(normed).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k = self.rotary(q), self.rotary(k)
        # v by itself, so that it does not keep the storage of all three
        q, k, v = (t.transpose(1, 2) for t in (q, k, v.clone()))
        if self.attention == "standard":
            attended = standard_attention(q, k, v)
        else:
            attended = sparseflash.attention(q, k, v, masks.causal())
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = RMSNorm.apply(x, self.norms[1])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class _Rotary(layers.Rotary):
    """Rotary embeddings that keep nothing of x for the backward, which turns by minus the angle."""

    def forward(self, x: Tensor) -> Tensor:
        return _Turn.apply(x, super().forward)  # type: ignore[return-value]


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Any) -> Tensor:  # type: ignore[override]
        ctx.turn = turn
        return turn(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # The transpose of a turn by t is the turn by -t: that of the pair in the other order.
        half = dout.shape[-1] // 2
        a, b = dout[..., :half], dout[..., half:]
        turned = ctx.turn(torch.cat([b, a], dim=-1))
        return torch.cat([turned[..., half:], turned[..., :half]], dim=-1), None


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v; of the N x N matrices autograd keeps P."""
    n = q.shape[2]
    later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    return _masked(scores, later).softmax(-1) @ v


def _masked(scores: Tensor, later: Tensor) -> Tensor:
    """Return the scores with -inf for later keys. The gradient there is 0 by the softmax: P is
    0.
    """
    with torch.no_grad():
        scores.masked_fill_(later, -torch.inf)
    return scores


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what attention returns, compute the rest again."""
    kept = op is torch.ops.sparseflash.forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Stack(nn.Module):
    """Layers one after another, with one of CHECKPOINTS."""

    def __init__(self, sizes: Sizes, attention: str, layers: int, checkpoint: str = "none"):
        super().__init__()
        if attention == "standard" and checkpoint == "selective":
            raise ValueError(
                "checkpoint=selective keeps out and LSE of our attention: take attention=ours"
            )
        self.layers = nn.ModuleList(Layer(sizes, attention) for _ in range(layers))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._call(layer, x)
        return x

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.checkpoint == "none":
            return layer(x)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.checkpoint == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        found: Any = checkpoint(layer, x, **options)
        return found


class LiveBytes(TorchDispatchMode):
    """Counts storages from the operator that returns them to their release; `peak` is the most.

    What an operator allocates and frees inside is not seen. Storages from before are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and _key(x) not in self.known:
                self._know(x, 0)
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self._count(x)
        return found

    def _count(self, x: Tensor) -> None:
        size = x.untyped_storage().nbytes()
        if size and _key(x) not in self.known:
            self._know(x, size)

    def _know(self, x: Tensor, size: int) -> None:
        """Count a storage until its release, after which another may have its address."""
        storage, key = x.untyped_storage(), _key(x)
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the most that a step holds beyond what is held before it.

    On a GPU by its allocator, else by the storages that operators return.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    with LiveBytes() as live:
        step()
    return live.peak
