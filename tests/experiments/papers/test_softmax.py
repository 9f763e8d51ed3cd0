"""Safe, online and fused softmax against float64, their accesses, and the program."""

from dataclasses import replace

import pytest
import torch

from experiments.common.records import OK, Records, as_csv, read
from experiments.papers.softmax import blocks, kernels, measure
from experiments.papers.softmax.algorithms import ALGORITHMS
from experiments.papers.softmax.measure import Case, error, make_call
from experiments.papers.softmax.report import by_device, larger_k_table, tables
from experiments.papers.softmax.rows import SoftmaxRow

OWN = ("safe", "online", "safe_topk", "safe_fused", "online_fused")
interpreted = pytest.param(
    "triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
)


def check(implementation, algorithm, x, k):
    y = torch.full_like(x, torch.nan)
    result = measure.IMPLEMENTATIONS[implementation](algorithm, x, y, k)
    right = x.double().softmax(1)
    if ALGORITHMS[algorithm].topk:
        values, indices = result
        best = right.topk(k, 1).values
        assert torch.allclose(values.double(), best, rtol=1e-5, atol=1e-12)
        assert torch.allclose(right.gather(1, indices), best, rtol=1e-5, atol=1e-12)
        assert all(len(row.unique()) == k for row in indices)
    else:
        assert torch.allclose(result.double(), right, rtol=1e-5, atol=1e-12)
    assert error(algorithm, result, x, k) < 1e-5


@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("implementation", [interpreted, "blocks"])
@pytest.mark.parametrize(("batch", "vocabulary", "k"), [(3, 10, 5), (2, 1, 1), (2, 9000, 7)])
def test_against_float64(implementation, algorithm, batch, vocabulary, k):
    x = torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
    check(implementation, algorithm, x, k)


def test_many_rows_in_several_tiles():
    x = torch.randn(150, 5000)
    for algorithm in OWN:
        check("blocks", algorithm, x, 5)


@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("implementation", [interpreted, "blocks"])
def test_hard_rows(implementation, algorithm):
    """Rising numbers, far from 0, equal ones, and -inf in whole blocks."""
    rising = torch.linspace(-3, 3, 9000) + 1000
    ties = torch.zeros(9000)
    empty = torch.full((9000,), -torch.inf)
    empty[-20:] = torch.arange(20.0)
    check(implementation, algorithm, torch.stack([rising, ties - 1e4, empty]), 5)


@pytest.mark.parametrize("algorithm", OWN)
def test_accesses_are_those_of_the_paper(algorithm):
    x, memory = torch.randn(20, 5000), blocks.Memory()
    blocks.run(algorithm, x, torch.empty_like(x), 5, memory)
    assert memory.accesses == ALGORITHMS[algorithm].accesses * x.numel()


def test_peers_are_timed_on_the_same_result():
    x = torch.randn(4, 300)
    for algorithm in ("copy", "torch", "torch_topk"):
        assert error(algorithm, make_call(algorithm, "blocks", x, 3)(), x, 3) < 1e-5
    assert error("online", torch.zeros_like(x), x, 3) == pytest.approx(1.0)
    values, indices = make_call("torch_topk", "blocks", x, 3)()
    assert error("torch_topk", (values, indices + 1), x, 3) > 1e-3
    values[-1] = 0
    assert error("torch_topk", (values, indices), x, 3) > 0.1
    with pytest.raises(ValueError, match="'torch' has no kernel"):
        kernels.run("torch", x, x, 3)
    with pytest.raises(ValueError, match="'torch' is not computed by blocks"):
        blocks.run("torch", x, x, 3)


def test_a_wrong_result_has_no_time_and_is_measured_again(monkeypatch, tmp_path):
    records = Records(tmp_path / "s.csv", SoftmaxRow)
    given = Case(2, 10, 3), ["online"], "blocks", torch.device("cpu"), 1e-4, records, ""
    with monkeypatch.context() as patch:
        patch.setattr(measure, "make_call", lambda name, how, x, k: lambda: torch.zeros_like(x))
        (row,) = measure.run(*given)
    assert row.status.startswith("wrong result: error 1") and row.ms_median is None
    assert by_device([row]) == {}
    (again,) = measure.run(*given)
    assert again.status == OK and len(records.rows) == 2 and by_device([row, again])
    assert Case(2, 10, 3).nbytes == 2 * 2 * 10 * 4
    assert again.gb_s == pytest.approx(3 * 2 * 10 * 4 / again.ms / 1e6)
    assert again.elements_s == pytest.approx(1000 * 2 * 10 / again.ms)


