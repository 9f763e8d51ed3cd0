"""LogSparse: the definition of the paper, and the mask of the code that is copied around."""

import numpy as np
import pytest

import masks
from masks.patterns.distances import power_of_two
from masks.patterns.log_sparse import log_sparse


def test_paper():
    assert log_sparse() == power_of_two() & masks.causal() == masks.parse("log_sparse")
    dense = log_sparse().build(64, block_size=16).to_dense()[0, 0]
    assert dense.sum() == 64 * 6 + 1
    assert (63 - np.flatnonzero(dense[63])).tolist() == [32, 16, 8, 4, 2, 1, 0]


def test_copied_code():
    dense = log_sparse(64).build(64, block_size=16).to_dense()[0, 0]
    assert dense.sum() == 667
    assert sorted(63 - np.flatnonzero(dense[63])) == [*range(8), 9, 13, 21, 37]
    assert np.array_equal(dense[:12], np.tri(64, dtype=bool)[:12])


def test_restart():
    dense = log_sparse(64, restart=16).build(64, block_size=16).to_dense()[0, 0]
    near = [0, 1, 2, 3, 4, 5, 7, 11]
    offsets = {m + d for m in (0, 16, 32, 48) for d in near}
    assert set(63 - np.flatnonzero(dense[63])) == {d for d in offsets if d <= 63}
    assert np.array_equal(dense[:32], np.tri(64, dtype=bool)[:32])
    assert not dense[50, 2] and dense[50, 1] and dense[50, 0]  # token 2 is an anchor before 3


def test_any_length():
    """The window only says how many queries are dense."""
    short, long = (log_sparse(64, 8).build(n, block_size=16).to_dense()[0, 0] for n in (64, 200))
    assert np.array_equal(short, long[:64, :64])


@pytest.mark.parametrize("restart", range(2, 40))
def test_signatures_token_by_token(restart: int):
    """Blocks of one or two tokens: signatures that say too little would mix up anchors."""
    mask = log_sparse(5, restart)
    assert (mask >> masks.snap(1, "inward")).build(90, 40, 16) == mask.build(90, 40, 16)
    pairs = (mask >> masks.snap((1, 2), "inward")).build(90, 40, 16).to_dense()
    both = mask.build(90, 40, 16).to_dense().reshape(90, 20, 2).all(-1)
    assert np.array_equal(pairs[0, 0, :, ::2], both)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: log_sparse(0), "window is 0"),
        (lambda: log_sparse(1), "restart is 1: give an integer >= 2"),
        (lambda: log_sparse(2**40), "window is 1099511627776: give an integer <= "),
        (lambda: log_sparse(restart=4), "restart is 4 and window None: give the window too"),
    ],
)
def test_errors_name_value_and_remedy(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_million_tokens():
    assert len(log_sparse(1 << 20).build(1 << 20).bits) < 10
