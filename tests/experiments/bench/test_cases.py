"""Cases: what a mask allows, its density and its work."""

from dataclasses import fields, replace

import numpy as np
import pytest

from experiments.bench.cases import DENSE, Case
from experiments.bench.run import KEY

CASE = Case(DENSE, 1, 2, 2, 100, 200, 16, "float32", 32, 16)
MASKS = ["local:20+global:10", "random:0.3:seed=1", "causal", "butterfly:16"]


@pytest.mark.parametrize("mask", MASKS)
def test_elements_and_rows_agree_with_the_dense_mask(mask):
    case = replace(CASE, mask=mask)
    dense = case.blocks.to_dense()
    rows = np.array([0, 17, 31, 32, 99])
    assert case.elements == pytest.approx(dense.mean())
    np.testing.assert_array_equal(case.allowed(0, 1, rows), dense[0, -1][rows])


def test_a_mask_of_every_batch_entry_is_for_that_batch():
    case = replace(CASE, mask="documents(((60, 40), (25, 75)))", batch=2, n_k=100)
    rows, dense = np.array([0, 31, 99]), case.blocks.to_dense()
    assert case.elements == pytest.approx((60**2 + 40**2 + 25**2 + 75**2) / (2 * 100**2))
    for batch in (0, 1):
        np.testing.assert_array_equal(case.allowed(batch, 1, rows), dense[batch, 0][rows])
    with pytest.raises(ValueError, match=r"batch is 1, but .* is made for batch=2"):
        _ = replace(case, batch=1).blocks


def test_dense_has_no_blocks_and_everything_allowed():
    assert (CASE.blocks, CASE.density, CASE.elements) == (None, 1.0, 1.0)
    assert CASE.allowed(0, 0, np.array([3, 5])).all()


def test_peers_have_a_causal_kernel_for_squares_alone():
    """They differ in where the diagonal of a rectangle ends."""
    assert replace(CASE, mask="causal()", n_q=200).causal
    assert not replace(CASE, mask="causal()").causal and not replace(CASE, n_q=200).causal


def test_cases_that_differ_are_rows_of_their_own():
    assert {field.name for field in fields(Case)} <= {"mask", *KEY}


def test_only_computed_blocks_count_as_work():
    case = replace(CASE, mask="random:0.25", n_q=256, n_k=256)
    assert case.flops("forward") == 4 * 2 * 256 * 256 * 16 * case.density
    assert case.flops("backward") == 2.5 * case.flops("forward")
    narrow = replace(case, v_dim=8)
    pairs = 2 * 256 * 256 * case.density
    assert narrow.flops("forward") == 2 * pairs * (16 + 8)
    assert narrow.flops("backward") == 2 * pairs * (3 * 16 + 2 * 8)  # scores, dq, dk; dp, dv