def test_the_safe_softmax_is_not_the_online_one(monkeypatch):
    made, x = [], torch.zeros(1, 4)
    monkeypatch.setattr(kernels, "softmax", lambda x, y, online: made.append(online))
    monkeypatch.setattr(kernels, "top_k", lambda x, k, kind: made.append(kind))
    for algorithm in OWN:
        kernels.run(algorithm, x, x, 2)
    assert made == [False, True, False, "plain", "safe", "online"]


SMALL = "vocabularies=[10,300] batches=[3] seconds=1e-4 device=cpu"


@pytest.mark.parametrize("implementation", [interpreted, "blocks"])
def test_the_program(run_program, one_thread, tmp_path, implementation):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n<!-- rows: softmax {tmp_path.name}/s.csv -->\nold\n<!-- end -->\n")
    words = [f"csv={tmp_path}/s.csv", f"out={tmp_path}/plots", f"pages=[{page}]", *SMALL.split()]
    run = "papers.softmax.__main__", *words, f"implementation={implementation}"
    status, printed, _ = run_program(*run)
    rows = read(tmp_path / "s.csv", SoftmaxRow)
    assert status == 0 and len(rows) == 2 * len(ALGORITHMS)
    assert all(row.status == OK and row.error < 1e-5 for row in rows)
    assert all(row.command.startswith(f"{SoftmaxRow.COMMAND} ") for row in rows)
    assert {row.algorithm: row.accesses for row in rows} == {
        name: algorithm.accesses for name, algorithm in ALGORITHMS.items()
    }
    assert "speed-up of online" in printed and "old" not in page.read_text()
    assert len(list((tmp_path / "plots").glob("*.png"))) == 1
    assert run_program(*run)[0] == 0  # everything is there
    assert len(read(tmp_path / "s.csv", SoftmaxRow)) == len(rows)


def test_several_k(run_program, one_thread, tmp_path):
    """Section 5.2 of the paper: rows of each k, told apart, and a table; k stays below V."""
    words = [f"csv={tmp_path}/s.csv", f"out={tmp_path}", *SMALL.split()]
    status, printed, text = run_program("papers.softmax.__main__", *words, "k=[5,10,30]")
    assert status == 0, text
    rows = read(tmp_path / "s.csv", SoftmaxRow)
    assert [row.k for row in rows if row.algorithm == "online_fused"] == [5, 10, 5, 10, 30]
    assert sum(row.algorithm == "online" for row in rows) == 2  # once a shape, not once a k
    assert all(row.status == OK and row.error < 1e-5 for row in rows)
    lines = larger_k_table(rows)[1:]
    shapes = [("10", "5"), ("10", "10"), ("300", "5"), ("300", "10"), ("300", "30")]
    assert [(line[1], line[2]) for line in lines] == shapes
    assert "speed-up of online" in printed
    five = [row for row in rows if row.k in (0, 5)]
    assert tables(five)["topk"]() == tables(rows)["topk"]()  # the other table is of the first
    assert tables(five)["larger_k"]() == "Not measured yet."


def test_each_device_has_its_tables_and_its_figure(run_program, one_thread, tmp_path):
    page, csv = tmp_path / "page.md", tmp_path / "s.csv"
    page.write_text(f"<!-- rows: softmax {tmp_path.name}/s.csv -->\n<!-- end -->\n")
    words = [f"csv={csv}", f"out={tmp_path}", f"pages=[{page}]"]
    assert run_program("papers.softmax.__main__", *words, *SMALL.split())[0] == 0
    rows, alone = read(csv, SoftmaxRow), page.read_text()
    faster = [replace(row, device="GPU B", ms_median=row.ms_median / 2) for row in rows]
    csv.write_text(as_csv([*rows, *faster], SoftmaxRow))
    status, printed, _ = run_program("papers.softmax.__main__", "measure=false", *words)
    assert status == 0 and printed.count("speed-up of online") == 4
    assert len(list(tmp_path.glob("*.png"))) == 2 and f"{rows[0].device}\n" in printed
    first, second = page.read_text().split("GPU B:\n\n")
    assert first.replace(f"{rows[0].device}:\n\n", "").split() == alone.split()[:-3]
    assert second.count("| 3 |") == 2


def test_the_kernels_need_a_gpu_or_the_interpreter(run_program, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    words = f"csv={tmp_path}/s.csv {SMALL} implementation=triton".split()
    status, _, text = run_program("papers.softmax.__main__", *words)
    assert status == 2 and "needs a GPU, or TRITON_INTERPRET=1" in text
