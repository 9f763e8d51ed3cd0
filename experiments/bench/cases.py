"""A case: one mask at one shape."""

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

import masks
from experiments.bench.cost import Shape, cost
from experiments.common.config import choose, whole_number
from masks.patterns.bands import Band
from masks.tiles import FULL, unpack_bits

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DENSE = "dense"
CAUSAL = str(masks.causal())  # the one mask that peers without blocks have kernels for
LAYOUTS = ("head_major", "token_major")


@dataclass(frozen=True)
class Case:
    """One mask at one shape.

    q is (batch, heads, n_q, head_dim), k is (batch, kv_heads, n_k, head_dim), and v has v_dim there
    (None: head_dim). `mask` is the text of a mask; "dense" means that no mask is passed at all, and
    has blocks of 0. `layout` is that of memory: head_major (B, H, N, D) or token_major
    (B, N, H, D), which is passed as a transposed view.
    """

    mask: str
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    dtype: str
    block_q: int
    block_k: int
    v_dim: int | None = None
    layout: str = LAYOUTS[0]

    def row(self) -> dict[str, Any]:
        """Return its fields of a row."""
        return asdict(self) | {"v_dim": self.value_dim, "density": self.density}

    @property
    def value_dim(self) -> int:
        """The head dim of v and out."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def shape(self) -> Shape:
        """What `cost` takes."""
        extents = self.batch, self.heads, self.kv_heads, self.n_q, self.n_k
        return Shape(*extents, self.head_dim, self.value_dim, DTYPES[self.dtype].itemsize)

    @property
    def causal(self) -> bool:
        """Whether a peer's own causal kernel computes just this mask."""
        return self.mask == CAUSAL and self.n_q == self.n_k

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """Keys to the left and the right of a query, None for all of a side, where the mask is one
        window over a square.
        """
        mask = None if self.mask == DENSE else masks.parse(self.mask)
        if not isinstance(mask, Band) or self.n_q != self.n_k or min(mask.high, -mask.low) < 0:
            return None
        left, right = (None if side >= self.n_k else side for side in (mask.high, -mask.low))
        return left, right

    @property
    def documents(self) -> tuple[int, ...] | None:
        """The lengths of documents that see themselves only, causal or not, where that is the mask
        of a square.
        """
        found = re.fullmatch(r"documents\(\(([\d, ]+)\)\)( & causal\(\))?", self.mask)
        if not found or self.n_q != self.n_k:
            return None
        lengths = tuple(int(n) for n in found[1].split(",") if n.strip())
        return lengths if sum(lengths) == self.n_k else None

    @cached_property
    def blocks(self) -> masks.BlockMask | None:
        """The mask at this length and block size, None for dense."""
        if self.mask == DENSE:
            return None
        mask = masks.parse(self.mask)
        options = {"batch": self.batch, "heads": self.heads if mask.per_head else None}
        return mask.build(self.n_q, self.n_k, (self.block_q, self.block_k), **options)

    @property
    def density(self) -> float:
        """Non-empty blocks / all blocks."""
        return 1.0 if self.blocks is None else self.blocks.density

    @cached_property
    def elements(self) -> float:
        """Allowed (query, key) pairs / all pairs."""
        return 1.0 if self.blocks is None else self.blocks.stats().element_density

    def flops(self, direction: str) -> float:
        """Floating-point operations in the computed blocks: two products, backward five."""
        return cost(self.shape, self.blocks, direction).flops

    def allowed(self, batch: int, head: int, rows: np.ndarray) -> np.ndarray:
        """bool (len(rows), n_k): the keys that these queries may attend to.

        Decoded from the run-length code itself, not from the block lists that kernels read.
        """
        if self.blocks is None:
            return np.ones((len(rows), self.n_k), bool)
        blocks = self.blocks
        slice_ = (batch if blocks.batch > 1 else 0) * blocks.heads
        slice_ += head if blocks.heads > 1 else 0
        block_row = slice_ * blocks.rows + rows // self.block_q
        cells = block_row[:, None] * blocks.cols + np.arange(blocks.cols)
        code = blocks.tiles[np.searchsorted(blocks.starts, cells, side="right") - 1]
        allowed = np.repeat((code == FULL)[:, :, None], self.block_k, axis=2)
        r, c = np.nonzero(code >= 0)
        bits = blocks.bits[code[r, c], rows[r] % self.block_q]
        allowed[r, c] = unpack_bits(bits, self.block_k)
        return allowed.reshape(len(rows), -1)[:, : self.n_k]

    def check(self) -> None:
        """Raise ValueError for values that no case can have."""
        for name in "batch heads kv_heads n_q n_k head_dim block_q block_k".split():
            whole_number(name, getattr(self, name))
        whole_number("v_dim", self.value_dim)
        choose("layout", self.layout, LAYOUTS)
        choose("dtype", self.dtype, DTYPES)
        if self.heads % self.kv_heads:
            heads = f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}"
            raise ValueError(f"{heads}; change one of them")
