"""Who computes attention to picked blocks: ours, and kernels of other libraries."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import masks
import sparseflash
from experiments.bench.cases import Case
from experiments.bench.peers.cudnn import INSTALL as CUDNN
from experiments.bench.peers.cudnn import PACKAGE, not_hopper
from experiments.common.packages import why_missing
from experiments.papers.picking.cases import Inputs

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
DIRECTIONS = ("forward", "backward")


class Provider(ABC):
    """One that computes attention to the picked blocks, forward and backward unless it says so."""

    package = ""  # whose version rows name; empty for ours
    directions: tuple[str, ...] = DIRECTIONS

    def gated_by(self, inputs: Inputs) -> Case:
        """The case whose exact result it is held to."""
        return inputs.shape.picked(inputs.picks)

    def unsupported(self, inputs: Inputs) -> str | None:
        """Why it cannot run, or None."""
        return None

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Attention:
        """Does what is needed once for the picks; returns a function of q, k and v."""


@dataclass(frozen=True)
class SparseFlash(Provider):
    """`sparseflash.attention`.

    form: picks | selection | causal: the lists of each query, the same pairs as a plan of blocks
        and bit tiles that is made beforehand, or all that is causal.
    """

    form: str

    def gated_by(self, inputs: Inputs) -> Case:
        return inputs.shape.causal if self.form == "causal" else super().gated_by(inputs)

    def prepare(self, inputs: Inputs) -> Attention:
        mask: Any = inputs.picks if self.form == "picks" else masks.causal()
        if self.form == "selection":
            exact = inputs.picks.selection(inputs.shape.heads)
            mask = sparseflash.plan(exact, *inputs.qkv)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = sparseflash.attention(q, k, v, mask)
            assert isinstance(out, Tensor)
            return out

        return run


@cache
def _fla() -> str | None:
    return why_missing("fla-core", "pip install fla-core==0.6.0", "fla.ops.nsa.parallel")


@dataclass(frozen=True)
class Fla(Provider):
    """The selected branch of NSA in flash-linear-attention, without its other branches."""

    package = "fla-core"

    def unsupported(self, inputs: Inputs) -> str | None:
        if inputs.device.type != "cuda":
            return f"needs a CUDA device, not {inputs.device}"
        group, lists = inputs.shape.heads // inputs.shape.kv_heads, inputs.picks.heads
        if lists != inputs.shape.kv_heads:
            return f"takes a list for each key head, not {lists} for {inputs.shape.kv_heads}"
        if group < 16 or group & (group - 1):
            return f"takes groups of 16, 32, .. query heads, not of {group}"
        if (count := inputs.picks.blocks.shape[3]) & (count - 1):
            return f"takes 1, 2, 4, .. blocks for each query, not {count}"
        return _fla()

    def prepare(self, inputs: Inputs) -> Attention:
        function = importlib.import_module("fla.ops.nsa.parallel").ParallelNSAFunction
        blocks, counts = token_major(inputs)
        lists = blocks.long(), counts.long(), inputs.picks.block

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = (t.transpose(1, 2) for t in (q, k, v))
            return function.apply(*turned, *lists, q.shape[-1] ** -0.5, None).transpose(1, 2)

        return run


@cache
def _cudnn() -> str | None:
    return why_missing("cuDNN Frontend", CUDNN, "cudnn.native_sparse_attention")


@dataclass(frozen=True)
class Cudnn(Provider):
    """The selected branch of NSA in cuDNN Frontend, which has no backward."""

    package = PACKAGE
    directions = ("forward",)

    def unsupported(self, inputs: Inputs) -> str | None:
        shape, picks = inputs.shape, inputs.picks
        if reason := not_hopper(shape.causal, inputs.device, ("bfloat16", "float16")):
            return reason
        if picks.heads != shape.kv_heads:
            return f"takes a list for each key head, not {picks.heads} for {shape.kv_heads}"
        if shape.heads > 16 * shape.kv_heads:
            return f"takes groups of up to 16 query heads, not {shape.heads // shape.kv_heads}"
        if picks.block not in (16, 32, 64, 128):
            return f"takes blocks of 16, 32, 64 and 128, not {picks.block}"
        return _cudnn()

    def prepare(self, inputs: Inputs) -> Attention:
        call = importlib.import_module("cudnn.native_sparse_attention").NSA
        n, batch = inputs.shape.n, inputs.shape.batch
        blocks, counts = (t.flatten(0, 1) for t in token_major(inputs))
        ends = torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=inputs.device)
        sizes = {"block_size": inputs.picks.block, "max_s_q": n, "max_s_k": n, "is_causal": True}

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
            found = call.selection_attention_wrapper(*flat, blocks, counts, ends, ends, **sizes)
            return found[0].unflatten(0, (batch, n)).transpose(1, 2)

        return run


def token_major(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """int32 (B, N, H, k) blocks, 0 where a query has none, and (B, N, H), how many it has."""
    picks = inputs.picks
    blocks = picks.blocks.expand(inputs.shape.batch, -1, -1, -1).transpose(1, 2)
    real = blocks != picks.none
    return torch.where(real, blocks, 0).contiguous(), real.sum(-1, dtype=torch.int32)


PROVIDERS: dict[str, Provider] = {
    "picks": SparseFlash("picks"),
    "selection": SparseFlash("selection"),
    "causal": SparseFlash("causal"),
    "fla": Fla(),
    "cudnn": Cudnn(),
}
