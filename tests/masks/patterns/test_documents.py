"""Documents: the ways to give them, and blocks with many or few of them."""

import numpy as np
import pytest

from masks.patterns.documents import documents, documents_from_ids, documents_from_offsets


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
