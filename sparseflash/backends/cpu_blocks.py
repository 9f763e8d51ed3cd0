"""What the CPU backend computes on: blocks of tensors, groups of block lists, threads.

A *pair* is a block of one query head, numbered (b * Hq + h) * blocks per head + block.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from sparseflash.dropout import dropout_keys, keep_from_keys, keep_scale
from sparseflash.schedule.blocks import Schedule

# Numbers in the buffers of one batch of products: more of them fall out of the cache, with fewer
# the calls themselves cost too much.
BUFFER_NUMBERS = 2**20


def to_blocks(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """(B, H, N, D) to (B * H * blocks, block, D): a view, or a copy padded with zeros."""
    batch, heads, length, dim = x.shape
    padding = -length % block
    if padding:
        padded = x.new_zeros((batch, heads, length + padding, dim), dtype=dtype)
        padded[:, :, :length] = x
        x = padded
    return x.to(dtype).reshape(-1, block, dim)


def from_blocks(blocks: Tensor, result: Tensor) -> Tensor:
    """Return the inverse of `to_blocks`, as `laid_out` has it."""
    batch, heads, length, dim = result.shape
    return laid_out(blocks.view(batch, heads, -1, dim)[:, :, :length], result)


def laid_out(x: Tensor, result: Tensor) -> Tensor:
    """Return x with the dtype and strides of `result`, or in it."""
    if x.dtype == result.dtype and x.stride() == result.stride():
        return x
    return result.copy_(x)


class Chunk(NamedTuple):
    """Some blocks of every list of a group."""

    other: Tensor  # int64 (lists, blocks)  pairs: of key blocks (forward), query blocks (backward)
    tile: Tensor  # int64 (lists, first blocks)  their tiles; after those, all blocks are full


class BlockGroups:
    """The lists of a schedule, for every query head, in groups that are computed together."""

    def __init__(
        self, schedule: Schedule, q: Tensor, k: Tensor, kv_heads: range, *, by_query: bool
    ):
        lists = schedule.rows if by_query else schedule.cols
        n_rows, n_cols = -(-schedule.n_q // schedule.block_q), -(-schedule.n_k // schedule.block_k)
        n_own, self.n_other = (n_rows, n_cols) if by_query else (n_cols, n_rows)
        self.n_cols, self.q_heads_per_kv = n_cols, q.shape[1] // k.shape[1]
        self.idx, self.tile = lists.idx.numpy(), lists.tile.numpy()

        heads = (end * self.q_heads_per_kv for end in (kv_heads.start, kv_heads.stop))
        head = np.arange(*heads)  # b * Hq + h
        batch_slice = head // q.shape[1] * (schedule.batch > 1)
        slice_ = batch_slice * schedule.heads + head % q.shape[1] * (schedule.heads > 1)
        row = (slice_[:, None] * n_own + np.arange(n_own)).ravel()
        pair = (head[:, None] * n_own + np.arange(n_own)).ravel()
        ptr, mid = lists.ptr.numpy(), lists.mid.numpy()
        count, partial = ptr[row + 1] - ptr[row], mid[row] - ptr[row]
        order = np.lexsort((partial, count))
        order = order[np.searchsorted(count[order], 1) :]  # empty lists come first
        self.own, self.start = pair[order], ptr[row[order]]
        self.count, self.partial = count[order], partial[order]
        self.head = self.own // n_own

    def chunked(self, numbers: int) -> Iterator[tuple[Tensor, Iterator[Chunk]]]:
        """Yield the pairs of lists of one length, with their blocks; `numbers` are buffered per
        block.
        """
        budget = max(1, BUFFER_NUMBERS // numbers)
        first = 0
        while first < len(self.own):
            count = int(self.count[first])
            last = int(np.searchsorted(self.count, count, side="right"))
            step = min(count, budget)
            last = min(last, first + max(1, budget // step))
            group = slice(first, last)
            yield torch.from_numpy(self.own[group]), self._chunks(group, count, step)
            first = last

    def _chunks(self, group: slice, count: int, step: int) -> Iterator[Chunk]:
        start, head = self.start[group, None], self.head[group, None]
        partial = int(self.partial[group].max())
        for lo in range(0, count, step):
            hi = min(lo + step, count)
            entries = start + np.arange(lo, hi)
            other = head * self.n_other + self.idx[entries]
            tile = self.tile[entries[:, : max(0, partial - lo)]].astype(np.int64)
            yield Chunk(torch.from_numpy(other), torch.from_numpy(tile))

    def kv_blocks(self, pair: Tensor) -> Tensor:
        """Return the blocks of k and v that the pairs of key blocks stand for."""
        if self.q_heads_per_kv == 1:
            return pair
        head = torch.div(pair, self.n_cols, rounding_mode="floor")
        return (head // self.q_heads_per_kv) * self.n_cols + pair % self.n_cols


class Work:
    """The buffers of this thread: kept from call to call, since fresh pages cost more than sums."""

    _kept = threading.local()

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = self._kept.__dict__.setdefault(str(dtype), {})

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # its tensors could not be written to outside of it
                buffer = self._buffers[name] = torch.empty(size, dtype=self.dtype, device="cpu")
        return buffer[:size].view(shape)

    def zeros(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.take(name, shape).zero_()

    def gather(self, name: str, blocks: Tensor, index: Tensor) -> Tensor:
        """Return the blocks of index (lists,) or (lists, n), those of one list on end."""
        _, block, dim = blocks.shape
        buffer = self.take(name, (index.numel(), block, dim))
        torch.index_select(blocks, 0, index.flatten(), out=buffer)
        return buffer.view(len(index), -1, dim)

    def bmm(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b, out=self.take(name, (len(a), a.shape[1], b.shape[2])))


class Tiles:
    """The bit tiles, looked up a byte at a time: eight score offsets of 0 or -inf each.

    careful: a hidden score may be NaN or infinite, to which no offset is added.
    """

    def __init__(self, schedule: Schedule, dtype: torch.dtype, *, by_query: bool, careful: bool):
        bits, block_k = schedule.bits, schedule.block_k
        full = bits.new_full((1, *bits.shape[1:]), -1)
        self.bytes = torch.cat([bits, full]).view(torch.uint8)[..., : block_k // 8]
        byte = torch.arange(256, dtype=torch.uint8, device=bits.device)
        hidden = (byte.unsqueeze(-1) >> byte[:8] & 1) == 0
        offsets = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)
        self.table, self.by_query, self.careful = hidden if careful else offsets, by_query, careful

    def hide(self, scores: Tensor, tile: Tensor) -> None:
        """Make scores -inf where the tiles (lists, n), -1 for a full block, disallow them.

        scores: (lists, block_q, keys), or (lists, block_k, queries) if not by_query.
        """
        if tile.numel():
            scores, entries = self._partial(scores, tile)
            if self.careful:
                scores.masked_fill_(entries, -math.inf)
            else:
                scores.add_(entries)

    def clear(self, x: Tensor, tile: Tensor) -> Tensor:
        """x, as the scores of `hide`, with 0 where they are hidden, if that may not be finite."""
        if self.careful and tile.numel():
            scores, hidden = self._partial(x, tile)
            scores.masked_fill_(hidden, 0.0)
        return x

    def _partial(self, scores: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of partial blocks, and the entries of the table at their places."""
        entries = embedding(self.bytes[tile].int(), self.table).flatten(-2)
        entries = entries.permute((0, 2, 1, 3) if self.by_query else (0, 3, 1, 2))
        _, own, n, other = entries.shape
        return scores.view(len(tile), own, -1, other)[:, :, :n], entries


