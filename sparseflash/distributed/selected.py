"""Blocks that a selector chooses at each call, over a sequence that several ranks share.

Each rank sends the others a summary of its key blocks, by which they choose for their queries. Then
all tell each other which blocks they need, and these travel. The host waits once a call, for how
many blocks come and go.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from masks import BlockMask, Mask
from masks.runs import Ints
from masks.tiles import EMPTY, FULL, edge_tiles
from sparseflash.distributed.attention import joined
from sparseflash.distributed.exchange import Transfer, Units, indices_of
from sparseflash.distributed.places import runs
from sparseflash.dynamic.selection import Selection, built, heads_of, to_device
from sparseflash.select.base import Selector


def block_size_of(selector: Selector) -> int:
    """Return the tokens of a block that travels: whole query blocks, and whole key blocks."""
    size = math.lcm(*selector.block_size)
    if size > 256:
        raise ValueError(
            f"{selector!r} has blocks of {selector.block_size}: give sizes with a common multiple"
            " of at most 256"
        )
    return size


def differs_by_head(selector: Selector) -> bool:
    given = (getattr(selector, name, None) for name in ("within", "always"))
    return any((m.heads or 1) > 1 or getattr(m, "per_head", False) for m in given if m is not None)


class Lists(NamedTuple):
    """What a device has to know of the blocks of all ranks, int64."""

    own: Tensor  # of this rank
    owner: Tensor  # the rank of each block
    order: Tensor  # all blocks, by rank
    summary: Tensor  # where the summary of each key block is among those of all ranks
    edge: Tensor  # int32, the bits of a full key block that ends the sequence


class OwnRows:
    """The query blocks of one rank, and the key blocks of all, in the block sizes of a selector."""

    def __init__(self, cp: Any):
        if type(cp.source).summary is Selector.summary:
            raise ValueError(
                f"{cp.source!r} compares queries with all keys: ranks that share a sequence need a"
                " selector with `summary`, such as top_k, mass, moba or nsa, or route='heads'"
            )
        self.cp, self.n, (query, key) = cp, cp.n, cp.source.block_size
        self.own = np.flatnonzero(cp.owner == cp.rank)
        self.rows = self._blocks(cp.rank, query)
        self.keys = [self._blocks(rank, key) for rank in range(cp.ranks)]
        self.counts = np.bincount(cp.owner, minlength=cp.ranks).tolist()  # blocks of a rank
        self._taken: dict[Any, BlockMask] = {}
        self._on: dict[torch.device, Lists] = {}

    def _blocks(self, rank: int, size: int) -> Ints:
        parts = self.cp.size // size
        own = np.flatnonzero(self.cp.owner == rank)[:, None] * parts + np.arange(parts)
        return own[own * size < self.n]

    def on(self, x: Tensor) -> Lists:
        """Return the lists where x is; only the first call copies them there."""
        if x.device not in self._on:
            owner, keys, (query, key) = self.cp.owner, self.keys, self.cp.source.block_size
            place = [max(map(len, keys)) * rank + np.arange(len(x)) for rank, x in enumerate(keys)]
            summary = np.concatenate(place)[np.argsort(np.concatenate(keys))]
            edge = edge_tiles(query, self.n % key or key, (query, key))[-1:].view(np.int32)
            given = self.own, owner, np.argsort(owner, kind="stable"), summary, edge
            self._on[x.device] = Lists(*(to_device(t, x.device) for t in given))
        return self._on[x.device]

    def positions(self, device: torch.device) -> Tensor:
        """Return (n_q,) int64, the places of the queries."""
        return self.cp.positions(device)

    def of(self, mask: Mask | BlockMask, block_size: tuple[int, int]) -> BlockMask:
        """Return the rows of a mask of the whole sequence."""
        key = mask.key, block_size
        if key not in self._taken:
            heads = heads_of(mask, self.cp.heads)
            whole = built(mask, self.n, self.n, block_size, heads)
            self._taken[key] = whole.take(self.rows, np.arange(whole.cols))
        return self._taken[key]


def by_choice(
    cp: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor, score: Any, seed: Any,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Choose blocks for the own queries, receive them, and run `attend` over these."""
    if not len(q):
        return attend(q, k, v, None, seed=seed, **options)
    with torch.no_grad():
        summary = _summaries(cp, k)
        found = cp.source.select_rows(q, summary, cp.rows) if cp.tokens else None
        transfer, lying = _transfer(cp, found, q)
        mask = None if found is None else _local(cp, found, lying, q)
    k, v = _Fetched.apply(k, v, cp, transfer)  # pyright: ignore[reportGeneralTypeIssues]
    if cp.tokens and (score is not None or options["dropout_p"]):
        own = cp.rows.on(q).own[None, None]
        q_runs, k_runs = (runs(x, cp.size) for x in (own, lying))
        places = cp.whole_places(q.device)._replace(q=q_runs, k=k_runs)
        if score is not None:
            score = places.score(score)
        if options["dropout_p"]:
            seed = places.keys(seed, len(q))
    return attend(q, k, v, mask, score=score, seed=seed, **options)


def _summaries(cp: Any, k: Tensor) -> Tensor:
    """Return the summary of all key blocks, in their order."""
    keys = cp.rows.keys
    own = cp.source.summary(k if cp.tokens else k.new_zeros(*k.shape[:2], 1, k.shape[3]))
    most = max(map(len, keys))
    own = F.pad(own[:, :, : len(keys[cp.rank])], (0, 0, 0, most - len(keys[cp.rank])))
    return torch.cat(_gathered(cp, own), 2).index_select(2, cp.rows.on(k).summary)


