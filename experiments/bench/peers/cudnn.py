"""cuDNN Frontend, where it is installed: lists of whole blocks, and intervals of keys."""

import importlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.bench import provider
from experiments.bench.cases import DENSE, DTYPES, LAYOUTS, Case
from experiments.bench.provider import Attention, Provider, not_hopper
from masks import BlockMask
from masks.segments import row_segments
from masks.tiles import FULL, unpack_bits

PACKAGE = "nvidia-cudnn-frontend"
INSTALL = "pip install nvidia-cudnn-frontend==1.32.0 'nvidia-cutlass-dsl[cu13]==4.8.1'"
MOST = 16  # intervals of a query; cuDNN's own benchmark goes up to 10


class Cudnn(Provider):
    """A kernel of cuDNN Frontend."""

    package, install = PACKAGE, INSTALL
    modules = ("cudnn.block_sparse_attention._interface", "cudnn.flex_attention")


class CudnnBlocks(Cudnn):
    """`block_sparse_attention`: key blocks of every query block. Blocks of 256 are four of 128."""

    def concerns(self, case: Case) -> bool:
        return case.mask != DENSE

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        backward = direction == "backward"
        dtypes = ("bfloat16",) if backward else ("bfloat16", "float16")
        if reason := not_hopper(case, device, dtypes):
            return reason
        dims = (128,) if backward else (64, 96, 128)
        if not {case.head_dim, case.value_dim} <= {*dims}:
            return f"{direction} takes head dims of {dims}, not {case.head_dim}, {case.value_dim}"
        if backward and case.heads != case.kv_heads:
            return f"has no backward for {case.heads} query and {case.kv_heads} key heads"
        sizes = case.block_q, case.block_k
        if sizes not in ((64, 64), (128, 128), (256, 256)):
            return f"takes blocks of 64, 128 and 256, not {sizes[0]} x {sizes[1]}"
        if sizes[0] == 64 and case.n_q % 64:
            return f"takes multiples of 64 queries with blocks of 64, not {case.n_q}"
        if len(fine(case).bits):
            return "takes whole blocks only, and the mask has partial ones"
        return self.missing()

    def prepare(self, case: Case, device: torch.device) -> Attention:
        interface = importlib.import_module("cudnn.block_sparse_attention")
        lists = block_lists(case, device)
        turned = case.layout == LAYOUTS[1]
        lists |= {"layout": "bshd" if turned else "bhsd"}
        counts = lists.get("q2k_block_nums")
        once = {"allow_empty_block_nums": counts is not None and not bool(counts.all())}
        once |= {"kv_splits": "auto"} if lists["sparse_block_size"] == 64 else {}

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            inputs = (t.transpose(1, 2) if turned else t for t in (q, k, v))
            out = BlockSparse.apply(*inputs, interface, lists, once)
            return out.transpose(1, 2) if turned else out

        return run


