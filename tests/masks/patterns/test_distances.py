"""Patterns of the distance, and those of single keys: how far layers reach, golden rows, tiles."""

import numpy as np
import pytest

import masks
from masks.patterns.columns import streaming, vertical_slash
from masks.patterns.distances import log_sparse
from masks.patterns.sparse_transformer import fixed, strided
from tests.masks.helpers import dense


def test_power_of_two_reaches_everything_earlier():
    """In as many layers as the distance has one bits; `butterfly & causal` never does."""
    reach = dense(masks.power_of_two() & masks.causal(), 64)
    after = np.eye(64, dtype=bool)
    d = np.subtract.outer(np.arange(64), np.arange(64))
    bits = np.vectorize(lambda x: x.bit_count() if x >= 0 else 99)(d)
    for layers in range(1, 7):
        after = (after.astype(int) @ reach) > 0
        assert np.array_equal(after, bits <= layers)


@pytest.mark.parametrize("mask", [strided(8), fixed(8, 1)], ids=str)
def test_two_layers_reach_everything_earlier(mask: masks.Mask):
    once = dense(mask, 64).astype(int)
    assert np.array_equal(once @ once > 0, np.tri(64, dtype=bool))


def test_summaries_of_heads_take_turns():
    mask = fixed(16, 3, vertices=4)
    assert mask.build(100).heads == 4  # after which it repeats
    assert not fixed(16, 3).per_head and fixed(16, 3).build(100, heads=8).heads == 1


def test_log_sparse_golden():
    assert (63 - np.flatnonzero(dense(log_sparse(), 64)[63])).tolist() == [32, 16, 8, 4, 2, 1, 0]
    copied = dense(log_sparse(64), 64)
    assert sorted(63 - np.flatnonzero(copied[63])) == [*range(8), 9, 13, 21, 37]
    assert np.array_equal(copied[:12], np.tri(64, dtype=bool)[:12])
    restart = dense(log_sparse(64, restart=16), 64)
    assert not restart[50, 2] and restart[50, 1] and restart[50, 0]  # 2 is an anchor before 3


@pytest.mark.parametrize("restart", range(2, 40))
def test_log_sparse_signatures_token_by_token(restart: int):
    """Blocks of one or two tokens: signatures that say too little would mix up anchors."""
    mask = log_sparse(5, restart)
    assert (mask >> masks.snap(1, "inward")).build(90, 40, 16) == mask.build(90, 40, 16)
    pairs = dense(mask >> masks.snap((1, 2), "inward"), 90, 40)
    assert np.array_equal(pairs[:, ::2], dense(mask, 90, 40).reshape(90, 20, 2).all(-1))


def test_a_cache_of_516():
    """4 sinks and the 512 newest keys, the query's own among them; nothing of the future."""
    allowed = dense(streaming(4, 512), 600)
    assert allowed[-1].sum() == 516 and not np.triu(allowed, 1).any()
    assert np.flatnonzero(allowed[-1])[4] == 600 - 512
    one_query = dense(streaming(4, 512, align="bottom_right"), 1, 600)
    assert np.array_equal(one_query[0], allowed[-1])


def test_many_lines():
    """A thousand vertical lines and a wide slash over 128K tokens."""
    columns = tuple(range(0, 1 << 17, 131))
    blocks = vertical_slash(columns, tuple(range(64))).build(1 << 17)
    assert blocks.density < 1 and len(blocks.bits) < 4000
