"""Bands: counts, alignment, and windows of the size that they say."""

import numpy as np
import pytest

import masks
from tests.masks.patterns.token_graphs import B, nnz


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


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("n_q", "n_k"), [(100, 300), (300, 100), (65, 64), (1, 257)])
def test_alignment(n_q: int, n_k: int, align: str):
    dense = masks.causal(align=align).build(n_q, n_k, 32).to_dense()[0, 0]
    offset = n_k - n_q if align == "bottom_right" else 0
    assert np.array_equal(dense, np.tri(n_q, n_k, offset, dtype=bool))


@pytest.mark.parametrize("n", [1, 5, 129, 1000])
def test_windows_hold_the_keys_they_say(n: int):
    keys = np.arange(n)
    local = masks.local(7, 3).build(n, block_size=16).to_dense().sum(-1).ravel()
    assert np.array_equal(local, np.minimum(keys, 7) + np.minimum(n - 1 - keys, 3) + 1)
    sliding = masks.sliding(8).build(n, block_size=16).to_dense().sum(-1).ravel()
    assert np.array_equal(sliding, np.minimum(keys + 1, 8))
    assert masks.sliding(8).build(n) == masks.local(7, 0).build(n)
    assert masks.local(7).build(n) == masks.local(7, 7).build(n)


def test_extents_beyond_any_token():
    everything = masks.dense().build(300)
    assert masks.local(2**60).build(300) == everything
    assert masks.sliding(2**60).build(300) == masks.causal().build(300)
    assert masks.butterfly(2**60).build(300) == everything
    assert masks.butterfly(16, 10**6).build(300) == masks.butterfly(16).build(300)
    assert masks.global_tokens(2**60).build(300) == everything
