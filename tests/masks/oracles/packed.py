"""Masks laid into documents, moved, rounded to token blocks, and in another order of the tokens."""

import random

import numpy as np

import masks
from masks import Mask
from masks.transforms.base import Transform, Transformed
from masks.transforms.packed import Pack, Shift, packed, shift
from masks.transforms.reorder import SIDES, Reorder, hilbert, morton, permuted, tiled
from masks.transforms.snap import Snap, snap
from tests.masks.oracles import BATCH, HEADS, LEAVES, VARIED, leaf, oracle, segments, varied
from tests.masks.oracles.canvas import any_canvas, any_canvas_mask, any_per_axis

ANY_LENGTH = [
    masks.causal(),
    masks.causal(align="bottom_right"),
    masks.local(9, 30),
    ~masks.sliding(20),
    masks.butterfly(8) | masks.global_tokens(3),
    masks.random_blocks(0.4, block=16) & masks.causal(),
    masks.dense(),
    ~masks.dense(),
    masks.block_diagonal(13, 5) - masks.local(2),
    masks.longnet(20, 3, 1) | masks.local(1),
]
PARTS, VARIED_PARTS = [*LEAVES], [*VARIED]  # of the families that come before


def places(rng: random.Random, n_q: int, n_k: int) -> list[list[int]]:
    """Lengths of documents that reach n_q, and lengths that reach n_k: the same or others."""
    q, k = segments.any_lengths(rng, max(n_q, n_k)), segments.any_lengths(rng, n_k)
    count = max(len(q), len(k))
    k = rng.choice([q, k])
    return [x + [0] * (count - len(x)) for x in (q, k)]


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    part = rng.choice(ANY_LENGTH)
    if rng.random() < 0.2:
        part = part >> packed([7, 30, 0, 1000])
    return part >> packed(*places(rng, n_q, n_k))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    """Documents of one length, so that masks of one length fit."""
    length, key_length = rng.randrange(1, 60), rng.randrange(1, 60)
    count = max(-(-n_q // length), -(-n_k // key_length))
    part = rng.choice(PARTS)(rng, length, key_length)
    return part >> packed([length] * count, [key_length] * count)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    q, k = rng.randrange(-100, 100), rng.randrange(-100, 100)
    q, k = min(q, n_q - 1), min(k, n_k - 1)
    move = shift(q, k) if rng.random() < 0.9 else shift(200)
    part = rng.choice(PARTS)(rng, n_q - q, n_k - k) if q == move.q else rng.choice(ANY_LENGTH)
    return part >> move


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    part = rng.choice(PARTS)(rng, n_q, n_k)
    if rng.random() < 0.5:
        part = rng.choice(
            [part | masks.sliding(40), part & masks.butterfly(24), part - masks.local(3)]
        )
    sizes = [1, 5, 16, 24, 32, 64, 100, 1 << 50]
    size = rng.choice([rng.choice(sizes), (rng.choice(sizes), rng.choice(sizes))])
    return part >> snap(size, rng.choice(["outward", "inward"]))


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    part = rng.choice(VARIED_PARTS)(rng, n_q, n_k)
    return part >> rng.choice([snap(24), snap(16, "inward"), shift(0)])


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    """Documents by batch entry, or a part by head and batch entry, or both."""
    rows = [segments.any_lengths(rng, max(n_q, n_k)) for _ in range(BATCH)]
    part = rng.choice([*ANY_LENGTH, masks.longnet(16, HEADS, per_head=True)])
    length = rng.randrange(1, 60)
    count = -(-max(n_q, n_k) // length)
    same = rng.choice([[length] * count, [[length] * count] * BATCH])
    return rng.choice(
        [part >> packed(rows), rng.choice(VARIED_PARTS)(rng, length, length) >> packed(same)]
    )


@oracle(Pack)
def _(mask: Transformed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.helpers import brute_dense

    batch = mask.batch or 1
    rows, key_rows = mask.transform.lengths, mask.transform.key_lengths
    ends = max(map(sum, rows)), max(map(sum, key_rows))
    dense = np.zeros((batch, heads, *ends), bool)
    for b in range(batch):
        q = k = 0
        entry = b if len(rows) > 1 else 0
        for m_q, m_k in zip(rows[entry], key_rows[entry], strict=True):
            if m_q and m_k:
                part = brute_dense(mask.part, m_q, m_k, batch, heads)
                dense[b, :, q : q + m_q, k : k + m_k] = part[b]
            q, k = q + m_q, k + m_k
    return dense[:, :, :n_q, :n_k]


@oracle(Shift)
def _(mask: Transformed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.helpers import brute_dense

    batch, q, k = mask.batch or 1, mask.transform.q, mask.transform.k
    dense = np.zeros((batch, heads, n_q, n_k), bool)
    if q < n_q and k < n_k:
        part = brute_dense(mask.part, n_q - q, n_k - k, batch, heads)
        dense[:, :, max(q, 0) :, max(k, 0) :] = part[:, :, max(-q, 0) :, max(-k, 0) :]
    return dense


@oracle(Snap)
def _(mask: Transformed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.helpers import brute_dense

    dense = brute_dense(mask.part, n_q, n_k, mask.batch or 1, heads).copy()
    q, k = mask.transform.q, mask.transform.k
    for i in range(0, n_q, q):
        for j in range(0, n_k, k):
            block = dense[:, :, i : i + q, j : j + k]
            decide = block.any if mask.transform.how == "outward" else block.all
            block[:] = decide(axis=(2, 3), keepdims=True)
    return dense


def any_reorder(rng: random.Random, canvas: tuple[int, ...], side: str) -> Transform:
    n = int(np.prod(canvas))
    match rng.randrange(4):
        case 0:
            return tiled(canvas, any_per_axis(rng, list(canvas)), side=side)
        case 1:
            return morton(canvas, side=side)
        case 2 if len(canvas) == 2:
            return hilbert(canvas, side=side)
        case _:
            return permuted(rng.sample(range(n), n), side=side)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    side = rng.choice(SIDES) if n_q == n_k else rng.choice(["queries", "keys"])
    canvas = any_canvas(rng, n_q if side == "queries" else n_k)
    if n_q == n_k and rng.random() < 0.5:
        part = any_canvas_mask(rng, canvas)
        if rng.random() < 0.5:
            part |= any_canvas_mask(rng, canvas)
    else:
        part = rng.choice(LEAVES)(rng, n_q, n_k) - masks.global_tokens(rng.randrange(3))
    return part >> any_reorder(rng, canvas, side)


def order_of(transform: Reorder) -> list[int]:
    """The tokens in their new order, by sorting them."""
    if transform.kind in ("hilbert", "permuted"):  # which test_reorder looks at
        return transform.curve(*transform.shape).tolist()
    places = list(np.ndindex(transform.shape[0]))
    if transform.kind == "morton":
        keys = [[f"{x:020b}"[bit] for bit in range(20) for x in place] for place in places]
    else:
        tile = transform.shape[1]
        split = [[divmod(x, size) for x, size in zip(at, tile, strict=True)] for at in places]
        keys = [[pair[part] for part in (0, 1) for pair in pairs] for pairs in split]
    return sorted(range(len(places)), key=keys.__getitem__)


@oracle(Reorder)
def _(mask: Transformed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.helpers import brute_dense

    # an array leaf may have a batch of its own
    dense = brute_dense(mask.part, n_q, n_k, mask.batch or 1, heads)
    order = order_of(mask.transform)
    if mask.transform.side != "keys":
        dense = dense[..., order, :]
    if mask.transform.side != "queries":
        dense = dense[..., order]
    return dense
