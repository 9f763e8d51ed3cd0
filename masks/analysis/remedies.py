"""Remedies that compute fewer blocks: smaller blocks, and orders of the tokens to paste."""

from typing import Any, NamedTuple

import numpy as np

from masks.analysis.stats import Stats, percent
from masks.registry import TRANSFORMS
from masks.runs import Bools, Ints
from masks.segments import Segments, area
from masks.types import Mask

SMALLER = (64, 32, 16)  # blocks to try against waste,
AT_MOST = 1 << 16  # up to so many tokens

TOKENS = 4096  # that an order is tried with, at most
CELLS = 1 << 27  # pairs of all slices, at most
HEAVY = 0.5  # share of the later queries, or of all, that see a key which goes to the front
LISTED = 32  # numbers that an expression may list


class Found(NamedTuple):
    """What an order gives."""

    text: str  # the right side of `mask >> ..`, in Python
    share: float  # pairs in computed blocks / all pairs
    before: float  # the same without the order
    tokens: int  # at which both were counted


def less_waste(mask: Mask, found: Stats, heads: int | None) -> str:
    """Return what was built and found to compute much less, in words."""
    said: list[str] = []
    if found.n_q > AT_MOST:
        return "Try smaller blocks, or reorder the tokens."

    def computed(mask: Mask, block_size: int | tuple[int, int]) -> float:
        segments = Segments.of(mask.build(found.n_q, found.n_k, block_size, heads=heads))
        return area(segments) / (found.slices * found.n_q * found.n_k)

    if canvas := _canvas(mask):
        curve = TRANSFORMS["hilbert" if len(canvas) == 2 else "morton"].function(canvas)
        share = computed(mask >> curve, found.block_size)
        order = Found(f"masks.{curve}", share, found.flop_density, found.n_q)
    else:
        order = best_order(mask, found.n_q, found.block_size, heads)
    if order and order.share < order.before / 1.5:
        at = f" at {order.tokens} tokens" if order.tokens < found.n_q else ""
        shares = f"{percent(order.share)} of all pairs{at}, not {percent(order.before)}"
        said.append(f"mask >> {order.text} computes {shares}.")
    for size in (size for size in SMALLER if size < max(found.block_size)):
        share = computed(mask, size)
        if share < found.flop_density / 2:
            shares = f"{percent(share)} of all pairs, not {percent(found.flop_density)}"
            said.append(f"Blocks of {size} x {size} compute {shares}.")
            break
    return " ".join(said) or "Reorder the tokens so that those that see each other are neighbours."


def _canvas(mask: Mask) -> tuple[int, ...]:
    """Return the extents of the first pattern on an image or a video in its own order, or ()."""
    if mask.kind in TRANSFORMS:  # reordered already, or not all of the tokens
        return ()
    own = getattr(mask, "arguments", {}).get("canvas", ())
    return own if len(own) > 1 else next(filter(None, map(_canvas, mask.parts)), ())


def best_order(
    mask: Mask, seq_len: int, block_size: tuple[int, int], heads: int | None
) -> Found | None:
    """Return the order with the smallest share of those that the mask suggests; None without one.

    Tried are the keys that most queries see before all others, and the tokens by their remainder
    where what a query sees repeats. Above 4096 tokens they are tried with 4096.
    """
    n = min(seq_len, TOKENS)
    try:
        blocks = mask.build(n, block_size=block_size, heads=heads)
    except ValueError:  # it is made for one length
        return None
    if blocks.grid.slices * n * n > CELLS:
        return None
    allowed = blocks.to_dense().reshape(-1, n, n)
    best, before = None, _computed(allowed, block_size)
    for rule, order in _candidates(np.logical_or.reduce(allowed)):
        for side in ("keys", "both"):
            moved = allowed[:, :, order] if side == "keys" else allowed[:, order][:, :, order]
            share = _computed(moved, block_size)
            if best is None or share < best.share - 1e-3:  # with keys alone, the output stays
                options = "" if side == "both" else ", side='keys'"
                sort = f"sorted(range({seq_len}), key=lambda i: {rule})"
                best = Found(f"masks.permuted({sort}{options})", share, before, n)
    return best


def _candidates(allowed: Bools) -> list[tuple[str, Ints]]:
    """(sorting rule in Python, order) of what to try for a mask (n, n)."""
    n = len(allowed)
    i = np.arange(n)
    found = []
    causal = not np.triu(allowed, 1).any()
    seen = allowed.sum(0)
    heavy = (seen >= HEAVY * (n - i if causal else n)) & (seen >= n / 8)
    step = _period(heavy[: n // 2])  # of a causal mask, few queries see the later keys
    if step:
        rest = np.flatnonzero(heavy[:step])
        first = np.isin(i % step, rest)
        if len(rest) == 1:
            found.append((f"i % {step} != {rest[0]}", first))
        elif rest[-1] - rest[0] == len(rest) - 1:
            found.append((f"i % {step} not in range({rest[0]}, {rest[-1] + 1})", first))
        elif len(rest) <= LISTED:
            found.append((f"i % {step} not in {tuple(rest.tolist())}", first))
    elif 0 < heavy.sum() <= LISTED:
        found.append((f"i not in {tuple(np.flatnonzero(heavy).tolist())}", heavy))
    orders = [(rule, np.argsort(~first, kind="stable")) for rule, first in found]
    last = np.flatnonzero(allowed[-1])
    step = len(last) and _period(allowed[-1, last[0] : (last[0] + last[-1]) // 2 + 1])  # far back
    if step:
        orders.append((f"i % {step}", np.argsort(i % step, kind="stable")))
    return orders


def _period(marks: Bools) -> int:
    """After how many places the marks repeat, four times at least; 0 where they do not."""
    if marks.all() or not marks.any():
        return 0
    steps = range(2, len(marks) // 4 + 1)
    return next((step for step in steps if (marks[step:] == marks[:-step]).all()), 0)


def _computed(allowed: Bools, block_size: tuple[int, int]) -> float:
    """Pairs in blocks with any allowed pair / all pairs of (slices, n, n)."""
    edges: list[Any] = [np.arange(0, allowed.shape[1], size) for size in block_size]
    q, k = (np.diff(e, append=allowed.shape[1]) for e in edges)
    some = np.logical_or.reduceat(np.logical_or.reduceat(allowed, edges[0], 1), edges[1], 2)
    return float((some * (q[:, None] * k)).sum() / allowed.size)
