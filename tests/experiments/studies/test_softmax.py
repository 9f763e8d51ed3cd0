"""Safe, online and fused softmax against float64, their rows and tables, in the interpreter."""

import pytest
import torch

from experiments.common.rows import frame
from experiments.studies.softmax import ALGORITHMS, TORCH, error, make_call, tables
from tests.experiments.studies.conftest import ok

OWN = [name for name in ALGORITHMS if name not in TORCH]
SMALL = ["vocabularies=[10,300]", "batches=[3]"]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")


def check(algorithm, x, k):
    result = make_call(algorithm, x, k)()
    right = x.double().softmax(1)
    if ALGORITHMS[algorithm].topk:
        values, indices = result
        best = right.topk(k, 1).values
        assert torch.allclose(values.double(), best, rtol=1e-5, atol=1e-12), algorithm
        assert torch.allclose(right.gather(1, indices), best, rtol=1e-5, atol=1e-12)
        assert all(len(row.unique()) == k for row in indices)
    else:
        assert torch.allclose(result.double(), right, rtol=1e-5, atol=1e-12), algorithm
    assert error(algorithm, result, x, k) < 1e-5


def test_against_float64():
    for batch, vocabulary, k in [(3, 10, 5), (2, 1, 1), (2, 9000, 7)]:
        x = torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
        for algorithm in OWN:
            check(algorithm, x, k)


def test_hard_rows():
    """Rising numbers, far from 0, equal ones, and -inf in whole blocks."""
    rising = torch.linspace(-3, 3, 9000) + 1000
    ties = torch.zeros(9000)
    empty = torch.full((9000,), -torch.inf)
    empty[-20:] = torch.arange(20.0)
    for algorithm in OWN:
        check(algorithm, torch.stack([rising, ties - 1e4, empty]), 5)


def test_the_error_sees_wrong_results_and_peers_are_timed_on_the_same():
    x = torch.randn(4, 300)
    for algorithm in TORCH:
        assert error(algorithm, make_call(algorithm, x, 3)(), x, 3) < 1e-5
    assert error("online", torch.zeros_like(x), x, 3) == pytest.approx(1.0)
    values, indices = make_call("torch_topk", x, 3)()
    assert error("torch_topk", (values, indices + 1), x, 3) > 1e-3
    values[-1] = 0
    assert error("torch_topk", (values, indices), x, 3) > 0.1


def test_several_k_and_devices_have_tables_of_their_own(measured):
    """Section 5.2 of the paper: rows of each k, told apart, and a table; k stays below V."""
    rows = measured("softmax", *SMALL, "k=[5,10,30]")
    assert [row.k for row in rows if row.algorithm == "online_fused"] == [5, 10, 5, 10, 30]
    assert sum(row.algorithm == "online" for row in rows) == 2 and ok(rows)
    row = next(r for r in rows if r.algorithm == "online")
    assert row.gb_s == pytest.approx(3 * 3 * 10 * 4 / row.ms_median / 1e6, rel=1e-4)
    made = tables(frame(rows))
    lines = [line.split(" | ")[1:3] for line in made["larger_k"].splitlines()[2:]]
    assert lines == [["10", "5"], ["10", "10"], ["300", "5"], ["300", "10"], ["300", "30"]]
    five = tables(frame([row for row in rows if row.k in (0, 5)]))
    assert five["topk"] == made["topk"] and "larger_k" not in five
    other = [row | {"device": "GPU B", "ms_median": row.ms_median / 2} for row in rows]
    both = tables(frame([*rows, *other]))["softmax"]
    assert both.split("GPU B:\n\n")[0].endswith(f"{made['softmax']}\n\n")


def test_a_cpu_alone_is_refused(study, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs a GPU, or TRITON_INTERPRET=1"):
        study("softmax").go()
