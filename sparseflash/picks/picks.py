"""Picks: the key blocks that each query picked for itself, as lists or as bits of words."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.bands import causal
from masks.tiles import edge_tiles
from sparseflash.cache import cached
from sparseflash.dynamic.selection import Selection, number_tiles, of_heads, to_device


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


GROUP = 16  # queries in a word; it divides every block size


def words_of(taken: Tensor) -> Tensor:
    """int16 (B, heads, groups, chunks) of bool (B, heads, n, chunks), the first query in bit 0."""
    weight = 1 << torch.arange(GROUP, dtype=torch.int32, device=taken.device)[:, None]
    taken = F.pad(taken, (0, 0, 0, -taken.shape[2] % GROUP)).unflatten(2, (-1, GROUP))
    return (taken * weight).sum(3, dtype=torch.int32).to(torch.int16)


def taken_by(words: Tensor, n: int) -> Tensor:
    """bool (B, heads, n, chunks), what `words_of` was given."""
    bit = torch.arange(GROUP, dtype=torch.int16, device=words.device)[:, None]
    return ((words[..., None, :] >> bit) & 1).flatten(2, 3)[:, :, :n] != 0


def selection_of(
    words: Tensor, n_q: int, n_k: int, block_size: tuple[int, int], chunk: int,
    capacity: int | None,
) -> Selection:  # fmt: skip
    """Return the block mask of what every query picked.

    words: (B, heads, groups, chunks), whose groups fill the last query block. capacity: room for
        partial blocks, of which those beyond are taken whole; None waits for the device to count.
    """
    block_q, block_k = block_size
    rows, cols = -(-n_q // block_q), -(-n_k // block_k)
    words = words.unflatten(2, (rows, -1))  # (B, heads, rows, block_q / 16, chunks)
    picked = (words != 0).any(3)
    partial = picked & (words != _existing(n_q, block_q, words.device)).any(3)
    per_chunk = chunk // block_k
    picked, partial = (by_block(x, per_chunk, cols) for x in (picked, partial))
    room = min(capacity or int(partial.sum()), picked.numel())
    code, cell = number_tiles(picked, partial, room)
    row, col = cell // cols, cell % cols
    word = words.flatten(0, 2)[row, :, col // per_chunk]  # (T, block_q / 16)
    bit = torch.arange(GROUP, dtype=torch.int16, device=code.device)
    chosen = ((word[..., None] >> bit) & 1).flatten(1) != 0  # (T, block_q)
    keys = _key_words(n_k, block_size, code.device)[(col == cols - 1).int()]
    bits = torch.where(chosen[..., None], keys[:, None], 0)
    return Selection(code, bits, n_q, n_k, block_size, code.numel(), owned=room)


def up_to_itself(n_q: int, n_k: int) -> Mask:
    """Return the mask of the keys up to each query, the last of which stands at the last key."""
    return causal() if n_q == n_k else causal(align="bottom_right")


def by_block(x: Tensor, per_chunk: int, cols: int) -> Tensor:
    """From chunks to the key blocks of each."""
    return x[..., None].expand(*x.shape, per_chunk).flatten(-2)[..., :cols]


@cached
def _existing(n: int, block_q: int, device: torch.device) -> Tensor:
    """int16 (rows, block_q / 16, 1): words of all queries that exist."""
    there = np.arange(n + -n % block_q).reshape(-1, block_q // GROUP, GROUP) < n
    words = (there << np.arange(GROUP)).sum(-1, keepdims=True)
    return to_device(words.astype(np.uint16).view(np.int16), device)


@cached
def _key_words(n: int, block_size: tuple[int, int], device: torch.device) -> Tensor:
    """int32 (2, words): the bits of the keys in an inner block, and in the last."""
    return to_device(edge_tiles(n, n, block_size)[:2, 0].view(np.int32), device)