def _gathered(cp: Any, own: Tensor) -> list[Tensor]:
    own = own.contiguous()
    come = [torch.empty_like(own) for _ in range(cp.ranks)]
    dist.all_gather(come, own, group=cp.group)
    cp.bytes_sent += own.nbytes
    return come


def _transfer(cp: Any, found: Selection | None, q: Tensor) -> tuple[Transfer, Tensor]:
    """Return the transfer of the blocks that the ranks need, and which of all blocks lie where.

    The latter is (B, H_kv, own blocks, then received ones), the number of blocks where none lies.
    Lists stay on the device: the host waits for their lengths alone.
    """
    slices, count, (own, owner, order, *_) = (len(q), cp.kv_heads), len(cp.owner), cp.rows.on(q)
    needs = torch.zeros(*slices, count, dtype=torch.bool, device=q.device)
    if found is not None:
        parts = cp.size // found.block_size[1]
        cols = (found.codes != EMPTY).any(2).expand(q.shape[0], cp.heads, -1)
        cols = cols.unflatten(1, (cp.kv_heads, -1)).any(2)
        cols = F.pad(cols, (0, -cols.shape[2] % parts))
        needs |= cols.unflatten(2, (count, parts)).any(3)
    travels = torch.stack(_gathered(cp, needs.byte())).flatten(1, 2) > 0  # (ranks, slices, blocks)
    rank = torch.arange(cp.ranks, device=q.device)
    travels &= owner != rank[:, None, None]
    moves = travels.new_zeros(cp.ranks, cp.ranks, dtype=torch.int64)  # from each rank, to each
    moves.index_add_(0, owner, travels.sum(1).T)
    comes, gone = travels[cp.rank], travels[:, :, own].flatten(1)
    both = torch.stack([comes.sum(1).max(), gone.any(0).sum()])
    numbers = torch.cat([moves[:, cp.rank], moves[cp.rank], both]).tolist()  # the host waits
    received, sent, (most, touched) = numbers[: cp.ranks], numbers[cp.ranks : -2], numbers[-2:]

    lines, device = len(comes), q.device
    coming = comes[:, order]  # the slots of a slice go by source, then by block
    slot = coming.cumsum(1) - 1
    lying = torch.full((lines, len(own) + most + 1), count, device=device)
    lying[:, : len(own)] = own
    place = len(own) + torch.where(coming, slot, most)  # what does not come goes to the end
    lying = lying.scatter_(1, place, order.expand(lines, -1))[:, :-1]
    slots = None
    if lines > 1:
        slot += most * torch.arange(lines, device=device)[:, None]
        parts = (x.split(cp.rows.counts, 1) for x in (coming, slot))
        coming, slot = (torch.cat([t.flatten() for t in x]) for x in parts)
        slots = slot[indices_of(coming, sum(received))]
    gone = indices_of(gone.flatten(), sum(sent)) % max(1, gone.shape[1])
    units = Units(slices, cp.size)
    transfer = Transfer(units, len(own), most, gone, sent, touched, slots, received)
    return transfer, lying.unflatten(0, slices)


def _local(cp: Any, found: Selection, lying: Tensor, q: Tensor) -> Selection:
    """Return the selection among the keys of `lying`, the blocks that are here."""
    size = found.block_size[1]
    parts, cols, group = cp.size // size, found.cols, cp.heads // cp.kv_heads
    codes, bits = found.codes.expand(q.shape[0], cp.heads, -1, -1), found.bits
    if cp.n % size:  # a full block that ends the sequence may lie before others
        bits = torch.cat([bits, cp.rows.on(q).edge])
        last = codes[..., -1:]
        codes = torch.cat([codes[..., :-1], last.masked_fill(last == FULL, len(bits) - 1)], -1)
    column = lying[..., None] * parts + torch.arange(parts, device=q.device)
    column = column.flatten(2).clamp(max=cols).repeat_interleave(group, 1)[:, :, None]
    codes = F.pad(codes, (0, 1), value=EMPTY)
    codes = codes.gather(3, column.expand(-1, -1, found.rows, -1))
    most = found.max_blocks * (q.shape[0] * cp.heads // (found.batch * found.heads))
    sizes = found.n_q, lying.shape[2] * cp.size, found.block_size
    return Selection(codes, bits, *sizes, min(most, codes.numel()))


class _Fetched(torch.autograd.Function):
    """Own keys and values, to a full block, with those that other ranks sent behind them."""

    @staticmethod
    def forward(ctx, k, v, cp, transfer):  # type: ignore[override]
        ctx.call, ctx.tokens = (cp, transfer), k.shape[2]
        come = transfer.send(transfer.outgoing.pack(k, v), cp).wait()
        return tuple(joined(transfer, k, v, transfer.place(come)))

    @staticmethod
    @once_differentiable
    def backward(ctx, dk, dv):  # type: ignore[override]
        cp, transfer = ctx.call
        far = transfer.behind.pack(dk.contiguous(), dv.contiguous())
        home = transfer.send_back(far, cp)
        dk, dv = (x[:, :, : ctx.tokens].contiguous() for x in (dk, dv))
        transfer.add((dk, dv), home.wait())
        return dk, dv, None, None
