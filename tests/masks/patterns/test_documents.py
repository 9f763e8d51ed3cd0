"""Documents: the ways to give them, and blocks with many or few of them."""

import numpy as np
import pytest

from masks.patterns.documents import documents, documents_from_ids, documents_from_offsets
from tests.masks.helpers import dense


@pytest.mark.parametrize("as_array", [list, tuple, np.array])
def test_ways_to_give_documents(as_array):
    mask = documents((3, 5, 8))
    assert documents(as_array([3, 5, 8])) == mask
    assert documents_from_offsets(as_array([0, 3, 8, 16])) == mask
    assert documents_from_ids(as_array([7] * 3 + [9] * 5 + [2] * 8)) == mask
    cross = documents((3, 5, 8), key_lengths=(1, 0, 4))
    assert documents_from_offsets(as_array([0, 3, 8, 16]), as_array([0, 1, 1, 5])) == cross
    assert documents(16) == documents([16]) == documents([[16]])
    rows = documents(as_array([[3, 5], [8, 0]]))
    assert rows.batch == 2 and rows == documents_from_offsets([[0, 3, 8], [0, 8, 8]])


def test_tensors():
    torch = pytest.importorskip("torch")
    assert documents(torch.tensor([3, 5])) == documents((3, 5))
    assert documents_from_ids(torch.tensor([0, 0, 1])) == documents((2, 1))


@pytest.mark.parametrize(
    ("lengths", "block_size"),
    [
        ([16, 8, 16, 16, 16, 16, 8, 48], (48, 16)),  # cut at another token of the query block only
        ([1, 2, 3, 0, 4, 5] * 20, (16, 48)),  # many in a block
    ],
)
def test_cuts_within_blocks(lengths: list[int], block_size: tuple[int, int]):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    blocks = documents(lengths).build(len(ids) - 5, len(ids), block_size)
    assert np.array_equal(blocks.to_dense()[0, 0], ids[:-5, None] == ids)


def test_batch():
    mask = documents([[30, 40], [10, 60, 5]])
    assert mask.batch == 2
    for row, allowed in zip(([30, 40], [10, 60]), mask.build(70).to_dense(), strict=True):
        assert np.array_equal(allowed[0], dense(documents(row), 70))
