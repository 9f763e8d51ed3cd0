"""Patterns of the distance, and those of single keys: golden rows, signatures, tiles."""

import numpy as np
import pytest

import masks
from masks.patterns.columns import vertical_slash
from masks.patterns.distances import log_sparse
from tests.masks.helpers import dense


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


def test_many_lines():
    """A thousand vertical lines and a wide slash over 128K tokens."""
    columns = tuple(range(0, 1 << 17, 131))
    blocks = vertical_slash(columns, tuple(range(64))).build(1 << 17)
    assert blocks.density < 1 and len(blocks.bits) < 4000
