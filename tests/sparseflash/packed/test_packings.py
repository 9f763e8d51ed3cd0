"""Many packings in one graph against float64: the counterpart on a CPU of that in tests/gpu."""

import pytest
import torch

from tests import packing_cases
from tests.packing_cases import assert_packings, errors_of_packings


@pytest.mark.usefixtures("fresh_dynamo")
def test_random_packings_in_one_graph():
    assert_packings(*errors_of_packings(512, 20, 128, "cpu", "aot_eager", "cpu"), limit=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_wrong_document_is_found(monkeypatch):
    """One token that moves to the document before it."""
    right = packing_cases.packed.documents

    def wrong(cu_seqlens, n, **options):
        moved = cu_seqlens + (cu_seqlens > 0) * (cu_seqlens < cu_seqlens[-1])
        return right(moved, n, **options)

    monkeypatch.setattr(packing_cases.packed, "documents", wrong)
    errors, _ = errors_of_packings(512, 20, 128, "cpu", "eager", "cpu")
    with pytest.raises(AssertionError, match="relative error"):
        assert_packings(errors, 1, limit=1e-5)


@pytest.mark.parametrize("column", range(5))
def test_every_error_counts(column):
    errors = torch.zeros(3, 5)
    assert_packings(errors, 1, limit=1e-5)
    errors[1, column] = 1e-3
    with pytest.raises(AssertionError):
        assert_packings(errors, 1, limit=1e-5)
