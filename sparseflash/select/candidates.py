"""The candidates of static masks: built on the host, copied to the device once, cached."""

from functools import lru_cache

import numpy as np
import torch

from masks.algebra import Mask
from masks.block_lists import EMPTY, FULL
from masks.block_mask import BlockMask
from sparseflash.select.rules import Candidates, Rule
from sparseflash.select.static import built, grid_codes, heads_of, static_codes, to_device


def candidates_of(
    rule: Rule,
    within: Mask | BlockMask | None,
    always: Mask | BlockMask | None,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int,
    device: torch.device,
) -> Candidates:
    """The blocks of `within`, those of `always` first; only the first call copies to the device."""
    per_head = any(heads_of(mask, heads) for mask in (within, always) if mask is not None)
    return _candidates(rule, within, always, n_q, n_k, block_size, heads if per_head else 1, device)


@lru_cache(maxsize=16)
def _candidates(rule, within, always, n_q, n_k, block_size, heads, device) -> Candidates:
    shape = (1, 1, -(-n_q // block_size[0]), -(-n_k // block_size[1]))
    if within is None:
        host = np.full(shape, FULL, np.int32)
        codes = to_device(host, device)
        bits = codes.new_empty((0, block_size[0], -(-block_size[1] // 32)))
    else:
        host = grid_codes(built(within, n_q, n_k, block_size, heads_of(within, heads)))
        codes, bits, _ = static_codes(within, n_q, n_k, block_size, heads, device)
    taken, forced = np.zeros((1, 1, 1, 1), bool), None
    if always is not None:
        taken = grid_codes(built(always, n_q, n_k, block_size, heads_of(always, heads))) != EMPTY
        forced = to_device(taken.astype(np.int8), device)
    low, high = _bounds(rule, host != EMPTY, taken)
    on_device = (to_device(low, device), to_device(high, device))
    return Candidates(codes, bits, forced, *on_device, int(high.sum()))


def _bounds(rule: Rule, candidate: np.ndarray, forced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fewest and the most blocks of each row, int32 (B, H, rows), forced blocks included."""
    candidates, forced = candidate.sum(-1), (candidate & forced).sum(-1)
    if rule.kind == "count":
        low = high = int(rule.value)
    elif rule.kind == "share":
        low = high = np.ceil(rule.value * candidates - 1e-9)
    else:
        low, high = rule.min_blocks, rule.max_blocks or candidates
    low = np.minimum(np.maximum(low, forced), candidates)
    high = np.minimum(np.maximum(high, low), candidates)
    return low.astype(np.int32), high.astype(np.int32)
