"""Heads instead of tokens: each rank computes all tokens of some heads (Ulysses).

See Jacobs et al., arXiv 2309.14509. The heads go to the ranks by their blocks, so that masks whose
heads differ are balanced as well.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from masks import BlockMask
from masks.runs import Ints
from masks.segments import Segments
from sparseflash.select.base import Selector


@dataclass(frozen=True)
class Share:
    """Which heads each rank computes, and the masks of these."""

    kv_heads: tuple[Ints, ...]  # for each rank, ascending
    heads: tuple[Ints, ...]  # the query heads of these
    masks: tuple[BlockMask, ...]


def share_of_heads(mask: BlockMask, heads: int, kv_heads: int, ranks: int) -> Share:
    """Return a share of the key heads for each rank, the busiest heads first to who has least."""
    blocks, group = Segments.of(mask).blocks(), heads // kv_heads
    head = blocks.s % mask.heads
    cost = np.full(kv_heads, 1.0)
    if mask.heads > 1:
        cost = np.bincount(head * kv_heads // mask.heads, minlength=kv_heads).astype(float)
    most = -(-kv_heads // ranks)
    load, chosen = np.zeros(ranks), [[] for _ in range(ranks)]
    for i in np.argsort(-cost, kind="stable").tolist():
        free = [rank for rank in range(ranks) if len(chosen[rank]) < most]
        # a rank without heads comes first: each one has to get some
        rank = min(free, key=lambda rank: (len(chosen[rank]) > 0, load[rank]))
        chosen[rank].append(i)
        load[rank] += cost[i]
    kv = tuple(np.sort(np.array(x)) for x in chosen)
    queries = tuple((x[:, None] * group + np.arange(group)).ravel() for x in kv)
    made = []
    for keys, rows in zip(kv, queries, strict=True):
        if mask.heads == 1:
            made.append(mask)
            continue
        own = keys if mask.heads == kv_heads else rows
        number = np.full(mask.heads, -1)
        number[own] = np.arange(len(own))
        kept = number[head] >= 0
        slices = blocks.s // mask.heads * len(own) + number[head]
        inner, extents = replace(blocks, s=slices).where(kept), (mask.batch, len(own))
        made.append(BlockMask.of_segments(inner, mask.n_q, mask.n_k, slices=extents))
    return Share(kv, queries, tuple(made))


def by_heads(
    cp: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor, sink: Any, score: Any, seed: Any,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Return the attention of own tokens: heads go out, all tokens of some heads are computed."""
    share, rank, order = cp.share, cp.rank, cp.order(q.device)
    own = torch.from_numpy(share.heads[rank]).to(q.device)
    q, k, v = (
        _Exchanged.apply(x, _to_heads, _to_tokens, cp, of)
        for x, of in ((q, share.heads), (k, share.kv_heads), (v, share.kv_heads))
    )
    if order is not None:
        q, k, v = (x.index_select(2, order.argsort()) for x in (q, k, v))
    mask = cp.source(q, k) if isinstance(cp.source, Selector) else share.masks[rank]
    if cp.inner is None:  # which knows its heads
        places = cp.whole_places(q.device)
        if score is not None:
            score = places.score(score, whole=True)
        if options["dropout_p"]:
            seed = places.keys(seed, len(q))
    sink = None if sink is None else sink[own]
    found = attend(q, k, v, mask, sink=sink, score=score, seed=seed, **options)
    results = found if isinstance(found, tuple) else (found,)
    if order is not None:
        results = [x.index_select(2, order) for x in results]
    results = [x if x.ndim == 4 else x.unsqueeze(-1) for x in results]
    out, *numbers = (_Exchanged.apply(x, _to_tokens, _to_heads, cp, share.heads) for x in results)
    return (out, *(x.squeeze(-1) for x in numbers)) if numbers else out


def _to_heads(x: Tensor, cp: Any, heads: tuple[Ints, ...]) -> Tensor:
    """Return (B, own heads, all tokens rank by rank, D) from (B, all heads, own tokens, D)."""
    order = torch.from_numpy(np.concatenate(heads)).to(x.device)
    sent = x.permute(1, 2, 0, 3).index_select(0, order).flatten(0, 1)  # (heads * tokens, B, D)
    gone = [len(h) * cp.tokens for h in heads]
    come = [len(heads[cp.rank]) * t for t in cp._tokens]
    got = _exchanged(sent, gone, come, cp)
    parts = [t.unflatten(0, (len(heads[cp.rank]), -1)) for t in got.split(come)]
    return torch.cat(parts, 1).permute(2, 0, 1, 3)


def _to_tokens(x: Tensor, cp: Any, heads: tuple[Ints, ...]) -> Tensor:
    """Return (B, all heads, own tokens, D) from (B, own heads, all tokens rank by rank, D)."""
    parts = x.permute(1, 2, 0, 3).split(cp._tokens, 1)
    sent = torch.cat([t.flatten(0, 1) for t in parts])
    gone = [len(heads[cp.rank]) * t for t in cp._tokens]
    come = [len(h) * cp.tokens for h in heads]
    number = np.concatenate(heads)
    got = _exchanged(sent, gone, come, cp).unflatten(0, (len(number), cp.tokens))
    place = torch.from_numpy(np.argsort(number))
    return got.index_select(0, place.to(x.device)).permute(2, 0, 1, 3)


def _exchanged(sent: Tensor, gone: list[int], come: list[int], cp: Any) -> Tensor:
    got = sent.new_empty(sum(come), *sent.shape[1:])
    cp.bytes_sent += sent.numel() * sent.itemsize  # which symbols have, too
    dist.all_to_all_single(got, sent.contiguous(), come, gone, group=cp.group)
    return got


class _Exchanged(torch.autograd.Function):
    """`there`, and in the backward `back`: `_to_heads` and `_to_tokens`, or the other way round."""

    @staticmethod
    def forward(ctx, x, there, back, *call):  # type: ignore[override]
        ctx.back, ctx.call = back, call
        return there(x, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):  # type: ignore[override]
        return ctx.back(dx, *ctx.call), None, None, None, None
