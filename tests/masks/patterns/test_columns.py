"""Rows and columns, and the masks of long-context inference that are made of them."""

import numpy as np
import pytest

import masks
from masks import Mask
from masks.patterns.columns import (
    global_at,
    global_rows,
    global_tokens,
    keys_at,
    last_rows,
    prefix_lm,
    sinks,
)
from masks.patterns.streaming import streaming, tri_shape, vertical_slash
from tests.masks.build_time import assert_builds_within
from tests.masks.patterns.token_graphs import B


def dense(mask: Mask, n: int, n_k: int | None = None) -> np.ndarray:
    return mask.build(n, n_k, block_size=32).to_dense()[0, 0]


@pytest.mark.parametrize(("n", "g"), [(8, 1), (16, 3), (5, 9)])
def test_block_counts(n: int, g: int):
    held = min(n, g)
    for make in (global_rows, last_rows, sinks):
        assert make(g * B).build(n * B, block_size=B).nnz == n * held
    assert global_tokens(g * B).build(n * B, block_size=B).nnz == held * (2 * n - held)


def test_global_tokens_are_rows_and_columns():
    both = global_rows(37) | sinks(37)
    assert both.build(200, 150, 32) == global_tokens(37).build(200, 150, 32)
    assert global_at(range(37)).build(200, 150, 32) == global_tokens(37).build(200, 150, 32)
    assert keys_at(range(37)).build(200, 150, 32) == sinks(37).build(200, 150, 32)


def test_global_at():
    tokens = (3, 64, 65, 99, 1000)
    allowed = dense(global_at(tokens), 100)
    assert allowed.sum() == 4 * (2 * 100 - 4)
    assert allowed[list(tokens[:4])].all() and allowed[:, list(tokens[:4])].all()
    assert global_at((2, 1)) == global_at((1, 2)) == global_at(np.array([2, 1]))
    assert not dense(global_at(()), 40).any()


def test_last_rows_depend_on_the_length():
    for n_q, n_k in [(100, 90), (33, 200), (5, 5)]:
        allowed = dense(last_rows(7), n_q, n_k)
        assert np.array_equal(allowed.all(1), np.arange(n_q) >= n_q - 7)


@pytest.mark.parametrize("prefix", [0, 1, 40, 100, 500])
def test_prefix_lm(prefix: int):
    n, p = 100, min(prefix, 100)
    allowed = dense(prefix_lm(prefix), n)
    assert allowed.sum() == n * (n + 1) // 2 + p * (p - 1) // 2
    q, k = np.arange(n)[:, None], np.arange(n)
    assert np.array_equal(allowed, ((q < p) & (k < p)) | (k <= q))  # FlashAttention's form


@pytest.mark.parametrize(("s", "w", "m"), [(4, 32, 0), (4, 32, 10), (0, 1, 1), (20, 50, 30)])
def test_streaming_and_tri_shape(s: int, w: int, m: int):
    n = 150
    count = n * w - w * (w - 1) // 2 + (n - w) * s - s * (s - 1) // 2
    assert dense(streaming(s, w), n).sum() == count
    more = m * (n - s - w) - m * (m - 1) // 2
    assert dense(tri_shape(s, w, m), n).sum() == count + more


def test_a_cache_of_516():
    """4 sinks and the 512 newest keys, the query's own among them; nothing of the future."""
    allowed = dense(streaming(4, 512), 600)
    assert allowed[-1].sum() == 516 and not np.triu(allowed, 1).any()
    assert np.flatnonzero(allowed[-1])[4] == 600 - 512
    one_query = dense(streaming(4, 512, align="bottom_right"), 1, 600)
    assert np.array_equal(one_query[0], allowed[-1])


def test_vertical_slash():
    columns, distances, n = (0, 5, 77), (0, 1, 30), 120
    allowed = dense(vertical_slash(columns, distances), n)
    for q in range(n):
        seen = {k for k in columns if k <= q} | {q - d for d in distances if d <= q}
        assert set(np.flatnonzero(allowed[q])) == seen


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sinks(-1), "n is -1: give an integer >= 0"),
        (lambda: global_rows(1.5), "n is 1.5"),
        (lambda: last_rows(True), "n is True"),
        (lambda: global_at(4), "tokens is 4: give a tuple"),
        (lambda: global_at((4, -1)), "a number in tokens is -1"),
        (lambda: keys_at((4, 4)), "tokens has 4 twice"),
        (lambda: prefix_lm(-1), "prefix is -1"),
        (lambda: prefix_lm(1, align="right"), "align is 'right'"),
        (lambda: streaming(-4, 5), "sinks is -4"),
        (lambda: streaming(4, 0), "window is 0"),
        (lambda: tri_shape(4, 5, -1), "last is -1"),
        (lambda: vertical_slash((1,), (-1,)), "a number in distances is -1"),
        (lambda: vertical_slash((-1,), (1,)), "a number in columns is -1"),
    ],
)
def test_errors_name_value_and_remedy(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_beyond_any_token():
    everything = masks.dense().build(300)
    for make in (sinks, global_rows, last_rows, global_tokens):
        assert make(2**60).build(300) == everything
    assert not dense(keys_at((300, 2**60)), 300).any()


@pytest.mark.parametrize(
    ("mask", "milliseconds", "tiles"),
    [
        (sinks(64) & masks.causal(), 300, 2),
        (global_tokens(64), 300, 3),
        (prefix_lm(1000), 300, 3),
        (streaming(4, 4096), 300, 4),
        (tri_shape(4, 4096, 64), 300, 7),
    ],
    ids=str,
)
def test_a_million_tokens(mask: Mask, milliseconds: float, tiles: int):
    assert_builds_within(mask, milliseconds, tiles)
    assert len(mask.build(1 << 14).bits) <= tiles


def test_many_lines():
    """A thousand vertical lines and a wide slash over 128K tokens."""
    columns = tuple(range(0, 1 << 17, 131))
    blocks = vertical_slash(columns, tuple(range(64))).build(1 << 17)
    assert blocks.density < 1 and len(blocks.bits) < 4000
