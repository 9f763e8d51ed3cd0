"""FLOPs, bytes and time: the model's counts, the gate, the rows, the table and the figure."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.timing import Times
from experiments.common.provenance import ROOT
from experiments.common.records import OK, read
from experiments.papers.attention import io_report, io_run
from experiments.papers.attention.io_report import named, tables
from experiments.papers.attention.io_run import Counts, Measured, measured, plan, traffic, work
from experiments.papers.attention.published import FIGURE_2, FIGURE_2_SHAPE
from experiments.papers.attention.rows import IoRow

SMALL = "batch=1 heads=2 n=128 head_dim=16 sparse_n=128 sparse_block=32 blocks=[16,32]".split()
SMALL += ["densities=[0.5]", "device=cpu", "seconds=1e-3", "methods=[standard,flash]"]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")


def paper(dtype: str = "bfloat16") -> Case:
    shape = FIGURE_2_SHAPE
    n, heads = shape["n"], shape["heads"]
    return Case(DENSE, shape["batch"], heads, heads, n, n, shape["head_dim"], dtype, 0, 0)


def test_counts_at_the_shape_of_the_paper():
    pairs = 64 * 16 * 1024**2
    assert work("standard", paper()) == 12 * pairs * 64
    assert work("flash", paper()) == 14 * pairs * 64
    assert traffic("standard", paper(), "both") == 2 * (11 * pairs + 12 * 64 * 16 * 1024 * 64)
    # The published bytes of standard attention have dropout's passes as well, ours their re-reads.
    assert 0.5 < traffic("standard", paper(), "both") / 1e9 / FIGURE_2["standard"].hbm_gb < 1
    assert 0.3 < traffic("flash", paper(), "both") / 1e9 / FIGURE_2["flash"].hbm_gb < 1
    assert traffic("standard", paper("float32"), "both") == 2 * traffic("standard", paper(), "both")
    tensors, lse = 4 * 64 * 16 * 1024 * 64 * 2, 64 * 16 * 1024 * 4
    assert traffic("flash", paper(), "forward") == tensors + lse


def test_a_mask_saves_work_in_proportion():
    sparse = replace(paper(), mask="random_blocks(0.25, block=64)", block_q=64, block_k=64)
    assert work("flash", sparse) == pytest.approx(work("flash", paper()) / 4)
    few = Case("random_blocks(0.1, block=64)", 1, 1, 1, 256, 256, 16, "float32", 64, 64)
    unread = 2 * 128 * 16 * 4  # k and v of two of the four columns, which no row has
    dense = replace(few, mask=DENSE, block_q=0, block_k=0)
    assert traffic("flash", dense, "forward") - traffic("flash", few, "forward") == unread


def test_a_row_has_the_counts_in_their_units():
    for method in ("standard", "flash"):
        row = Measured("shape", method, paper()).row(CPU, "")
        counts = [traffic(method, paper(), direction) for direction in ("both", "forward")]
        found = row.gflop, row.model_gb, row.forward_model_gb
        assert found == tuple(x / 1e9 for x in (work(method, paper()), *counts))


def test_longer_sequences_have_as_many_tokens():
    shape = {"batch": 8, "heads": 2, "n": 1024, "head_dim": 16, "dtype": "float32"}
    options = {"blocks": [32], "density": 0.25, "densities": [0.5], "sparse_n": 4096}
    block, dense, sparse = plan(["block", "sparsity"], [], shape, options | {"sparse_block": 64})
    assert block.case.mask == "random_blocks(0.25, block=32)"
    assert sparse.case.mask == "random_blocks(0.5, block=64)" and dense.case.mask == DENSE
    shapes = [
        (case.batch, case.n_q, case.block_q) for case in (block.case, dense.case, sparse.case)
    ]
    assert shapes == [(8, 1024, 32), (2, 4096, 0), (2, 4096, 64)]


def test_forward_and_backward_are_timed_together(monkeypatch):
    timed = []
    monkeypatch.setattr(
        io_run, "time_call", lambda call, *_: timed.append(call()) or Times(1.0, 1.0, 1.0)
    )
    what = Measured("shape", "standard", Case(DENSE, 1, 1, 1, 64, 64, 16, "float32", 0, 0))
    counts = SimpleNamespace(gb=lambda what, direction: {"both": 3.0, "forward": 1.0}[direction])
    row = measured(what, what.row(CPU, ""), CPU, 1e-3, counts)  # type: ignore[arg-type]
    assert (row.counted_gb, row.forward_counted_gb) == (3.0, 1.0)
    assert [len(gradients) for gradients in timed] == [3]


def test_the_compiled_method_is_compiled(monkeypatch):
    monkeypatch.setattr(io_run, "compiled", lambda made, device: "compiled")
    case = Case(DENSE, 1, 1, 1, 64, 64, 16, "float32", 0, 0)
    assert Measured("shape", "compiled", case).step(CPU).attend == "compiled"


def test_program(tmp_path, measured_once):
    rows, printed, later = measured_once("papers.io", IoRow, *SMALL, f"plots={tmp_path}")
    assert [row.part for row in rows] == ["shape"] * 2 + ["block"] * 2 + ["sparsity"] * 2
    assert all(row.status == OK and row.error < 1e-4 and row.counted_gb is None for row in rows)
    other = replace(rows[0], dtype="float16", n=64, ms_median=7770.0)
    assert "7,770" in tables([other]) and "7,770" not in tables([other, *rows])
    standard, ours = rows[:2]
    # P alone is twice q, k, v and out here
    assert standard.saved_mib > 1.5 * ours.saved_mib
    assert "published (A100)" in printed and "40.3" in printed
    assert len(list(tmp_path.glob("io-*.png"))) == 1
    assert later.lstrip().startswith(tables(rows)[:60])


def test_what_fails_is_a_row(monkeypatch):
    what = Measured("shape", "standard", replace(paper("float32"), batch=1, n_q=128, n_k=128))
    row = what.row(CPU, "")
    monkeypatch.setattr(io_run, "gate_error", lambda gate, step: 1.0)
    assert measured(what, row, CPU, 1e-3).status.startswith("wrong result: error 1")
    huge = Measured("shape", "standard", replace(paper("float32"), n_q=2**20, n_k=2**20))
    assert measured(huge, row, CPU, 1e-3).status.startswith("out of memory: needs about")


def test_sparsity_is_not_filled_with_another_table():
    rows = read(ROOT / "docs/results/h200/io.csv", IoRow)
    found = named(rows)
    text = found["sparsity"]()
    assert text.splitlines()[0].count("|") == text.splitlines()[2].count("|")
    assert "faster than dense | ideal" in text and "| no mask |" in text
    assert text != found["block"]()


def test_points_of_nearly_one_time_lie_inside_the_axes(monkeypatch, tmp_path):
    rows = read(ROOT / "docs/results/cpu/io.csv", IoRow)
    rows = [replace(row, ms_median=2 + row.block / 1e6) for row in rows if row.block]
    figures = []
    monkeypatch.setattr(io_report, "save", lambda figure, stem, **_: figures.append(figure) or [])
    io_report.draw(rows, tmp_path)
    left, right, _ = figures[0].axes
    for axes in (left, right):
        assert axes.get_ylim() == pytest.approx((0, 2.2), abs=1e-3)


def test_the_points_of_the_figure_are_those_of_the_rows(monkeypatch, tmp_path):
    rows = read(ROOT / "docs/results/h200/io.csv", IoRow)
    figures = []
    monkeypatch.setattr(io_report, "save", lambda figure, stem, **_: figures.append(figure) or [])
    io_report.draw(rows, tmp_path)
    rows = io_report.newest(rows)
    blocks = {row.block: row for row in rows if row.part == "block"}
    sparse = {100 - 100 * (r.density or 0): r for r in rows if r.part == "sparsity" and r.block}
    wanted = {n: row.ms for n, row in blocks.items()}, {x: row.ms for x, row in sparse.items()}
    wanted += ({n: row.counted_gb for n, row in blocks.items()},)
    for axes, points in zip(figures[0].axes, wanted, strict=True):
        x, y = axes.lines[0].get_data()
        assert dict(zip(x, y, strict=True)) == pytest.approx(points)


def test_the_table_names_every_version_of_torch():
    rows = read(ROOT / "docs/results/cpu/io.csv", IoRow)
    rows = [replace(row, torch=f"2.{10 + i % 2}") for i, row in enumerate(rows)]
    assert ", torch 2.10, 2.11.\n" in tables(rows)


def test_one_process_counts_all(monkeypatch):
    kernels = [("a", {io_run.READ: 2e9, io_run.WRITTEN: 1e9}), ("b", {io_run.READ: 5e8})]
    first, second = Measured("shape", "flash", paper()), Measured("block", "flash", paper())
    asked = []

    def each(module, tasks, names):
        asked.append([(task["part"], task["direction"]) for task in tasks])
        return [kernels, kernels[:1], []]

    monkeypatch.setattr(io_run, "each_under_ncu", each)
    counts = Counts([first, second])
    assert not asked  # the process starts when it is needed
    assert counts.gb(first, "both") == 3.5 and counts.gb(first, "forward") == 3.0
    assert counts.gb(second, "both") is None and counts.gb(second, "forward") is None
    assert asked == [[("shape", "both"), ("shape", "forward"), ("block", "both")]]


def test_counts_one_by_one_where_one_process_fails(monkeypatch, capsys):
    first, second = Measured("block", "flash", paper()), Measured("block", "standard", paper())
    asked = []

    def each(module, tasks, names):
        asked.append(len(tasks))
        if len(tasks) > 1 or tasks[0]["method"] == "standard":
            raise ValueError("ncu gave counters of 3 calls instead of 2")
        return [[("a", {io_run.READ: 1e9})]]

    monkeypatch.setattr(io_run, "each_under_ncu", each)
    counts = Counts([first, second])
    assert counts.gb(first, "both") == 1.0 and counts.gb(second, "both") is None
    assert counts.gb(second, "both") is None and asked == [2, 1, 1]  # refused once, then left
    assert "no counters: ncu gave" in capsys.readouterr().out


def test_a_cpu_counts_nothing(capsys):
    if not torch.cuda.is_available():
        assert (
            Counts([Measured("shape", "flash", paper())]).gb(
                Measured("shape", "flash", paper()), "both"
            )
            is None
        )
        assert "counters need a CUDA device" in capsys.readouterr().out
