"""Patterns of the distance, and those of single keys: how far layers reach, golden rows, tiles."""

import numpy as np

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


def test_many_lines():
    """A thousand vertical lines and a wide slash over 128K tokens."""
    columns = tuple(range(0, 1 << 17, 131))
    blocks = vertical_slash(columns, tuple(range(64))).build(1 << 17)
    assert blocks.density < 1 and len(blocks.bits) < 4000
