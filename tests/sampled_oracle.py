"""The float64 oracle on a few query blocks and key blocks of a sequence too long for all of them.

It walks the blocks of the schedule itself, one block of queries at a time: the memory is that of
block_q x (allowed keys of those queries) scores.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from masks import BlockLists
from sparseflash.schedule.blocks import Schedule, unpack_bits


class RowResults(NamedTuple):
    """Of one query block of one head, in float64."""

    out: Tensor  # (block_q, D_v)
    lse: Tensor  # (block_q,)
    dq: Tensor  # (block_q, D)
    keys: Tensor  # int64 (keys of the non-empty blocks,)
    p: Tensor  # (block_q, keys)
    ds: Tensor  # (block_q, keys)


class SampledOracle:
    """Exact results of some blocks of one (b, h); q (N_q, D), k (N_k, D), v (N_k, D_v), dout.

    The cotangents are dout of out and dlse of lse. Lengths divide by the blocks.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor,
        schedule: Schedule, slice_: int = 0,
    ):  # fmt: skip
        self.q, self.k, self.v, self.dout, self.dlse = q, k, v, dout, dlse
        self.schedule, self.scale = schedule, q.shape[-1] ** -0.5
        self.n_rows = schedule.n_q // schedule.block_q
        self.n_cols = schedule.n_k // schedule.block_k
        self.first_row, self.first_col = slice_ * self.n_rows, slice_ * self.n_cols
        self.rows = lru_cache(maxsize=4)(self._rows)

    def _rows(self, block: int) -> RowResults:
        """out, lse and dq of a query block, and what its keys need of it."""
        s = self.schedule
        idx, tile = _entries(s.rows, self.first_row + block)
        token = torch.arange(s.block_k, device=idx.device)
        keys = (idx.long()[:, None] * s.block_k + token).flatten()
        allowed = unpack_bits(s.bits[tile.clamp(min=0).long()], s.block_k)  # (entries, bq, bk)
        allowed |= (tile < 0)[:, None, None]
        allowed = allowed.transpose(0, 1).flatten(1)
        own = slice(block * s.block_q, (block + 1) * s.block_q)
        q, dout, dlse = self.q[own].double(), self.dout[own].double(), self.dlse[own].double()
        k, v = self.k[keys].double(), self.v[keys].double()
        scores = (q @ k.mT * self.scale).masked_fill_(~allowed, float("-inf"))
        lse = scores.logsumexp(-1)
        p = scores.sub_(lse.masked_fill(lse.isinf(), 0.0)[:, None]).exp_()
        out = p @ v
        delta = (out * dout).sum(-1) - dlse
        ds = (dout @ v.mT).sub_(delta[:, None]).mul_(p).mul_(self.scale)
        return RowResults(out, lse, ds @ k, keys, p, ds)

    def columns(self, block: int) -> tuple[Tensor, Tensor]:
        """dk and dv of a key block, (block_k, D) and (block_k, D_v)."""
        s = self.schedule
        idx, _ = _entries(s.cols, self.first_col + block)
        first = block * s.block_k
        dk = torch.zeros(s.block_k, self.k.shape[1], dtype=torch.float64, device=idx.device)
        dv = torch.zeros(s.block_k, self.v.shape[1], dtype=torch.float64, device=idx.device)
        for row_block in idx.tolist():
            rows = self.rows(row_block)
            own = (rows.keys >= first) & (rows.keys < first + s.block_k)
            tokens = slice(row_block * s.block_q, (row_block + 1) * s.block_q)
            dk += rows.ds[:, own].mT @ self.q[tokens].double()
            dv += rows.p[:, own].mT @ self.dout[tokens].double()
        return dk, dv


def _entries(lists: BlockLists, row: int) -> tuple[Tensor, Tensor]:
    begin, end = lists.ptr[row : row + 2].tolist()
    return lists.idx[begin:end], lists.tile[begin:end]
