"""Safe, online and fused softmax against float64, their accesses, rows and tables."""

import pytest
import torch

from experiments.common.rows import frame
from experiments.studies import softmax, softmax_kernels
from experiments.studies.softmax import ALGORITHMS, TORCH, Blocks, Case, error, make_call, tables
from tests.experiments.studies.conftest import ok

OWN = [name for name in ALGORITHMS if name not in TORCH]
interpreted = pytest.param(
    "triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
)
SMALL = ["vocabularies=[10,300]", "batches=[3]"]


def check(implementation, algorithm, x, k):
    result = make_call(algorithm, implementation, x, k)()
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


@pytest.mark.parametrize("implementation", [interpreted, "blocks"])
def test_against_float64(implementation):
    shapes = [(3, 10, 5), (2, 1, 1), (2, 9000, 7)]
    for batch, vocabulary, k in [*shapes, *[(150, 5000, 5)] * (implementation == "blocks")]:
        x = torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
        for algorithm in OWN:
            check(implementation, algorithm, x, k)


@pytest.mark.parametrize("implementation", [interpreted, "blocks"])
def test_hard_rows(implementation):
    """Rising numbers, far from 0, equal ones, and -inf in whole blocks."""
    rising = torch.linspace(-3, 3, 9000) + 1000
    ties = torch.zeros(9000)
    empty = torch.full((9000,), -torch.inf)
    empty[-20:] = torch.arange(20.0)
    for algorithm in OWN:
        check(implementation, algorithm, torch.stack([rising, ties - 1e4, empty]), 5)


def test_accesses_are_those_of_the_paper():
    for algorithm in OWN:
        x = torch.randn(20, 5000)
        blocks = Blocks(x, 5)
        blocks.run(algorithm, torch.empty_like(x))
        assert blocks.accesses == ALGORITHMS[algorithm].accesses * x.numel(), algorithm


def test_the_error_sees_wrong_results_and_peers_are_timed_on_the_same():
    x = torch.randn(4, 300)
    for algorithm in TORCH:
        assert error(algorithm, make_call(algorithm, "blocks", x, 3)(), x, 3) < 1e-5
    assert error("online", torch.zeros_like(x), x, 3) == pytest.approx(1.0)
    values, indices = make_call("torch_topk", "blocks", x, 3)()
    assert error("torch_topk", (values, indices + 1), x, 3) > 1e-3
    values[-1] = 0
    assert error("torch_topk", (values, indices), x, 3) > 0.1


def test_the_safe_softmax_is_not_the_online_one(monkeypatch):
    made, x = [], torch.zeros(1, 4)
    monkeypatch.setattr(softmax_kernels, "softmax", lambda x, y, online: made.append(online))
    monkeypatch.setattr(softmax_kernels, "top_k", lambda x, k, kind: made.append(kind))
    for algorithm in OWN:
        softmax_kernels.run(algorithm, x, x, 2)
    assert made == [False, True, False, "plain", "safe", "online"]


@pytest.mark.parametrize("implementation", [interpreted, "blocks"])
def test_rows(measured, implementation):
    rows = measured("softmax", *SMALL, f"implementation={implementation}")
    assert len(rows) == 2 * len(ALGORITHMS) and ok(rows)
    accesses = {row.algorithm: row.accesses for row in rows}
    assert accesses == {name: algorithm.accesses for name, algorithm in ALGORITHMS.items()}
    row = next(r for r in rows if r.algorithm == "online")
    assert row.gb_s == pytest.approx(3 * 3 * 10 * 4 / row.ms_median / 1e6, rel=1e-4)
    assert Case(2, 10, 3).nbytes == 2 * 2 * 10 * 4


def test_several_k_and_devices_have_tables_of_their_own(measured):
    """Section 5.2 of the paper: rows of each k, told apart, and a table; k stays below V."""
    rows = measured("softmax", *SMALL, "k=[5,10,30]")
    assert [row.k for row in rows if row.algorithm == "online_fused"] == [5, 10, 5, 10, 30]
    assert sum(row.algorithm == "online" for row in rows) == 2 and ok(rows)
    made = tables(frame(rows))
    lines = [line.split(" | ")[1:3] for line in made["larger_k"].splitlines()[2:]]
    assert lines == [["10", "5"], ["10", "10"], ["300", "5"], ["300", "10"], ["300", "30"]]
    five = tables(frame([row for row in rows if row.k in (0, 5)]))
    assert five["topk"] == made["topk"] and "larger_k" not in five
    other = [row | {"device": "GPU B", "ms_median": row.ms_median / 2} for row in rows]
    both = tables(frame([*rows, *other]))["softmax"]
    assert both.split("GPU B:\n\n")[0].endswith(f"{made['softmax']}\n\n")
    figures = softmax.figures(frame([*rows, *other]))
    assert len(figures) == 2 and len(figures["softmax-gpu-b"].axes) == 2
    alone = softmax.figures(frame([row for row in rows if row.k]))
    assert len(next(iter(alone.values())).axes) == 1  # no panel without points


def test_refusals(study, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for words, message in (
        ("implementation=triton", "needs a GPU, or TRITON_INTERPRET=1"),
        ("algorithms=[onlin]", "did you mean online"),
        ("limit_gib=1e-9", "nothing to measure"),
    ):
        with pytest.raises(ValueError, match=message):
            study("softmax", words).go()
