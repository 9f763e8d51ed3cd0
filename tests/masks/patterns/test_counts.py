"""Closed-form block counts of the literature."""

import numpy as np
import pytest

import masks

B = 16


def nnz(mask: masks.Mask, n: int) -> int:
    return mask.build(n * B, block_size=B).nnz


@pytest.mark.parametrize(
    ("n", "count"), [(2, 4), (8, 32), (16, 80), (32, 192), (64, 448), (256, 2304), (4096, 53248)]
)
def test_butterfly(n: int, count: int):
    levels = n.bit_length() - 1
    assert nnz(masks.butterfly(B), n) == count == n * (levels + 1)
    for f in range(levels):
        assert nnz(masks.butterfly(B, f), n) == n * (f + 1)


@pytest.mark.parametrize(
    ("n", "factors", "density"),
    [(32, 3, 0.125), (16, 2, 0.1875), (16, 3, 0.25), (16, 4, 0.3125), (8, 2, 0.375), (8, 3, 0.5)],
)
def test_butterfly_of_the_published_configurations(n: int, factors: int, density: float):
    assert masks.butterfly(B, factors).build(n * B, block_size=B).density == density


@pytest.mark.parametrize(("n", "count"), [(8, 20), (16, 48), (64, 256), (512, 2816)])
def test_causal_butterfly(n: int, count: int):
    assert nnz(masks.butterfly(B) & masks.causal(), n) == count == n * n.bit_length() // 2 + n // 2


@pytest.mark.parametrize(("n", "count"), [(8, 40), (16, 102), (64, 562), (512, 6124)])
def test_butterfly_with_a_global_block(n: int, count: int):
    assert nnz(masks.butterfly(B) | masks.global_tokens(B), n) == count


def test_butterfly_is_a_hypercube():
    """After t layers a block reaches those at most t bits away."""
    reach = masks.butterfly(B).build(64 * B, block_size=B).layout()[0, 0] > 0
    after = np.eye(64, dtype=bool)
    for count in (7, 22, 42, 57, 63, 64):
        after = (after.astype(int) @ reach) > 0
        assert (after.sum(1) == count).all()
    assert np.array_equal(reach, reach.T)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_causal(n: int):
    layout = masks.causal().build(n * B, block_size=B).layout()
    assert (layout == 1).sum() == n and (layout == 2).sum() == n * (n - 1) // 2


@pytest.mark.parametrize(("w", "count"), [(1, 46), (2, 74), (3, 100)])
def test_window(w: int, count: int):
    assert nnz(masks.local(w * B), 16) == count == 16 * (2 * w + 1) - w * (w + 1)


@pytest.mark.parametrize(("n", "count"), [(16, 74), (64, 314)])
def test_window_with_global_tokens(n: int, count: int):
    assert nnz(masks.local(B) | masks.global_tokens(B), n) == count == 5 * n - 6


def test_a_million_tokens():
    blocks = masks.local(256).build(1 << 20)
    lengths = np.diff(blocks.starts, append=blocks.rows * blocks.cols)
    assert lengths[blocks.tiles == -1].sum() == 24_574
    assert lengths[blocks.tiles >= 0].sum() == 16_380
    assert len(blocks.bits) == 2
    assert masks.butterfly(256).build(1 << 20, block_size=256).nnz == 4096 * 13
