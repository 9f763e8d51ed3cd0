"""The numbers of `stats` against counting in the dense mask, and closed forms."""

import random
import tracemalloc

import numpy as np
import pytest

import masks
from masks import BlockMask
from masks.analysis.stats import stats
from tests.masks.helpers import brute_layout
from tests.notes import each_seed

SPARSE = masks.local(256) | masks.butterfly(128) | masks.global_tokens(64)


def any_mask(rng: random.Random, n_q: int, n_k: int, slices: int = 1) -> np.ndarray:
    """bool (1, slices, n_q, n_k): sparse, dense, symmetric, structured or empty."""
    noise = np.random.default_rng(rng.randrange(1 << 30))
    result = np.zeros((slices, n_q, n_k), bool)
    q, k = np.arange(n_q)[:, None], np.arange(n_k)
    for one in result:
        match rng.randrange(7):
            case 0:
                one |= noise.random((n_q, n_k)) < rng.choice([0.002, 0.02, 0.5])
            case 1:
                one |= abs(q - k) <= rng.randrange(60)
            case 2:
                one |= (q - k) % rng.randrange(1, 40) == 0
            case 3:
                one |= q // 37 == k // 37
            case 4:
                one |= (q // 32 == rng.randrange(4)) | (k // 48 == rng.randrange(4))
            case 5:
                one |= (q >= k) & (q - k < rng.randrange(1, 200))
        if rng.random() < 0.3 and n_q == n_k:
            one |= one.T.copy()
        if rng.random() < 0.3:
            one[rng.randrange(n_q) :, rng.randrange(n_k) :] = rng.random() < 0.5
    return result[None]


@each_seed(90)
def test_by_counting(seed: int):
    rng = random.Random(seed)
    n_q = rng.choice([1, 16, 97, 128, 161])
    n_k = n_q if rng.random() < 0.7 else rng.choice([1, 15, 130])
    block = rng.choice([(16, 16), (32, 32), (48, 32), (16, 64), (64, 48)])
    dense = any_mask(rng, n_q, n_k, rng.choice([1, 1, 3]))
    blocks = BlockMask.from_dense(dense, block)
    found = stats(blocks)
    layout, dense = brute_layout(dense, block)[0], dense[0]

    assert found.pairs == dense.sum() and found.slices == len(dense)
    assert found.element_density == pytest.approx(dense.mean())
    assert found.block_density == pytest.approx((layout > 0).mean())
    assert (found.full, found.partial) == ((layout == 2).sum(), (layout == 1).sum())
    assert found.empty == (layout == 0).sum() and found.tiles == len(blocks.bits)
    computed = (layout > 0).repeat(block[0], 1).repeat(block[1], 2)[:, :n_q, :n_k]
    assert found.flop_density == pytest.approx(computed.mean())
    if dense.any():
        assert found.waste == pytest.approx(computed.sum() / dense.sum())
    rows, columns = (layout > 0).sum(2), (layout > 0).sum(1)
    for load, counts in ((found.row_load, rows), (found.column_load, columns)):
        assert (load.min, load.max) == (counts.min(), counts.max())
        assert load.mean == pytest.approx(counts.mean())
    assert found.regular == (len(np.unique(rows)) == 1, len(np.unique(columns)) == 1)

    blind, unseen = ~dense.any(2), ~dense.any(1)
    assert (found.blind, found.unseen) == (blind.sum(), unseen.sum())
    for spans, holes in ((found.blind_ranges, blind), (found.unseen_ranges, unseen)):
        marked = np.zeros(holes.shape[1], bool)
        for first, last in spans:
            marked[first : last + 1] = True
        assert np.array_equal(marked, holes.any(0))

    _, q, k = np.nonzero(dense)
    assert found.causal == bool((k <= q).all())
    if len(q):
        assert (found.back, found.ahead) == ((q - k).max(), (k - q).max())
        assert found.bandwidth == abs(q - k).max()


def test_slices():
    dense = np.random.default_rng(0).random((2, 3, 100, 100)) < 0.05
    dense[1, 2] = True
    blocks = BlockMask.from_dense(dense, 16)
    assert stats(blocks, batch=1, head=2).element_density == 1
    assert stats(blocks, batch=1).pairs == dense[1].sum()
    assert stats(blocks, head=2).pairs == dense[:, 2].sum()
    one = stats(blocks, batch=0, head=1)
    assert one.pairs == dense[0, 1].sum()
    assert one.tiles == len(BlockMask.from_dense(dense[0, 1], 16).bits) < len(blocks.bits)
    with pytest.raises(ValueError, match=r"head is 3: give an integer <= 2"):
        stats(blocks, head=3)


def test_a_mask_of_nothing():
    nothing = stats((masks.local(0) - masks.local(0)).build(64, block_size=16))
    assert "64 (0-63)" in str(nothing) and nothing.waste == float("inf")
    assert nothing.bandwidth is None


def test_a_million_tokens():
    found = stats(SPARSE.build(1 << 20))
    assert (found.full, found.partial, found.tiles) == (122878, 24544, 4)
    assert found.bandwidth == (1 << 20) - 1
    tracemalloc.start()
    stats(masks.causal().build(1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20
