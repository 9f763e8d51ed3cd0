"""Decoding on a CPU: the keys that a sequence's queries see are gathered, and nothing else is read.

float32 and float64 are computed as they are, half inputs in float32.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparseflash.backends.protocol import empty_out
from sparseflash.decoding.pattern import Bounds, Pattern
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, unpack_bits
from sparseflash.score.by_torch import Scored
from sparseflash.score.rule import rule_of

arange = partial(torch.arange, device="cpu")  # whatever the default device is


class Decode:
    """A decoding step of one problem."""

    def __init__(self, problem: Problem, pattern: Pattern, n: int):
        self.problem, self.pattern, self.n = problem, pattern, n

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, schedule: Schedule | None,
        tables: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out (B, H_q, N_q, D_v) and lse (B, H_q, N_q); schedule: that of a dynamic mask."""
        problem, dtype = self.problem, torch.promote_types(q.dtype, torch.float32)
        heads = problem.kv_heads, problem.group, problem.n_q
        out = empty_out(q, v)
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        lengths, starts, table = bounds
        ends = [self.n] * problem.batch if lengths is None else lengths.tolist()
        begins = [0] * problem.batch if starts is None else starts.tolist()
        pattern = self.pattern._replace(schedule=schedule or self.pattern.schedule)
        for b, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            keys, allowed = _seen(pattern, b, problem.n_q, begin, end)
            k_b, v_b = (_rows(cache, table, b, keys).to(dtype) for cache in (k, v))
            q_b = q[b].to(dtype).reshape(heads[0], -1, q.shape[3])
            scores = (q_b @ k_b.mT * problem.scale).unflatten(1, heads[1:])
            if len(allowed) == problem.heads:
                allowed = allowed.unflatten(0, heads[:2])
            else:
                allowed = allowed.unsqueeze(1)
            if problem.options.score:
                scores = self._logits(scores, tables, b, end, keys)
            scores = scores.masked_fill(~allowed, -math.inf)
            own = scores.logsumexp(-1)
            p = (scores - own.masked_fill(own == -math.inf, 0.0).unsqueeze(-1)).exp()
            found = p.flatten(1, 2) @ v_b.nan_to_num(0.0, 0.0, 0.0)
            if (bad := ~v_b.isfinite()).any():  # zero times NaN is NaN, also where it is hidden
                seen = allowed.expand_as(p).flatten(1, 2)
                found[seen.to(dtype) @ bad.to(dtype) > 0] = math.nan
            out[b] = found.view(out[b].shape)
            lse[b] = own.flatten(0, 1)
        return out, lse

    def _logits(
        self, s: Tensor, tables: Sequence[Tensor], b: int, end: int, keys: Tensor
    ) -> Tensor:
        """Return those of scores (H_kv, group, N_q, K)."""
        token = (arange(s.shape[2]) + end - s.shape[2]).clamp(min=0)[:, None]
        head = arange(self.problem.heads).view(*s.shape[:2], 1, 1)
        rule, numbers = rule_of(self.problem.options.score), {"b": head.new_full((), b), "h": head}
        return Scored(rule, tuple(tables), s, end, end, q=token, k=keys, **numbers).logits()


def _seen(pattern: Pattern, b: int, n_q: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the keys (K,) from `begin` to `end` that queries of sequence b see, and which query
    sees which: bool (mask heads, n_q, K).
    """
    token = arange(n_q) + (end - n_q if pattern.from_end else 0)
    schedule = pattern.schedule
    if schedule is None:
        keys = arange(min(begin, end), end)
        allowed = keys <= token[:, None] if pattern.causal else keys.new_ones(n_q, len(keys)).bool()
        return keys, allowed[None]
    block_q, block_k, heads = schedule.block_q, schedule.block_k, schedule.heads
    # every query of every head that is a token, and its list
    head, query = (x.flatten() for x in torch.meshgrid(arange(heads), token, indexing="ij"))
    head, query = head[query >= 0], query[query >= 0]
    slice_ = (b if schedule.batch > 1 else 0) * heads + head
    row = slice_ * -(-schedule.n_q // block_q) + query // block_q
    ptr, idx, tile = schedule.rows.ptr, schedule.rows.idx, schedule.rows.tile
    count = ptr[row + 1] - ptr[row]
    owner = torch.repeat_interleave(count)
    entry = arange(len(owner)) + (ptr[row] - count.cumsum(0) + count)[owner]
    code = tile[entry].long()
    full = code < 0
    bits = schedule.bits[code.clamp(min=0), (query % block_q)[owner]]
    bits = unpack_bits(bits, block_k) | full[:, None]
    blocks, place = torch.unique(idx[entry].long(), return_inverse=True)
    allowed = torch.zeros(heads, n_q, len(blocks), block_k, dtype=torch.bool, device="cpu")
    allowed[head[owner], (query - token[0])[owner], place] = bits
    keys = (blocks[:, None] * block_k + arange(block_k)).flatten()
    allowed = allowed.flatten(2) & (keys >= begin) & (keys < end)
    some = allowed.any(0).any(0)
    return keys[some], allowed[..., some]


def _rows(cache: Tensor, table: Tensor | None, b: int, keys: Tensor) -> Tensor:
    """Return the keys (or values) of sequence b as (H_kv, K, D), contiguous."""
    if table is None:
        return cache[b].index_select(1, keys)
    page = cache.shape[2]
    found = cache[table[b, keys // page].long(), :, keys % page]
    return found.transpose(0, 1).contiguous()