class BlockSparse(torch.autograd.Function):
    """The forward and the backward of cuDNN's block-sparse attention, which has no autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, interface: Any, lists: Any, once: Any):
        out, lse = interface.block_sparse_attention_forward(q, k, v, **lists, **once)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.interface, ctx.lists = interface, lists
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        backward = ctx.interface.block_sparse_attention_backward
        return (*backward(*grads, *ctx.saved_tensors, **ctx.lists), None, None, None)


def fine(case: Case) -> BlockMask:
    """Return the mask of a case in blocks that cuDNN has: of 128 in place of 256."""
    size = min(case.block_q, 128)
    blocks = replace(case, block_q=size, block_k=size).blocks
    assert blocks is not None
    return blocks


def block_lists(case: Case, device: torch.device) -> dict[str, Any]:
    """Return what `block_sparse_attention_forward` and `_backward` take for a mask of whole blocks.

    Counts only where rows differ: with a fixed count, the number of columns, it is faster.
    """
    blocks = fine(case)
    size = blocks.block_size[1]
    kept = torch.from_numpy(blocks.layout()).to(device).bool()
    kept = kept.expand(case.batch, case.heads, -1, -1)
    counts, index = provider.block_lists(kept)
    lists: dict[str, Any] = {"q2k_block_index": index, "sparse_block_size": size}
    if int(counts.min()) < index.shape[-1]:
        lists["q2k_block_nums"] = counts
    if case.n_k % size:
        lists["block_sizes"] = torch.full((blocks.cols,), size, dtype=torch.int32, device=device)
        lists["block_sizes"][-1] = case.n_k % size
    return lists


class CudnnFlex(Cudnn):
    """`cudnn.flex_attention`: a union of intervals of keys for every query."""

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if reason := not_hopper(case, device, ("bfloat16", "float16")):
            return reason
        dims = case.head_dim, case.value_dim
        small = all(dim in range(8, 129, 8) for dim in dims)
        if not small and dims not in ((192, 128), (256, 256)):
            return f"takes multiples of 8 up to 128 as head dims, not {dims[0]}, {dims[1]}"
        if intervals(case) is None:
            return f"takes intervals of keys: some query has more than {MOST}"
        return self.missing()

    def prepare(self, case: Case, device: torch.device) -> Attention:
        flex = importlib.import_module("cudnn.flex_attention")
        ends, batch, dtype = intervals(case), case.batch, DTYPES[case.dtype]
        assert ends is not None
        shapes = (
            (batch, case.n_q, case.heads, case.head_dim),
            (batch, case.n_k, case.kv_heads, case.head_dim),
            (batch, case.n_k, case.kv_heads, case.value_dim),
        )
        samples = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        mask = torch.from_numpy(ends).to(device)
        plan = flex.create_mask_plan(mask, *samples, build_backward=True)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            inputs = (t.transpose(1, 2) for t in (q, k, v))
            return flex.flex_attn_func(*inputs, mask_plan=plan).transpose(1, 2)

        return run


@lru_cache(2)
def intervals(case: Case) -> NDArray[np.int32] | None:
    """int32 (heads or 1, odd, batch * n_q): the keys [0, F0) | [F1, F2) | .. of every query.

    None where a query has more than `MOST` intervals.
    """
    if case.blocks is None:
        return np.full((1, 1, case.batch * case.n_q), case.n_k, np.int32)
    blocks, n_k, longest = case.blocks, case.n_k, 1
    (block_q, block_k), tiles = blocks.block_size, unpack_bits(blocks.bits, blocks.block_size[1])
    lines = blocks.batch * blocks.heads * blocks.rows
    ends = np.zeros((lines, block_q, 2 * MOST + 2), np.int32)  # begin and end of each interval
    segments = row_segments(blocks.grid, blocks.starts, blocks.tiles)
    cuts = np.flatnonzero(np.diff(segments[0])) + 1
    parts = zip(*(np.split(x, cuts) for x in segments), strict=True)
    for line, *of_line in parts if len(segments[0]) else ():
        if len(line) > MOST and (of_line[2] == FULL).all():  # runs that do not touch
            return None
        low, high, seen = [], [], []  # a column for a run of full blocks, or a key of another one
        for first, count, tile in zip(*of_line, strict=True):
            width, height = (count * block_k, 1) if tile == FULL else (1, count * block_k)
            low.append(first * block_k + width * np.arange(height))
            high.append(low[-1] + width)
            full = tile == FULL
            seen.append(np.ones((block_q, 1), bool) if full else np.tile(tiles[tile], (1, count)))
        begin, end = np.concatenate(low), np.concatenate(high).clip(max=n_k)
        allowed = np.concatenate(seen, axis=1) & (begin < n_k)
        touch = allowed[:, 1:] & allowed[:, :-1] & (begin[1:] == end[:-1])
        row, opens = np.nonzero(allowed & ~np.pad(touch, ((0, 0), (1, 0))))
        closes = np.nonzero(allowed & ~np.pad(touch, ((0, 0), (0, 1))))[1]
        counts = np.bincount(row, minlength=block_q)
        if counts.max() > MOST:
            return None
        place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        first_key = np.zeros(block_q, np.int64)
        first_key[row[place == 0]] = begin[opens[place == 0]]
        place += first_key[row] > 0  # an empty interval is before one that begins after key 0
        ends[line[0], row, 2 * place], ends[line[0], row, 2 * place + 1] = begin[opens], end[closes]
        longest = max(longest, 1 + int(place.max(initial=0)))
    ends = np.maximum.accumulate(ends[:, :, : 2 * longest], axis=2)[:, :, 1:]  # then empty ones
    ends = ends.reshape(blocks.batch, blocks.heads, blocks.rows * block_q, -1)[:, :, : case.n_q]
    ends = ends.transpose(1, 3, 0, 2)
    ends = np.broadcast_to(ends, (*ends.shape[:2], case.batch, case.n_q))
    return np.ascontiguousarray(ends.reshape(*ends.shape[:2], -1))
