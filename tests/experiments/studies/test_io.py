"""FLOPs, bytes and time: the model's counts, the counters, the rows and tables."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.bench.cases import DENSE, Case
from experiments.studies import io
from experiments.studies.io import FIGURE_2, traffic, work

SMALL = ["batch=1", "heads=2", "n=128", "head_dim=16", "sparse_n=128"]
SMALL += ["densities=[0.5]", "methods=[standard,flash]"]


def paper(dtype: str = "bfloat16") -> Case:
    batch, heads, n, head_dim = 64, 16, 1024, 64
    return Case(DENSE, batch, heads, heads, n, n, head_dim, dtype, 0, 0)


def test_counts_at_the_shape_of_the_paper():
    pairs = 64 * 16 * 1024**2
    assert work("standard", paper()) == 12 * pairs * 64
    assert work("flash", paper()) == 14 * pairs * 64
    assert traffic("standard", paper()) == 2 * (11 * pairs + 12 * 64 * 16 * 1024 * 64)
    # The published bytes of standard attention have dropout's passes as well, ours their re-reads.
    for method, (_, gb, _) in zip(("standard", "flash"), FIGURE_2.values(), strict=True):
        assert 0.3 < traffic(method, paper()) / 1e9 / gb < 1
    assert traffic("standard", paper("float32")) == 2 * traffic("standard", paper())
    tensors, lse = 4 * 64 * 16 * 1024 * 64 * 2, 64 * 16 * 1024 * 4
    assert traffic("flash", paper()) == 3 * tensors + 2 * lse  # and out, dout and three gradients


def test_a_mask_saves_work_in_proportion():
    sparse = replace(paper(), mask="random_blocks(0.25, block=64)", block_q=64, block_k=64)
    assert work("flash", sparse) == pytest.approx(work("flash", paper()) / 4)
    few = Case("random_blocks(0.1, block=64)", 1, 1, 1, 256, 256, 16, "float32", 64, 64)
    unread = 2 * 2 * 128 * 16 * 4  # k and v, in both passes, of two columns that no row has
    dense = replace(few, mask=DENSE, block_q=0, block_k=0)
    assert traffic("flash", dense) - traffic("flash", few) == unread


def test_longer_sequences_have_as_many_tokens(study):
    words = ["batch=8", "heads=2", "n=1024", "sparse_n=2048"]
    run = study("io", *words, "parts=[sparsity]", "densities=[0.5]")
    rows = [what.row() for what in run.study.cases(run)]
    assert [(r["mask"], r["batch"], r["n"], r["block"]) for r in rows] == [
        (DENSE, 4, 2048, 0), ("random_blocks(0.5, block=64)", 4, 2048, 64),
    ]  # fmt: skip
    assert rows[0]["gflop"] == pytest.approx(2 * rows[1]["gflop"])


def test_counters_are_summed_or_say_why_there_are_none(study, monkeypatch):
    what = (run := study("io", *SMALL, "parts=[shape]")).study.cases(run)[0]
    printed = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","attend","dram__bytes_read.sum","byte","2,000,000,000"
"0","attend","dram__bytes_write.sum","byte","1000000000"
"1","merge","dram__bytes_write.sum","byte","n/a"
"""
    monkeypatch.setattr(io.shutil, "which", lambda *_, **__: "ncu")
    for text, code, found in ((printed, 0, 3.0), (printed, 1, None), ("==ERROR==", 0, None)):
        done = SimpleNamespace(returncode=code, stdout=text, stderr="")
        monkeypatch.setattr(io.subprocess, "run", lambda *_, done=done, **__: done)
        assert io.counted_gb(what) == found