class Dropout:
    """The dropout keys by block; `rescale` is the factor of the probabilities that are kept."""

    def __init__(
        self,
        schedule: Schedule,
        q: Tensor,
        dropout_p: float,
        seed: Tensor | None,
        *,
        by_query: bool,
    ):
        self.p = 0.0 if seed is None else dropout_p
        self.rescale = keep_scale(self.p)
        if seed is not None and self.p:
            block_q, block_k = schedule.block_q, schedule.block_k
            padded_q = schedule.n_q + -schedule.n_q % block_q
            padded_k = schedule.n_k + -schedule.n_k % block_k
            row, col = dropout_keys(seed, q.shape[0], q.shape[1], padded_q, padded_k)
            row, col = row.view(-1, block_q // 2), col.view(-1, block_k // 2)
            self.own, self.other = (row, col) if by_query else (col, row)
            self.transposed = not by_query

    def keep(self, own: Tensor, other: Tensor) -> Tensor | None:
        """Bool (lists, own block, others), True for what stays; None without dropout.

        The rows are those of `own`, whether its blocks are of queries or of keys.
        """
        if not self.p:
            return None
        others = self.other[other].view(len(own), -1)
        return keep_from_keys(self.own[own], others, self.p, transposed=self.transposed)


ByHeads = Callable[[Callable[[range], None]], None]  # runs a task over ranges of key heads


@contextmanager
def threads_by_head(k: Tensor) -> Iterator[ByHeads]:
    """Return a function that runs a task over ranges of the B * Hkv key heads, one thread of Python
    each.

    These threads never wait for one another, as those inside each small call of torch would; and
    no two of them write to the same head, so the results are the same from run to run. torch's own
    threads are divided among them until the context ends: MKL has one number of threads for the
    whole process, and those of OpenMP spin for a while after every call that used them.
    """
    heads, threads = k.shape[0] * k.shape[1], torch.get_num_threads()
    workers = min(heads, threads)
    if workers < 2:
        yield lambda task: task(range(heads))
        return
    inference = torch.is_inference_mode_enabled()
    pool = _pool(workers, threads // workers)

    def by_heads(task: Callable[[range], None]) -> None:
        def run(worker: int) -> None:
            with torch.inference_mode(inference), torch.no_grad():
                task(range(heads * worker // workers, heads * (worker + 1) // workers))

        for _ in pool.map(run, range(workers)):
            pass  # raises what a worker raised

    torch.set_num_threads(threads // workers)
    try:
        yield by_heads
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Threads of Python whose torch calls take `threads` threads each."""
    before, ready = torch.get_num_threads(), threading.Barrier(workers + 1)

    def start() -> None:
        torch.set_num_threads(threads)
        ready.wait()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="sparseflash")
    for _ in range(workers):
        pool.submit(start)
    ready.wait()
    torch.set_num_threads(before)  # the last number set is also that of threads yet to come
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads stay with the parent
