"""Selectors in plain words: float64, one block, row or token at a time."""

import numpy as np
import torch
from torch import Tensor

import masks


def spans(n: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def dense(mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """Bool (heads, n_q, n_k); all of them for None."""
    if mask is None:
        return np.ones((heads, n_q, n_k), bool)
    found = mask.build(n_q, n_k, heads=heads if mask.per_head else None).to_dense()[0]
    return np.broadcast_to(found, (heads, n_q, n_k))


def pooled_scores(q: Tensor, k: Tensor, block_size, pool: str) -> np.ndarray:
    """(B, H, rows, cols), times D ** -0.5."""
    q, k = q.double().numpy(), k.double().numpy()
    batch, heads, n_q, dim = q.shape
    group, n_k = heads // k.shape[1], k.shape[2]
    rows, cols = spans(n_q, block_size[0]), spans(n_k, block_size[1])
    scores = np.zeros((batch, heads, len(rows), len(cols)))
    for b, h, i, j in np.ndindex(scores.shape):
        queries, keys = q[b, h, rows[i]], k[b, h // group, cols[j]]
        if pool == "mean":
            score = queries.mean(0) @ keys.mean(0)
        elif pool == "max":
            score = queries.max(0) @ keys.max(0)
        else:
            mean = queries.mean(0)
            score = np.maximum(mean * keys.min(0), mean * keys.max(0)).sum()
        scores[b, h, i, j] = score * dim**-0.5
    return scores


def chosen(score, candidate, forced, rule, value, least=1, most=None):
    """The blocks of one row that are taken: bool (cols,)."""
    order = [j for j in range(len(score)) if candidate[j]]
    order.sort(key=lambda j: (not forced[j], -score[j], j))
    n_forced = int((candidate & forced).sum())
    if rule == "count":
        count = int(np.ceil(value * len(order))) if isinstance(value, float) else value
        count = max(count, n_forced)
    else:
        top = max((score[j] for j in order), default=0.0)
        weight = {j: np.exp(score[j] - top) for j in order}
        total = sum(weight.values())
        count, reached = 0, 0.0
        while count < len(order) and reached < value:
            reached += weight[order[count]] / total
            count += 1
        low = max(least, n_forced)
        count = max(low, count if most is None else min(count, max(most, low)))
    taken = np.zeros(len(score), bool)
    taken[order[:count]] = True
    return taken


def block_selection(scores: np.ndarray, n_q, n_k, block_size, within, always, rule, value,
                    least=1, most=None) -> np.ndarray:  # fmt: skip
    """Bool (B, H, n_q, n_k): the pairs of `within` in the blocks that are taken."""
    batch, heads = scores.shape[:2]
    rows, cols = spans(n_q, block_size[0]), spans(n_k, block_size[1])
    inside = dense(within, n_q, n_k, heads)
    pushed = dense(always, n_q, n_k, heads) if always is not None else np.zeros_like(inside)
    allowed = np.zeros((batch, heads, n_q, n_k), bool)
    for b, h, i in np.ndindex(batch, heads, len(rows)):
        candidate = np.array([inside[h, rows[i], c].any() for c in cols])
        forced = np.array([pushed[h, rows[i], c].any() for c in cols])
        taken = chosen(scores[b, h, i], candidate, forced, rule, value, least, most)
        for j in np.flatnonzero(taken):
            allowed[b, h, rows[i], cols[j]] = inside[h, rows[i], cols[j]]
    return allowed


def by_token(
    q: Tensor, k: Tensor, chunk: int, count: int, *, nsa: bool, first=0, own=1
) -> np.ndarray:
    """Bool (B, H, n_q, n_k): the chunks that every query picks for itself, up to itself, where the
    last query stands at the last key.
    """
    q, k = q.double().numpy(), k.double().numpy()
    batch, heads, n, dim = q.shape
    group, n_k = heads // k.shape[1], k.shape[2]
    chunks = spans(n_k, chunk)
    allowed = np.zeros((batch, heads, n, n_k), bool)
    for b, h, i in np.ndindex(batch, heads, n):
        t = i + n_k - n
        if t < 0:
            continue
        mine = t // chunk
        means = [k[b, h // group, c].mean(0) for c in chunks]
        sharing = range(h // group * group, (h // group + 1) * group) if nsa else [h]
        score = np.zeros(mine + 1)
        for head in sharing:
            dots = np.array([q[b, head, i] @ means[j] for j in range(mine + 1)])
            if nsa:
                before = [j for j in range(mine + 1) if chunks[j].start + chunk - 1 <= t]
                weight = np.exp(dots[before] * dim**-0.5)
                dots = np.zeros(mine + 1)
                dots[before] = weight / weight.sum()
            score += dots
        always = [j for j in range(mine + 1) if j > mine - own or j < first]
        order = sorted(range(mine + 1), key=lambda j: (j not in always, -score[j], j))
        for j in order[:count]:
            allowed[b, h, i, chunks[j]] = True
        allowed[b, h, i, t + 1 :] = False
    return allowed


def turning() -> tuple[Tensor, Tensor]:
    """q and k of three blocks of 16, with one KV head, whose best earlier block is the first one up
    to the last token, and the second one there.

    The first head prefers the third block by far, and the first one else. The second head prefers
    the second block. So the first head decides until the third block counts, with its last token.
    """
    q, k = torch.zeros(1, 2, 48, 16), torch.zeros(1, 1, 48, 16)
    q[0, :, :, :3] = torch.tensor([[6.0, 0, 20], [0, 2, 0]])[:, None]
    k[0, 0, :, :3] = 4 * torch.eye(3).repeat_interleave(16, 0)
    return q, k


def whole_blocks(allowed: np.ndarray, block_size) -> np.ndarray:
    """Every pair of a block in which one is allowed."""
    grown = np.zeros_like(allowed)
    for rows in spans(allowed.shape[2], block_size[0]):
        for cols in spans(allowed.shape[3], block_size[1]):
            grown[:, :, rows, cols] = allowed[:, :, rows, cols].any((2, 3), keepdims=True)
    return grown


def dense_of(selection, batch: int, heads: int) -> np.ndarray:
    """Bool (batch, heads, n_q, n_k) of a `Selection` or a `BlockMask`."""
    blocks = selection if isinstance(selection, masks.BlockMask) else selection.to_block_mask()
    return np.broadcast_to(blocks.to_dense(), (batch, heads, blocks.n_q, blocks.n_k))
