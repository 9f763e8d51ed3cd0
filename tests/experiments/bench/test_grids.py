"""Grids: densities, the named grid, given values and their errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.bench import provider
from experiments.bench.cases import DENSE
from experiments.bench.peers import cudnn
from experiments.bench.run import make_grid, read_grid

CUDA = torch.device("cuda")


def test_published_shapes_are_those_of_the_peers(monkeypatch):
    monkeypatch.setattr(provider, "why_missing", lambda *_: None)
    cases = [case for case, _ in read_grid("published", CUDA)]
    assert len(set(cases)) == len(cases)
    for case in cases:
        if case.mask.startswith("random"):
            assert case.head_dim == 128 and "per_head=True" in case.mask
            assert not case.n_q % case.block_q  # whole blocks only
    long = [c for c in cases if c.n_q == 131072]
    assert {(c.heads, c.batch, c.layout) for c in long} == {(4, 1, "token_major")}
    widths = [cudnn.intervals(case).shape[1] for case in long]
    assert widths == [1, 3, 3, 3, 9, 19, 5]  # as in cuDNN's benchmark, but the tree of five levels
    for case in long:  # they fill the sequence
        assert np.diff(replace(case, heads=1, kv_heads=1).blocks.csr().ptr).min() > 0


def test_grids_have_dense_and_halving_densities_and_take_given_values():
    for device in ("cpu", "cuda"):
        cases = make_grid(device)
        shape = cases[0].n_q, cases[0].heads
        first = [case for case in cases if (case.n_q, case.heads) == shape]
        assert first[0].mask == DENSE and (first[0].block_q, first[0].block_k) == (0, 0)
        assert len(set(cases)) == len(cases) and len({case.n_q for case in cases}) >= 4
        assert {0.5, 0.25, 0.125} <= {case.density for case in first if "random" in case.mask}
    # a mask or a length replaces the sweep, a shape keeps it
    cases = make_grid("cpu", mask=["local:32", DENSE], seq_len=[128, 256], heads=3)
    assert [(c.mask, c.n_q, c.n_k, c.heads, c.kv_heads) for c in cases] == [
        (mask, n, n, 3, 3) for n in (128, 256) for mask in ("local(32)", DENSE)
    ]
    (case,) = make_grid("cpu", mask=[DENSE], seq_len=[128], n_q=1)
    assert (case.n_q, case.n_k) == (1, 128)
    cases = make_grid("cpu", head_dim=32)
    assert {case.head_dim for case in cases} == {32}
    assert {case.n_q for case in cases} == {case.n_q for case in make_grid("cpu")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": ["random:1.5"]}, "1.5"),
        ({"mask": ["nonsense:3"]}, "nonsense"),
        ({"layout": "up"}, "layout='up': choose from head_major, token_major"),
        ({"v_dim": -1}, "v_dim=-1"),
        ({"seq_len": [0]}, "n_q=0"),
        ({"dtype": "float8"}, "dtype='float8': choose from float32"),
        ({"heads": 4, "kv_heads": 3}, "heads=4.*kv_heads=3"),
        ({"block_size": [1, 2, 3]}, r"block_size=\[1, 2, 3\]: give one size"),
    ],
)
def test_impossible_values_are_refused_with_the_remedy(given, message):
    with pytest.raises(ValueError, match=message):
        make_grid("cpu", **given)
