"""Calls in another layout, in which a mask has fewer tiles: copies of single keys, side by side.

A mask may allow a few keys of a block to many query blocks, such as the columns of
`masks.vertical_slash`. Each of them would take a whole tile. Here such keys are copied behind the
others, so that a tile has as many of them as fit, and the kernels run as they are. The gradients of
a copy are added to those of its key. docs/internals/kernels.md says when.
"""

from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.backends.protocol import (
    NO_TERMS,
    Backward,
    Forward,
    Gradients,
    Results,
    Saved,
    TermTensors,
    Walk,
)
from sparseflash.cache import cache, persistent
from sparseflash.problem import Layout, Problem
from sparseflash.schedule.bits import same_rows, transposed
from sparseflash.schedule.blocks import Schedule, as_tensors, block_lists, unpack_bits

WITH_COPIES = {"hopper", "triton"}  # backends
PAIRS_PER_COPY = 256  # pairs that are computed in the time of copying a key and a value
LEAST_GAIN = 1.25  # entries before, for each one after
_OFTEN = 8  # query blocks that allow the same keys of a block
_MOST_BYTES = 2**28  # of new bit tiles
_MOST_COLUMNS = 2**25  # that move, over all entries: lists are made with about 80 bytes for each


class Copies(NamedTuple):
    """Which keys are copied, and the schedule of all keys and copies."""

    # of keys, for the query heads of a key head or, where G is 1, for all
    index: Tensor  # int64 (1 or B, 1 or H_kv, G, copies)
    spare: Tensor  # bool, likewise: zeros that nobody attends to
    schedule: Schedule

    @property
    def tensors(self) -> list[Tensor]:
        return [self.index, self.spare, *as_tensors(self.schedule)[0]]

    def problem(self, problem: Problem) -> Problem:
        """Return the problem of the kernels, for the problem of a call."""

        def longer(shape: Layout) -> tuple[Layout, Layout]:
            b, h, _, d = shape
            n = self.schedule.n_k
            return (b, h, n, d), (h * n * d, n * d, d, 1)

        (k, k_strides), (v, v_strides) = longer(problem.k_shape), longer(problem.v_shape)
        misaligned = problem.misaligned and "q" * ("q" in problem.misaligned)
        return problem._replace(
            k_shape=k, v_shape=v, k_strides=k_strides, v_strides=v_strides, misaligned=misaligned
        )

    def extend(self, t: Tensor) -> Tensor:
        """Return k or v (B, H_kv, n, D) with zeros up to a whole block, then the copies."""
        index = self.index.flatten(2)[..., None].expand(*t.shape[:2], -1, t.shape[3])
        copied = t.gather(2, index).masked_fill_(self.spare.flatten(2)[..., None], 0.0)
        n, first = t.shape[2], self.schedule.n_k - copied.shape[2]
        if t.is_contiguous() and n == first:  # nothing copies faster
            return torch.cat([t, copied], 2)
        made = t.new_empty(*t.shape[:2], self.schedule.n_k, t.shape[3])
        made[:, :, :n], made[:, :, n:first], made[:, :, first:] = t, 0.0, copied
        return made

    def fold(self, d: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of `like`, k or v, from that of `extend`."""
        found = torch.empty_like(like).copy_(d[:, :, : like.shape[2]])
        heads, n = self.index.shape[2:]
        for i in range(heads):  # one after the other: a key has one copy in each
            first = d.shape[2] - (heads - i) * n
            copied = d[:, :, first : first + n].masked_fill(self.spare[:, :, i, :, None], 0.0)
            index = self.index[:, :, i, :, None].expand_as(copied)
            found.scatter_add_(2, index, copied)
        return found


class CopiesForward(NamedTuple):
    run: Forward
    copies: Copies

    @property
    def specs(self):
        return self.run.specs

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        return self.run(q, self.copies.extend(k), self.copies.extend(v), seed, walk, terms)


class CopiesBackward(NamedTuple):
    run: Backward
    copies: Copies

    @property
    def specs(self):
        return self.run.specs

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        k, v = self.copies.extend(saved.k), self.copies.extend(saved.v)
        found = self.run(dout, dlse, saved._replace(k=k, v=v), walk)
        dk, dv = self.copies.fold(found.k, saved.k), self.copies.fold(found.v, saved.v)
        return found._replace(k=dk, v=dv)


def copies_for(problem: Problem, schedule: Schedule | None) -> Copies | None:
    """Return the copies of a static mask, from the cache; None where they would not pay."""
    options = problem.options
    if schedule is None or schedule.dynamic or not schedule.n_partial:
        return None
    if options.dropout_p or options.score:  # which depend on the place of a key
        return None
    group = problem.group if schedule.heads > 1 else 1
    key = ("copies", schedule.key, group)
    found = cache.get(key)
    if found is None:
        made = persistent(partial(_copies, schedule, group), problem.device)
        found = (made,)
        cache.put(key, found, made.tensors if made else ())
    (copies,) = found
    if copies is None:
        return None
    saved = len(schedule.rows.idx) - len(copies.schedule.rows.idx)
    pairs = saved * schedule.block_q * schedule.block_k / (schedule.batch * schedule.heads)
    keys = copies.schedule.n_k / problem.group
    return copies if pairs >= PAIRS_PER_COPY * keys else None


def _copies(schedule: Schedule, group: int) -> Copies | None:
    """Return the copies of a schedule; group: slices that share their keys."""
    rows, block_q, block_k = schedule.rows, schedule.block_q, schedule.block_k
    n_rows, n_cols = -(-schedule.n_q // block_q), -(-schedule.n_k // block_k)
    tile, n_lines, n_tiles = rows.tile.long(), len(rows.mid), len(schedule.bits)
    words = schedule.bits.unbind(1)
    some = unpack_bits(reduce(torch.bitwise_or, words), block_k)  # (T, block_k): used by a query
    light = (tile >= 0) & (4 * some.sum(1) <= block_k)[tile.clamp(min=0)]
    if len(tile) < LEAST_GAIN * (len(tile) - int(light.sum())) or not light.any():
        return None
    device = tile.device
    line = torch.arange(n_lines, device=device).repeat_interleave(rows.ptr.diff())
    place = line // n_rows * n_cols + rows.idx  # key block of a slice

    # a kind: a key block of a slice with one bit tile
    kind, of, count = torch.unique(
        (place * n_tiles + tile)[light], return_inverse=True, return_counts=True
    )
    at, of_tile = kind // n_tiles, kind % n_tiles
    often = count >= _OFTEN
    keys = torch.zeros(n_lines // n_rows * n_cols, block_k, dtype=torch.int32, device=device)
    keys.index_add_(0, at[often], some[of_tile[often]].int())
    keys = keys > 0
    moves = ~(some[of_tile] & ~keys[at]).any(1)
    moved = light.clone()
    moved[light] = moves[of]
    keys = keys.view(n_lines // n_rows, -1)
    wide = -(-int(keys.sum(1).max()) // block_k)  # blocks of copies of a slice
    if not wide or len(tile) < LEAST_GAIN * (len(tile) - int(moved.sum())):
        return None

    # every column of an entry that moves
    of, line_of = of[moves[of]], line[moved]
    used = some[of_tile]
    of_kind, column = used.nonzero(as_tuple=True)
    n = used.sum(1)
    if int(n[of].sum()) > _MOST_COLUMNS:
        return None
    own = torch.arange(len(of), device=device).repeat_interleave(n[of])
    before = n[of].cumsum(0) - n[of]
    column_at = torch.arange(len(own), device=device) - before[own] + (n.cumsum(0) - n)[of][own]
    column, tile_of = column[column_at], of_tile[of_kind[column_at]]
    rank = keys.cumsum(1) - 1
    to = rank.view(-1, block_k)[at[of_kind[column_at]], column]
    target = line_of[own] * wide + to // block_k

    every = unpack_bits(reduce(torch.bitwise_and, words), block_k)
    total = torch.bincount(target, minlength=n_lines * wide)
    whole = torch.bincount(target[every[tile_of, column]], minlength=n_lines * wide)
    last = torch.arange(n_lines * wide, device=device) // wide % n_rows == n_rows - 1
    full = (whole == block_k) & ~(last & (schedule.n_q % block_q > 0))
    cut = (total > 0) & ~full
    n_cut = int(cut.sum())
    entry = total.nonzero()[:, 0]
    kept = ~moved
    entries = int(kept.sum()) + len(entry)
    if n_cut * block_q * block_k > 8 * _MOST_BYTES or len(tile) < LEAST_GAIN * entries:
        return None
    bits = torch.zeros(n_cut * block_k, -(-block_q // 32) * 4, dtype=torch.uint8, device=device)
    chosen = cut[target]
    number = cut.cumsum(0) - 1
    row = number[target[chosen]] * block_k + to[chosen] % block_k
    columns = transposed(schedule.bits, block_k)
    bits[row, : block_q // 8] = columns[tile_of[chosen], column[chosen]]
    unique, which = same_rows(bits.view(torch.int32).view(n_cut, -1))
    bits = transposed(unique.view(len(unique), block_k, -1), block_q)
    bits = F.pad(bits, (0, -bits.shape[2] % 4)).view(torch.int32)
    code = torch.full_like(total, -1)
    code[cut] = which + n_tiles

    section = entry // (wide * n_rows) % group
    line = torch.cat([line[kept], entry // wide])
    idx = torch.cat([rows.idx[kept].long(), n_cols + section * wide + entry % wide])
    tile = torch.cat([rows.tile[kept], code[entry].int()])
    all_cols = n_cols + group * wide
    by_row = block_lists(line, idx, tile, n_lines)
    slice_ = line // n_rows
    by_col = block_lists(slice_ * all_cols + idx, line % n_rows, tile, n_lines // n_rows * all_cols)
    made = schedule._replace(
        rows=by_row, cols=by_col, bits=torch.cat([schedule.bits, bits]), n_k=all_cols * block_k,
        n_partial=int((tile >= 0).sum()), key=("copies", schedule.key, group),
    )  # fmt: skip

    index = torch.full((len(keys), wide * block_k), -1, device=device)
    of_slice, key = keys.nonzero(as_tuple=True)
    index[of_slice, rank[of_slice, key]] = key
    index = index.view(schedule.batch, schedule.heads // group, group, -1)
    return Copies(index.clamp(min=0), index < 0, made)
