"""Cases and grids: densities, mask rows, overrides and their errors."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.bench.cases import DENSE, Case, block_codes, default_grid, make_grid

CASE = Case(DENSE, 1, 2, 2, 100, 200, 16, "float32", 32, 16)
MASKS = ["local:20+global:10", "random:0.3:seed=1", "causal", "butterfly:16"]


@pytest.mark.parametrize("mask", MASKS)
def test_elements_and_rows_agree_with_the_dense_mask(mask):
    case = replace(CASE, mask=mask)
    dense = case.blocks.to_dense()
    rows = np.array([0, 17, 31, 32, 99])
    assert case.elements == pytest.approx(dense.mean())
    np.testing.assert_array_equal(case.allowed(0, 1, rows), dense[0, -1][rows])
    assert block_codes(case.blocks).shape == (1, 1, 4, 13)


def test_dense_has_no_blocks_and_everything_allowed():
    assert (CASE.blocks, CASE.density, CASE.elements) == (None, 1.0, 1.0)
    assert CASE.allowed(0, 0, np.array([3, 5])).all()


def test_only_computed_blocks_count_as_work():
    case = replace(CASE, mask="random:0.25", n_q=256, n_k=256)
    assert case.flops("forward") == 4 * 2 * 256 * 256 * 16 * case.density
    assert case.flops("backward") == 2.5 * case.flops("forward")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_grids_have_dense_and_halving_densities(device):
    cases = make_grid(device).cases()
    first = [case for case in cases if case.n_q == cases[0].n_q and case.heads == cases[0].heads]
    assert first[0].mask == DENSE and (first[0].block_q, first[0].block_k) == (0, 0)
    assert len(set(cases)) == len(cases)
    assert len({case.n_q for case in cases}) >= 4
    assert {0.5, 0.25, 0.125} <= {case.density for case in first if "random" in case.mask}


def test_a_given_mask_or_length_replaces_the_sweep():
    cases = make_grid("cpu", mask=["local:32", DENSE], seq_len=[128, 256], heads=3).cases()
    assert [(c.mask, c.n_q, c.n_k, c.heads, c.kv_heads) for c in cases] == [
        ("local(32)", 128, 128, 3, 3),
        (DENSE, 128, 128, 3, 3),
        ("local(32)", 256, 256, 3, 3),
        (DENSE, 256, 256, 3, 3),
    ]


def test_a_given_shape_keeps_the_sweep():
    grid = make_grid("cpu", head_dim=32)
    assert {case.head_dim for case in grid.cases()} == {32}
    assert grid.sweep_lengths == default_grid("cpu").sweep_lengths


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": "random:1.5"}, "1.5"),
        ({"mask": "nonsense:3"}, "nonsense"),
        ({"seq_len": 0}, "n_q=0: give a whole number"),
        ({"dtype": "float8"}, "dtype='float8': choose from float32"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"block_size": [1, 2, 3]}, r"block_size=\[1, 2, 3\]: give one size"),
    ],
)
def test_impossible_values_are_refused_with_the_remedy(given, message):
    with pytest.raises(ValueError, match=message):
        make_grid("cpu", **given)


@pytest.mark.parametrize("size", [20, 8, 512])
def test_an_impossible_block_size_is_refused(size):
    case = make_grid("cpu", mask="local:32", seq_len=256, block_size=size).cases()[0]
    with pytest.raises(ValueError, match=f"{size}.*multiples of 16"):
        _ = case.blocks
