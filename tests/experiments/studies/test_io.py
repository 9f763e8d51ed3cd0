"""FLOPs, bytes and time: the model's counts, the counters, the rows and tables."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.gate import Gate
from experiments.common.rows import frame
from experiments.studies import io
from experiments.studies.io import FIGURE_2, FIGURE_2_SHAPE, Measured, traffic, work
from tests.experiments.studies.conftest import ok

SMALL = ["batch=1", "heads=2", "n=128", "head_dim=16", "sparse_n=128", "sparse_block=32"]
SMALL += ["densities=[0.5]", "methods=[standard,flash]"]


def paper(dtype: str = "bfloat16") -> Case:
    batch, heads, n, head_dim = FIGURE_2_SHAPE.values()
    return Case(DENSE, batch, heads, heads, n, n, head_dim, dtype, 0, 0)


def test_counts_at_the_shape_of_the_paper():
    pairs = 64 * 16 * 1024**2
    assert work("standard", paper()) == 12 * pairs * 64
    assert work("flash", paper()) == 14 * pairs * 64
    assert traffic("standard", paper(), "both") == 2 * (11 * pairs + 12 * 64 * 16 * 1024 * 64)
    # The published bytes of standard attention have dropout's passes as well, ours their re-reads.
    for method, (_, gb, _) in zip(("standard", "flash"), FIGURE_2.values(), strict=True):
        assert 0.3 < traffic(method, paper(), "both") / 1e9 / gb < 1
    assert traffic("standard", paper("float32"), "both") == 2 * traffic("standard", paper(), "both")
    tensors, lse = 4 * 64 * 16 * 1024 * 64 * 2, 64 * 16 * 1024 * 4
    assert traffic("flash", paper(), "forward") == tensors + lse
    row = Measured("shape", "flash", paper()).row()
    counts = [work("flash", paper()), *(traffic("flash", paper(), d) for d in ("both", "forward"))]
    found = row["gflop"], row["model_gb"], row["forward_model_gb"]
    assert found == tuple(x / 1e9 for x in counts)


def test_a_mask_saves_work_in_proportion():
    sparse = replace(paper(), mask="random_blocks(0.25, block=64)", block_q=64, block_k=64)
    assert work("flash", sparse) == pytest.approx(work("flash", paper()) / 4)
    few = Case("random_blocks(0.1, block=64)", 1, 1, 1, 256, 256, 16, "float32", 64, 64)
    unread = 2 * 128 * 16 * 4  # k and v of two of the four columns, which no row has
    dense = replace(few, mask=DENSE, block_q=0, block_k=0)
    assert traffic("flash", dense, "forward") - traffic("flash", few, "forward") == unread


def test_longer_sequences_have_as_many_tokens(study):
    words = ["batch=8", "heads=2", "n=1024", "sparse_n=4096", "sparse_block=64"]
    run = study("io", *words, "parts=[sparsity]", "densities=[0.5]")
    cases = [what.case for what in run.study.cases(run)]
    assert [(c.mask, c.batch, c.n_q, c.block_q) for c in cases] == [
        (DENSE, 2, 4096, 0), ("random_blocks(0.5, block=64)", 2, 4096, 64),
    ]  # fmt: skip


def test_rows_and_tables(measured):
    rows = measured("io", *SMALL)
    assert [row.part for row in rows] == ["shape"] * 2 + ["sparsity"] * 2
    assert ok(rows) and all(row.counted_gb is None for row in rows)
    assert rows[0].saved_mib > 1.5 * rows[1].saved_mib  # P alone is twice q, k, v and out here
    other = rows[0] | {"dtype": "float16", "ms_median": 7770.0}
    made = io.tables(frame([other, *rows]))
    assert made.keys() == {"shape", "sparsity"} and "7,770" not in str(made)
    assert "published (A100) | 66.6 | – | – | – | 40.3" in made["shape"]
    assert "| no mask |" in made["sparsity"] and "faster than dense | ideal" in made["sparsity"]


def test_a_wrong_result_has_no_time(study, one, monkeypatch):
    run = study("io", *SMALL, "parts=[shape]")
    monkeypatch.setattr(Gate, "backward_error", lambda gate, *_: 1.0)
    (row,) = one(run, run.study.cases(run)[0])
    assert row.status.startswith("wrong result: error 1") and row.ms_median is None


def test_counters_are_summed_or_say_why_there_are_none(study, monkeypatch, capsys):
    run = study("io", *SMALL, "parts=[shape]")
    what = run.study.cases(run)[0]
    kernels = [("a", {io.READ: 2e9, io.WRITTEN: 1e9}), ("b", {io.READ: 5e8})]
    monkeypatch.setattr(io, "under_ncu", lambda module, task, names: kernels)
    assert io.counted_gb(what, "both") == 3.5

    def fails(module, task, names):
        raise ValueError("no ncu on the PATH")

    monkeypatch.setattr(io, "under_ncu", fails)
    assert io.counted_gb(what, "both") is None and "no ncu" in capsys.readouterr().out


def test_the_call_that_is_counted_is_that_which_is_timed(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(io.torch, "device", lambda name: cpu)
    case = Case(DENSE, 1, 1, 1, 64, 64, 16, "float32", 0, 0)
    task = {"part": "shape", "method": "standard", "case": vars(case), "direction": "both"}
    assert len(io.prepared(task)()) == 3
