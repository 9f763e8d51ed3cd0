"""Selectors by which every query picks key blocks of its own: MoBA and NSA."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import block_sizes, flag, integer
from masks.tiles import EMPTY, FULL
from sparseflash.dynamic.selection import Selection, heads_of, of_heads, static_selection
from sparseflash.kernels.common.device import kernels_of, on_nvidia
from sparseflash.picks.picks import (
    GROUP,
    Picks,
    by_block,
    selection_of,
    taken_by,
    up_to_itself,
    words_of,
)
from sparseflash.select.base import (
    Candidates,
    OwnRows,
    Rule,
    Selector,
    check_slices,
    choose,
    selector,
)
from sparseflash.select.blocks import SCORES_AT_ONCE, dot, pool


@dataclass(frozen=True, repr=False, eq=False)
class TokenSelector(Selector):
    """The selectors of `moba` and `nsa`: every query picks chunks of keys."""

    chunk: int  # tokens
    k: int
    first: int  # chunks at the beginning that every query takes
    own: int  # chunks up to its own that every query takes
    union: bool
    capacity: int | None
    nsa: bool  # the query heads of a KV head pick together, by importance

    def __post_init__(self) -> None:
        flag("union", self.union)
        integer("k", self.k, min=1)
        if not isinstance(self.within, Mask | None):
            raise ValueError(f"within is {self.within!r}: give a Mask or None")
        if self.capacity is not None:
            integer("capacity", self.capacity, min=1)

    def select(self, q: Tensor, k: Tensor) -> Selection:
        mask = self._seen(q.shape[2], k.shape[2])
        check_slices("within", (mask.batch or 1, mask.heads or 1), q)
        return self._selected(self.words(q, k), mask, q, k.shape[2])

    def candidates(self) -> Mask:
        return self._seen(1, 1)

    def summary(self, k: Tensor) -> Tensor:
        return pool((k, self.block_size[1], ["mean"]))[0]

    def select_rows(self, q: Tensor, summary: Tensor, rows: OwnRows) -> Selection:
        size = self.block_size[1]
        many = (rows.n - size * torch.arange(summary.shape[2], device=q.device)).clamp(max=size)
        per_chunk = self.chunk // size
        short = 0, -len(many) % per_chunk
        total, count = F.pad(summary * many[:, None], (0, 0, *short)), F.pad(many, short)
        mean = total.unflatten(2, (-1, per_chunk)).sum(3)
        mean = mean / count.unflatten(0, (-1, per_chunk)).sum(1)[:, None]
        padded = q.shape[2] + -q.shape[2] % self.block_size[0]
        words = _pick(self, q, mean, rows.positions(q.device), padded)
        return self._selected(words, rows.of(self.candidates(), self.block_size), q, rows.n)

    def _seen(self, n_q: int, n_k: int) -> Mask:
        seen = up_to_itself(n_q, n_k)
        return seen & self.within if isinstance(self.within, Mask) else seen

    def _selected(self, words: Tensor, mask: Mask | BlockMask, q: Tensor, n_k: int) -> Selection:
        n_q, heads = q.shape[2], q.shape[1]
        if self.union:
            return self._union(words, mask, n_q, n_k, heads)
        by_head = (mask.heads or 1) > 1 or (isinstance(mask, Mask) and mask.per_head)
        if by_head and words.shape[1] != heads:
            words = words.repeat_interleave(heads // words.shape[1], 1)
        found = selection_of(words, n_q, n_k, self.block_size, self.chunk, self.capacity) & mask
        return of_heads(found, heads)

    def picks(self, q: Tensor, k: Tensor) -> Picks:
        """Return the chunks that each query picked, as lists, which `sparseflash.attention` takes.

        Raises ValueError with `within`, `union` or `capacity`, which lists do not have.
        """
        for name in ("within", "union", "capacity"):
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{name} is {getattr(self, name)!r}: picks have none")
        taken = taken_by(self.words(q, k), q.shape[2])
        count = taken.shape[3]
        number = torch.arange(count, dtype=torch.int32, device=q.device)
        number = torch.where(taken, number, 2**30 // self.chunk)
        blocks = number.topk(min(self.k, count), largest=False, sorted=True).values
        return Picks(blocks.sort(-1).values, self.chunk, k.shape[2])

    def words(self, q: Tensor, k: Tensor) -> Tensor:
        """int16 (B, heads, groups, chunks): who of 16 queries takes a chunk, the first in bit 0.

        The groups fill the last query block.
        """
        padded = q.shape[2] + -q.shape[2] % self.block_size[0]
        if on_nvidia(q) and q.dtype != torch.float64:
            if -(-k.shape[2] // self.chunk) <= kernels_of("select").MAX_CHUNKS:
                sizes = (self.chunk, self.k, self.first, self.own, padded)
                return kernels_of("select").pick_chunks(q, k, *sizes, nsa=self.nsa)
        return pick_torch(self, q, k, padded)

    def _union(
        self, words: Tensor, mask: Mask | BlockMask, n_q: int, n_k: int, heads: int
    ) -> Selection:
        """`mask` in the blocks that a query picked."""
        block_q, block_k = self.block_size
        built_with = heads_of(mask, heads)
        static = static_selection(mask, n_q, n_k, self.block_size, built_with, words.device)
        unite = kernels_of("select").union_of_picks if on_nvidia(words) else union_torch
        codes = unite(words, static.codes, heads, block_q // GROUP, self.chunk // block_k)
        max_blocks = static.max_blocks * (codes.numel() // static.codes.numel())
        return Selection(codes, static.bits, n_q, n_k, self.block_size, max_blocks)


@selector
def moba(
    chunk: int,
    k: int,
    block_size: int | tuple[int, int] = 128,
    *,
    union: bool = False,
    capacity: int | None = None,
    within: Mask | None = None,
) -> TokenSelector:
    """Every query attends to its own chunk and to the k - 1 earlier chunks of the best scores.

    The score of a chunk of keys is query times mean key. A query sees keys up to itself, and its
    own chunk counts among the k. MoBA, arXiv:2502.13189. With fewer queries than keys, as where a
    prompt is processed in parts, the last query stands at the last key.

    Args:
        chunk: tokens, a multiple of both block sizes.
        k: chunks of a query; fewer where there are no more.
        block_size: of the mask that comes out, one size or (block_q, block_k).
        union: take a chunk for the whole query block when one of its queries picks it. This makes
            no bit tiles, but more pairs than MoBA has, up to all of them.
        capacity: room for partial blocks in all. None waits for the device to count them. With a
            number nothing waits, and partial blocks that have no room are taken whole, as with
            `union`.
        within: pairs that may be allowed at all, besides `causal()`.

    Takes 2 B H N^2 D / chunk operations for the scores. On a GPU they stay on the chip, and the
    picks take B H N^2 / (8 chunk) bytes. Raises ValueError for arguments out of range.
    """
    block_size = block_sizes(block_size)
    integer("chunk", chunk, min=16)
    if chunk % block_size[0] or chunk % block_size[1]:
        raise ValueError(
            f"chunk is {chunk}: give a multiple of block_size {block_size}, or change it"
        )
    return TokenSelector(block_size, within, chunk, k, 0, 1, union, capacity, nsa=False)


@selector
def nsa(
    k: int = 16,
    block: int = 64,
    block_q: int = 64,
    *,
    first: int = 0,
    own: int = 1,
    union: bool = False,
    capacity: int | None = None,
    within: Mask | None = None,
) -> TokenSelector:
    """Return the selection branch of native sparse attention: k key blocks for every query and KV
    head.

    A block is compressed to its mean key. The importance of a block is its probability, a softmax
    over the compressed blocks that end before the query or with it, summed over the query heads
    that share the KV head. The query's own block is always taken, and counts among the k. NSA,
    arXiv:2502.11089, whose learned compression is the mean here. With fewer queries than keys the
    last query stands at the last key.

    Args:
        k: blocks of a query; fewer where there are no more.
        block: keys of a block.
        block_q: queries in a block of the mask that comes out.
        first: blocks at the beginning that are always taken, and count.
        own: blocks up to the query's own that are always taken, and count. The paper trains with
            first=1, own=2.
        union, capacity, within: as in `moba`.

    Takes 2 B H N^2 D / block operations. Raises ValueError for arguments out of range.
    """
    block_size = block_sizes((block_q, block))
    integer("first", first, min=0)
    integer("own", own, min=1)
    made = TokenSelector(block_size, within, block, k, first, own, union, capacity, nsa=True)
    if first + own > k:
        raise ValueError(f"first + own is {first + own}: give no more than k, {k}")
    return made


def pick_torch(selector: TokenSelector, q: Tensor, k: Tensor, padded: int) -> Tensor:
    """`TokenSelector.words` in plain torch."""
    (mean,) = pool((k, selector.chunk, ["mean"]))
    place = torch.arange(q.shape[2], device=q.device) + (k.shape[2] - q.shape[2])
    return _pick(selector, q, mean, place, padded)


def _pick(selector: TokenSelector, q: Tensor, mean: Tensor, place: Tensor, padded: int) -> Tensor:
    """Return the words of queries at `place` (n,), from the means (B, H_kv, chunks, D) of chunks.

    The scores of some queries at a time.
    """
    n, chunk = q.shape[2], selector.chunk
    rule = Rule("count", selector.k)
    step = max(chunk, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * mean.shape[2]))
    step += -step % GROUP
    words = []
    for start in range(0, n, step):
        part = q[:, :, start : start + step].to(mean.dtype)
        token = place[start : start + part.shape[2], None]
        scores = importance(part, mean, token, chunk) if selector.nsa else dot(part, mean)
        picks = choose(scores, _candidates(selector, token, mean.shape[2]), rule)
        words.append(words_of(picks == FULL))
    missing = padded // GROUP - sum(part.shape[2] for part in words)
    return F.pad(torch.cat(words, 2), (0, 0, 0, missing))


def importance(q: Tensor, k_mean: Tensor, token: Tensor, chunk: int) -> Tensor:
    """(B, H_kv, n, chunks): the probabilities of the chunks up to each token, summed by group.

    q: (B, H, n, D); k_mean: (B, H_kv, chunks, D); token: (n, 1), the places of the queries.
    """
    scores = dot(q * q.shape[-1] ** -0.5, k_mean)
    last = torch.arange(1, k_mean.shape[2] + 1, device=q.device) * chunk - 1
    hidden = last > token
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    return p.unflatten(1, (k_mean.shape[1], -1)).sum(2)


def _candidates(selector: TokenSelector, token: Tensor, n_chunks: int) -> Candidates:
    """Return the chunks that the queries at the places `token` (n, 1) may pick; int8 codes."""
    chunks = torch.arange(n_chunks, device=token.device)
    mine = (token // selector.chunk)[None, None]
    seen = chunks <= mine
    forced = seen & ((chunks > mine - selector.own) | (chunks < selector.first))
    low = forced.sum(-1, dtype=torch.int32).clamp(min=selector.k)
    low = low.minimum(seen.sum(-1, dtype=torch.int32))
    codes = torch.where(seen, FULL, EMPTY).to(torch.int8)
    no_bits = codes.new_empty((0, 1, 1), dtype=torch.int32)
    return Candidates(codes, no_bits, forced.to(torch.int8), low, low, 0)


def union_torch(words: Tensor, codes: Tensor, heads: int, per_row: int, per_chunk: int) -> Tensor:
    """Return the codes of the blocks that a query picked, int32 (B, heads, rows, cols), else EMPTY.

    words: as from `TokenSelector.words`, `per_row` of them to a query block; codes: (1 or B, 1 or
        heads, rows, cols); a chunk has `per_chunk` key blocks.
    """
    picked = (words.unflatten(2, (codes.shape[2], per_row)) != 0).any(3)
    picked = by_block(picked, per_chunk, codes.shape[3])
    picked = picked.repeat_interleave(heads // words.shape[1], 1)
    return torch.where(picked, codes, EMPTY)
