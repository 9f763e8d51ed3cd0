"""A selection by every query: what it sees, for the gate, and how much that is."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.bench.cases import CAUSAL, DENSE, DTYPES, Case
from experiments.bench.selectors import parse
from sparseflash import select
from sparseflash.select.tokens import TokenSelector


@dataclass(frozen=True, eq=False)
class PickedCase(Case):
    """A case whose queries see what they picked, without a mask beside it."""

    picks: select.Picks | None = None

    def allowed(self, batch: int, head: int, rows: np.ndarray) -> np.ndarray:
        assert self.picks is not None
        of_head = self.picks.blocks[batch % len(self.picks.blocks)][
            head * self.picks.heads // self.heads
        ]
        chosen = of_head[torch.from_numpy(rows).to(of_head.device)].cpu().numpy()
        count = -(-self.n_k // self.picks.block)
        taken = np.zeros((len(rows), count + 1), bool)
        np.put_along_axis(taken, np.minimum(chosen, count), True, axis=1)
        seen = taken[:, :count].repeat(self.picks.block, axis=1)[:, : self.n_k]
        return seen & (np.arange(self.n_k) <= rows[:, None])


@dataclass(frozen=True)
class Shape:
    """What is measured: a selector by its text, and the sizes of q, k and v."""

    selector: str
    batch: int
    heads: int
    kv_heads: int
    n: int
    head_dim: int
    dtype: str

    @property
    def rule(self) -> TokenSelector:
        """The selector. Raises ValueError for one whose queries do not pick for themselves."""
        found = parse(self.selector)
        if isinstance(found, TokenSelector):
            if (found.within, found.union, found.capacity) == (None, False, None):
                return found
        raise ValueError(f"selectors: {self.selector} has no picks; give moba or nsa alone")

    @property
    def causal(self) -> Case:
        """What a causal mask allows at these sizes."""
        return Case(CAUSAL, **self._sizes)

    def picked(self, picks: select.Picks) -> Case:
        """What the picks allow."""
        return PickedCase(DENSE, **self._sizes, picks=picks)

    @property
    def _sizes(self) -> dict[str, Any]:
        names = ("batch", "heads", "kv_heads", "head_dim", "dtype")
        sizes = {name: getattr(self, name) for name in names}
        return sizes | {"n_q": self.n, "n_k": self.n, "block_q": 128, "block_k": 128}

    def check(self) -> None:
        """Raises ValueError for values that no shape can have."""
        self.causal.check()
        assert self.rule


class Inputs:
    """q, k and v in memory as (B, N, H, D), and what the selector picks of them.

    They are standard normal, so picks are scattered as widely as they can be: the union over a
    query block is denser than in a trained model.
    """

    def __init__(self, shape: Shape, device: torch.device):
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(0)

        def drawn(heads: int) -> Tensor:
            size = shape.batch, shape.n, heads, shape.head_dim
            options = {"dtype": DTYPES[shape.dtype], "device": device, "generator": generator}
            return torch.randn(size, **options).transpose(1, 2).requires_grad_()

        self.qkv = drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)
        with torch.no_grad():
            self.picks = shape.rule.picks(*self.qkv[:2])

    @cached_property
    def share(self) -> float:
        """Allowed (query, key) pairs over all of them."""
        first = self.picks.blocks.long() * self.picks.block
        query = torch.arange(self.shape.n, device=self.device)[:, None]
        seen = (query + 1 - first).clamp(0, self.picks.block)
        return seen.sum().item() / (first.shape[0] * first.shape[1] * self.shape.n**2)
