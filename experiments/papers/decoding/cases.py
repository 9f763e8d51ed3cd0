"""A decoding step: its inputs on the device, what its queries see, and what must be read."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import masks
from experiments.bench import cases as bench
from experiments.bench.cases import DENSE, DTYPES
from experiments.common.devices import free_memory
from sparseflash.select.selection import Selection

SELECTED = "top_blocks"  # each key head reads its best blocks, by the means of their keys
BLOCK = 64  # tokens of a block of keys
COLD = 2**28  # bytes that the caches of a measurement hold together: several times the L2
MOST_CACHES = 16


@dataclass(frozen=True)
class Step:
    """One decoding step. mask: "dense", the text of a mask, or "top_blocks".

    page: tokens of a page, 0 for a contiguous cache. chosen: tokens that top_blocks reads.
    """

    mask: str
    page: int
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n: int
    head_dim: int
    dtype: str
    chosen: int

    def check(self) -> None:
        """Raises ValueError for values that no step can have."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; change one"
            )
        for unit in (BLOCK, self.page):
            if unit and self.n % unit:
                raise ValueError(f"lengths={self.n}: give multiples of {unit}, a block or a page")
        if self.n_q > self.n:
            raise ValueError(f"n_q={self.n_q}: give at most the keys, {self.n}")
        if self.mask not in (DENSE, SELECTED):
            masks.parse(self.mask)

    @property
    def blocks(self) -> int:
        """Blocks that top_blocks takes."""
        return min(self.chosen, self.n) // BLOCK

    @property
    def text(self) -> str:
        """The mask as rows have it."""
        return f"{SELECTED}({self.blocks})" if self.mask == SELECTED else self.mask

    @cached_property
    def own_rows(self) -> np.ndarray:
        """Bool (n_q, n): the keys that the queries see by a static mask, or by none."""
        shape = self.batch, self.heads, self.kv_heads, self.n, self.n, self.head_dim, self.dtype
        case = bench.Case(self.mask, *shape, BLOCK, BLOCK)
        return case.allowed(0, 0, np.arange(self.n - self.n_q, self.n))

    def read_bytes(self, keys: float) -> float:
        """Of one call: that many keys of each key head with their values, q and out."""
        itemsize, dim = DTYPES[self.dtype].itemsize, 2 * self.head_dim
        return self.batch * dim * itemsize * (self.kv_heads * keys + self.heads * self.n_q)


class Inputs:
    """q, and as many caches as it takes for none of them to stay in the L2; drawn on the device.

    Keys and values are (B, H_kv, N, D), or with pages (pages, page, H_kv, D). All caches share one
    block table, as the layers of a model do.
    """

    def __init__(self, step: Step, device: torch.device):
        self.step, self.device = step, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.q = self._draw(step.batch, step.heads, step.n_q, step.head_dim)
        shape = (step.batch, step.kv_heads, step.n, step.head_dim)
        self.table = None
        if step.page:
            pages = step.batch * step.n // step.page
            shape = (pages, step.page, step.kv_heads, step.head_dim)
            order = torch.randperm(pages, device=device, generator=self._generator)
            self.table = order.view(step.batch, -1).int()
        self.lengths = torch.full((step.batch,), step.n, dtype=torch.int32, device=device)
        self.caches = [(self._draw(*shape), self._draw(*shape)) for _ in range(self._count())]

    def _draw(self, *shape: int) -> Tensor:
        options = {"dtype": DTYPES[self.step.dtype], "generator": self._generator}
        return torch.randn(shape, device=self.device, **options)

    def _count(self) -> int:
        if self.device.type != "cuda":
            return 1
        whole = self.step.read_bytes(self.step.n)
        wanted = -(-COLD // int(self.step.read_bytes(float(self.seen.sum(-1).double().mean()))))
        return max(1, min(max(2, wanted), MOST_CACHES, int(free_memory(self.device) / 2 / whole)))

    @cached_property
    def seen(self) -> Tensor:
        """Bool (1 or H_kv, n): keys that some query of the first sequence sees.

        Before the blocks are chosen, those of top_blocks are the first ones.
        """
        step = self.step
        if step.mask == SELECTED:
            return (torch.arange(step.n) < step.blocks * BLOCK)[None]
        return torch.from_numpy(step.own_rows.any(0))[None]

    def keys_of(self, which: int, b: int, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values (N, D) of a sequence and key head in one of the caches."""
        found = self.caches[which]
        if self.table is None:
            return found[0][b, head], found[1][b, head]
        pages = self.table[b].long()
        k, v = (cache[pages, :, head].flatten(0, 1) for cache in found)
        return k, v

    @cached_property
    def summaries(self) -> list[Tensor]:
        """Of each cache, the mean of every block of keys: (B, H_kv, blocks, D).

        A decoder keeps them up to date, so that they are no part of the time.
        """
        found = []
        for keys, _ in self.caches:
            if self.table is not None:  # (B, H_kv, N, D), one cache at a time
                keys = keys[self.table.long()].flatten(1, 2).transpose(1, 2)
            found.append(keys.unflatten(2, (-1, BLOCK)).mean(3))
        return found

    def choose(self, which: int) -> Selection:
        """The best blocks for each key head, in one of the caches."""
        step, summary = self.step, self.summaries[which]
        asking = self.q.unflatten(1, (step.kv_heads, -1)).mean((2, 3)).unsqueeze(2)
        scores = asking @ summary.mT  # (B, H_kv, 1, blocks)
        best = scores.topk(step.blocks).indices
        layout = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        sizes = {"n_q": step.n_q, "n_k": step.n}
        sizes["max_blocks"] = step.batch * step.kv_heads * step.blocks
        return Selection.from_layout(layout, (-(-step.n_q // 16) * 16, BLOCK), **sizes)

    def allowed(self, b: int, head: int) -> Tensor:
        """Bool (n_q, n): what the queries of a key head see in the first cache."""
        if self.step.mask != SELECTED:
            return torch.from_numpy(self.step.own_rows).to(self.device)
        taken = self.choose(0).codes[b, head] == -1  # (1, blocks)
        return taken.repeat_interleave(BLOCK, 1).expand(self.step.n_q, -1)
