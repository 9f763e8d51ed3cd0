"""Grids: densities, the named grid, given values and their errors."""

import pytest
import torch

from experiments.bench import grids
from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.grids import default_grid, make_grid
from tests.experiments.bench.bench_cases import CPU, limits

CUDA = torch.device("cuda")


def test_limits_holds_every_comparison(monkeypatch):
    tasks = limits(monkeypatch, CUDA)
    assert len(set(tasks)) == len(tasks) < 300
    for head_dim in (128, 64):
        wide = {t for t in tasks if t.case.head_dim == head_dim and t.case.n_q == 16384}
        masks = {t.case.mask for t in wide if t.case.block_q in (0, 128)}
        assert {DENSE, CAUSAL, *(f"random_blocks({d})" for d in grids.DENSITIES)} <= masks
        assert {16, 32, 64, 128} <= {t.case.block_q for t in wide}
        cudnn = {t.case.mask for t in wide if t.provider == "sdpa_cudnn"}
        assert cudnn == {DENSE, CAUSAL}
    deterministic = [t for t in tasks if t.provider == "hopper_deterministic"]
    assert deterministic and {t.direction for t in deterministic} == {"backward"}
    long = {t.case for t in tasks if t.case.n_q >= 262144}
    assert {c.n_q for c in long} == {262144, 1048576} and all(c.density < 0.01 for c in long)


def test_masks_of_the_grid_have_the_text_that_rows_have(monkeypatch):
    for case in {t.case for t in limits(monkeypatch, CPU)}:
        made = make_grid("cpu", mask=case.mask, seq_len=case.n_q).cases()[0]
        assert made.mask == case.mask


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
        (mask, n, n, 3, 3) for n in (128, 256) for mask in ("local(32)", DENSE)
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
        ({"layout": "up"}, "layout='up': choose from head_major, token_major"),
        ({"v_dim": -1}, "v_dim=-1: give a whole number"),
        ({"seq_len": 0}, "seq_len=0: give a whole number"),
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
