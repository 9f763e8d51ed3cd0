"""Picks: the key blocks that each query picked for itself, as lists."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from masks.checks import integer
from sparseflash.dynamic.selection import Selection, of_heads
from sparseflash.picks.words import selection_of, up_to_itself, words_of


@dataclass(frozen=True, eq=False, repr=False)
class Picks:
    """Key blocks that each query picked for itself; made by `Picks.of`, and by the method `picks`
    of the selectors `moba` and `nsa`.

    `sparseflash.attention` takes it for its mask. On an NVIDIA GPU its time is in proportion to the
    blocks that are picked, where a `Selection` computes the union over a query block.

    Attributes:
        blocks: int32 (B or 1, H, N_q, k), the numbers of key blocks, ascending. `none` is no block.
            H is that of k, or of q, or between: heads that follow each other share a list.
        block: keys of a block, a multiple of 16.
        n_k: keys.
        causal: whether query i sees no key after N_k - N_q + i.
    """

    blocks: Tensor
    block: int
    n_k: int
    causal: bool = True

    @classmethod
    def of(cls, blocks: Tensor, block: int, n_k: int, *, causal: bool = True) -> "Picks":
        """Return the picks of int (B or 1, H, N_q, k) numbers of key blocks in any order, -1 for
        none.

        Numbers that come twice or do not exist are an error on a CPU. A GPU is not waited for:
        there they count as none.
        """
        integer("block", block, min=16)
        integer("n_k", n_k, min=1)
        if block % 16:
            raise ValueError(f"block is {block}: give a multiple of 16")
        whole = not blocks.is_floating_point() and blocks.dtype != torch.bool
        if blocks.ndim != 4 or not whole or not blocks.shape[3]:
            raise ValueError(
                f"blocks is {blocks.dtype} {tuple(blocks.shape)}: give ints (B, H, N_q, k)"
            )
        count = -(-n_k // block)
        none = 2**30 // block
        given = blocks.long()  # int32 would wrap
        exists = (given >= 0) & (given < count)
        given = torch.where(exists, given.int(), none).sort(-1).values
        again = F.pad(given[..., 1:] == given[..., :-1], (1, 0))
        made = torch.where(again, none, given).sort(-1).values
        if made.device.type == "cpu" and not torch.compiler.is_compiling():
            lost = (blocks.long() != -1).sum() - (made != none).sum()
            if lost:
                raise ValueError(
                    f"blocks has {int(lost)} numbers that come twice in a list, or are not in -1 .."
                    f" {count - 1}: give different blocks of {block} of the {n_k} keys"
                )
        return cls(made, block, n_k, causal)

    @property
    def none(self) -> int:
        """The number that stands for no block."""
        return 2**30 // self.block

    @property
    def heads(self) -> int:
        """Heads that pick."""
        return self.blocks.shape[1]

    @property
    def n_q(self) -> int:
        """Queries."""
        return self.blocks.shape[2]

    def selection(self, heads: int) -> Selection:
        """Return the same pairs as a `Selection` for q of `heads` heads, with bit tiles for 16
        queries.

        Waits for the device, to count the tiles. Raises ValueError where the heads that pick do not
        divide `heads`.
        """
        if heads % self.heads:
            raise ValueError(f"{self.heads} heads picked, of {heads}: they must divide them")
        count = -(-self.n_k // self.block)
        at = self.blocks.clamp(max=count).long()
        taken = at.new_zeros(*at.shape[:3], count + 1, dtype=torch.bool).scatter_(3, at, True)
        words = words_of(taken[..., :count])
        block_k = max(b for b in range(16, 257, 16) if self.block % b == 0)
        found = selection_of(words, self.n_q, self.n_k, (16, block_k), self.block, None)
        return of_heads(found & up_to_itself(self.n_q, self.n_k) if self.causal else found, heads)

    def __repr__(self) -> str:
        return (
            f"Picks({self.blocks.shape[3]} blocks of {self.block} keys, {self.n_q} queries, "
            f"{self.n_k} keys, heads {self.heads}, {self.blocks.device})"
        )
