"""Presets, set block by block as the published code does it."""

import random

import numpy as np

from masks import Mask
from masks.presets import deepspeed as ds
from masks.presets import lra
from masks.presets.deepspeed_layouts import Fixed, Sliding, Variable
from tests.masks.oracles import HEADS, leaf, oracle, positions, varied
from tests.masks.oracles.graphs import BLOCK_SIZES, drawn, layout, mix, tokens, word

ATTENTION = ["bidirectional", "unidirectional"]


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    size, count = rng.choice([(1, 1), (3, 1), (4, 1), (4, 2), (6, 3), (4, 4)])
    attention = rng.choice(ATTENTION)
    horizontal = attention == "bidirectional" and rng.random() < 0.5
    return ds.deepspeed_fixed(
        size,
        count,
        attention=attention,
        horizontal_global_attention=horizontal,
        block=rng.choice(BLOCK_SIZES),
    )


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    groups = rng.choice([1, 2, HEADS])
    return ds.deepspeed_fixed(4, num_different_global_patterns=groups, block=rng.choice([5, 16]))


@oracle(Fixed)
def _(mask: Fixed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    blocks = layout(mask, n_q, n_k, heads)
    n_rows, n = blocks.shape[1:]
    for h, grid in enumerate(blocks):
        row, col = positions(n_rows, n)
        grid |= (row // mask.size == col // mask.size) & ((col <= row) | (not mask.causal))
        first = mask.size - (1 + h % mask.groups) * mask.count
        end = n - n % mask.size
        starts = list(range(first, end, mask.size))
        if end < n:
            starts.append(min(end + first, n - mask.count))
        for start in starts:
            stop = start + mask.count
            start = range(n)[slice(start, None)][0]  # as an index from the end, or cut
            grid[start if mask.causal else 0 :, start:stop] = True
            if mask.horizontal:
                grid[start:stop] = True
    return tokens(blocks, mask.block, n_q, n_k)


def any_ranges(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    starts = tuple(sorted(rng.sample(range(12), rng.randrange(3))))
    return starts, rng.choice([None, tuple(x + rng.randrange(1, 4) for x in starts)])


def any_layout(rng: random.Random, n_k: int, block: int, **options) -> Mask:
    """A layout that the blocks have room for, with draws where there are `options` for them."""
    n = -(-n_k // block)
    starts, stops = any_ranges(rng)
    attention = rng.choice(ATTENTION)
    window, free = rng.randrange(1, min(n, 6) + 1), attention == "bidirectional"
    common = {"attention": attention, "block": block}
    match rng.randrange(6):
        case 0 | 1:
            windows = rng.choice([(4,), (1, 2), (3, 1, 2)])
            horizontal = free and rng.random() < 0.5
            common |= {"horizontal_global_attention": horizontal, **options}
            count = rng.randrange(min(n, 4) + 1)
            return ds.deepspeed_variable(count, windows, starts, stops, **common)
        case 2 | 3:
            drawn_blocks = rng.randrange(min(n, 4 if free else 1) + 1)
            whole = rng.randrange(min(n, 2) + 1)
            return ds.deepspeed_bigbird(drawn_blocks, window, whole, **common, **options)
        case 4:
            return ds.deepspeed_bslongformer(window, starts, stops, **common)
        case _:
            return ds.deepspeed_local_sliding_window(window, **common)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return any_layout(rng, n_k, rng.choice(BLOCK_SIZES), seed=rng.randrange(100))


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return any_layout(rng, n_k, 7, seed=rng.randrange(9), different_layout_per_head=True)


@oracle(Variable)
def _(mask: Variable, n_q: int, n_k: int, heads: int) -> np.ndarray:
    blocks = layout(mask, n_q, n_k, heads)
    n_rows, n = blocks.shape[1:]
    sizes = list(mask.windows)
    while sum(sizes) < max(n_rows, n):
        sizes.append(sizes[-1])
    window = np.repeat(np.arange(len(sizes)), sizes)
    for h, grid in enumerate(blocks):
        row, col = positions(n_rows, n)
        grid |= (window[row] == window[col]) & ((col <= row) | (not mask.causal))
        for row in range(n_rows):
            grid[row, sorted(drawn(mix(word(mask, h) ^ row), mask.random, n))] = True
        for start, stop in mask.ranges:
            if start < n:
                if mask.horizontal:
                    grid[start:stop] = True
                grid[start if mask.causal else 0 :, start:stop] = True
    return tokens(blocks, mask.block, n_q, n_k)


@oracle(Sliding)
def _(mask: Sliding, n_q: int, n_k: int, heads: int) -> np.ndarray:
    blocks = layout(mask, n_q, n_k, heads)
    n_rows, n = blocks.shape[1:]
    row, col = positions(n_rows, n)
    blocks |= abs(row - col) <= mask.window // 2
    for h, grid in enumerate(blocks):
        for row in range(n_rows):
            columns = min(row + 1, n) if mask.causal else n
            grid[row, sorted(drawn(mix(word(mask, h) ^ row), mask.random, columns))] = True
        for start, stop in mask.ranges:
            if start < n:
                grid[start:stop] = True
                grid[:, start:stop] = True
        if mask.causal:
            grid &= np.tri(n_rows, n, dtype=bool)
    return tokens(blocks, mask.block, n_q, n_k)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    size = rng.choice([1, 3, 8, 50])
    return rng.choice(
        [
            lra.lra_local(size, interleaved=rng.random() < 0.7),
            lra.lra_fixed(size, rng.randrange(size + 1)),
            lra.lra_strided(size),
            lra.lra_longformer(rng.randrange(1, 60), rng.randrange(5)),
        ]
    )


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return lra.lra_bigbird(rng.choice([5, 7, 16]), rng.choice([1, 3]), seed=rng.randrange(100))


@oracle(lra.Interleaved)
def _(mask: lra.Interleaved, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """The code's reshape: tokens are laid out as (block, chunks), padded by 1..block of them."""
    n = max(n_q, n_k)
    padded = n + mask.block - n % mask.block
    chunk = np.arange(padded).reshape(mask.block, -1)
    column = np.empty(padded, int)
    for i in range(chunk.shape[1]):
        column[chunk[:, i]] = i
    return column[:n_q, None] == column[None, :n_k]


@oracle(lra.FixedLRA)
def _(mask: lra.FixedLRA, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    first = q // mask.stride == k // mask.stride
    remainder = k % mask.stride
    second = (remainder == 0) | (remainder >= mask.stride - mask.summary)
    return (k <= q) & (first | second)


@oracle(lra.BigBirdLRA)
def _(mask: lra.BigBirdLRA, n_q: int, n_k: int, heads: int) -> np.ndarray:
    b, r = mask.block, mask.random
    n = max(n_q, n_k)
    padded = n + b - n % b
    m = padded // b
    stream = np.random.RandomState(mask.seed)
    a = np.arange(1, m - 1)
    focus = min(padded, 1024)
    last = focus // b - 1 if focus > 2 * b else m - 1
    blocks = np.zeros((heads, m, m), bool)
    blocks[:, [0, -1]] = blocks[:, :, [0, -1]] = True
    fits = m > 2
    for head in range(heads):
        for i in range(1, m - 1):
            blocks[head, i, i - 1 : i + 2] = True
            start, end = i - 2, i
            if i == 1:
                choices = a[2:last]
            elif i == 2:
                choices = a[3:last]
            elif i == m - 3:
                choices = a[: last - 4]
            elif i == m - 2:
                choices = a[: last - 3]
            elif start > last:
                choices = a[:last]
            elif end + 1 == last:
                choices = a[:start]
            else:
                choices = np.concatenate((a[:start], a[end + 1 : last]))
            fits &= len(choices) >= r
            if fits:
                blocks[head, i, stream.permutation(choices)[:r]] = True
    return tokens(blocks | (not fits), b, n_q, n_k)
