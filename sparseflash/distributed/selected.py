"""Blocks that a selector chooses at each call, over a sequence that several ranks share.

Each rank sends the others a summary of its key blocks, by which they choose for their queries. Then
all tell each other which blocks they need, and these travel. The host waits once a call, for the
list of what it has to send.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from masks import BlockMask, Mask
from masks.runs import Ints
from masks.tiles import EMPTY, FULL, edge_tiles
from sparseflash.distributed.attention import joined
from sparseflash.distributed.exchange import Transfer, Units
from sparseflash.distributed.places import runs
from sparseflash.distributed.route import exchange_of, places_of
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
        self._taken: dict[Any, BlockMask] = {}

    def _blocks(self, rank: int, size: int) -> Ints:
        parts = self.cp.size // size
        own = np.flatnonzero(self.cp.owner == rank)[:, None] * parts + np.arange(parts)
        return own[own * size < self.n]

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
    cp.agree(q, v, options["scale"], options["deterministic"], options["dropout_p"])
    with torch.no_grad():
        summary = _summaries(cp, k)
        found = cp.source.select_rows(q, summary, cp.rows) if cp.tokens else None
        transfer, lying = _transfer(cp, found, q)
        mask = None if found is None else _local(cp, found, lying, q)
    k, v = _Fetched.apply(k, v, cp, transfer)  # pyright: ignore[reportGeneralTypeIssues]
    if cp.tokens and (score is not None or options["dropout_p"]):
        own = torch.from_numpy(cp.rows.own).to(q.device)[None, None]
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
    come = _gathered(cp, own)
    place = [most * rank + np.arange(len(x)) for rank, x in enumerate(keys)]
    order = np.concatenate(place)[np.argsort(np.concatenate(keys))]
    return torch.cat(come, 2).index_select(2, torch.from_numpy(order).to(k.device))


def _gathered(cp: Any, own: Tensor) -> list[Tensor]:
    own = own.contiguous()
    come = [torch.empty_like(own) for _ in range(cp.ranks)]
    dist.all_gather(come, own, group=cp.group)
    cp.bytes_sent += own.nbytes
    return come


def _transfer(cp: Any, found: Selection | None, q: Tensor) -> tuple[Transfer, Tensor]:
    """Return the transfer of the blocks that the ranks need, and which of all blocks lie where.

    The latter is (B, H_kv, own blocks, then received ones), the number of blocks where none lies.
    """
    slices, count, own = (q.shape[0], cp.kv_heads), len(cp.owner), cp.rows.own
    needs = torch.zeros(*slices, count, dtype=torch.uint8, device=q.device)
    if found is not None:
        parts = cp.size // found.block_size[1]
        cols = (found.codes != EMPTY).any(2).expand(q.shape[0], cp.heads, -1)
        cols = cols.unflatten(1, (cp.kv_heads, -1)).any(2)
        cols = F.pad(cols, (0, -cols.shape[2] % parts))
        needs |= cols.unflatten(2, (count, parts)).any(3)
    come = torch.stack(_gathered(cp, needs)).flatten(1, 2)
    travels = come.transpose(0, 1).cpu().numpy() != 0  # (slices, ranks, blocks)
    for rank in range(cp.ranks):
        travels[:, rank, cp.owner == rank] = False
    exchange, slot = exchange_of(cp.rank, travels, cp.owner, places_of(cp.owner))
    unit, block = np.nonzero(travels[:, cp.rank])
    lying = np.full((len(travels), len(own) + exchange.blocks), count)
    lying[:, : len(own)] = own
    lying[unit, len(own) + slot[unit, block]] = block
    transfer = Transfer(exchange, Units(slices, cp.size), len(own), q.device)
    return transfer, torch.from_numpy(lying).to(q.device).unflatten(0, slices)


def _local(cp: Any, found: Selection, lying: Tensor, q: Tensor) -> Selection:
    """Return the selection among the keys of `lying`, the blocks that are here."""
    size = found.block_size[1]
    parts, cols, group = cp.size // size, found.cols, cp.heads // cp.kv_heads
    codes, bits = found.codes.expand(q.shape[0], cp.heads, -1, -1), found.bits
    if cp.n % size:  # a full block that ends the sequence may lie before others
        edge = edge_tiles(found.block_size[0], cp.n % size, found.block_size)[-1:]
        bits = torch.cat([bits, to_device(edge.view(np.int32), q.device)])
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
        come = cp.count(transfer.send(k, v, group=cp.group)).wait()
        return tuple(joined(transfer, k, v, transfer.place(come)))

    @staticmethod
    def backward(ctx, dk, dv):  # type: ignore[override]
        cp, transfer = ctx.call
        far = transfer.behind.pack(dk.contiguous(), dv.contiguous())
        home = cp.count(transfer.send_back(far, cp.group))
        dk, dv = (x[:, :, : ctx.tokens].contiguous() for x in (dk, dv))
        transfer.add((dk, dv), home.wait())
        return dk, dv, None, None
