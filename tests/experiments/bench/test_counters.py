"""Counters: what ncu prints, read and compared, and where it cannot run."""

import pytest

from experiments.bench import counters
from experiments.bench.cases import Case
from experiments.tools import counters as tool

CASE = Case("dense", 1, 2, 2, 256, 256, 64, "bfloat16", 0, 0)
PRINTED = """==PROF== Connected to process 1
hello
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","attend","gpu__time_duration.sum","ns","2,000"
"0","1","attend","dram__bytes_read.sum","byte","1,000,000"
"0","1","attend","dram__bytes_write.sum","byte","500,000"
"0","1","attend","lts__t_bytes.sum","byte","3000000"
"0","1","attend","sm__inst_executed_pipe_tensor_op.sum","inst","7,000,000"
"0","1","attend","sm__inst_executed_pipe_tensor_fp64.sum","inst","0"
"1","1","merge","gpu__time_duration.sum","ns","500.5"
"1","1","merge","dram__bytes_read.sum","byte","n/a"
"""


def test_what_ncu_prints_is_read():
    kernels = counters.parse(PRINTED)
    assert [name for name, _ in kernels] == ["attend", "merge"]
    assert kernels[0][1]["dram__bytes_read.sum"] == 1e6
    assert kernels[1][1] == {"gpu__time_duration.sum": 500.5}
    assert counters.parse("==ERROR== no permission\n") == []


def test_the_report_compares_with_the_least_cost():
    text = tool.report(counters.parse(PRINTED), CASE, "forward", "NVIDIA H200")
    needed = 4 * 2 * 256 * 64 * 2 + 2 * 256 * 4
    assert f"{1.5e6 / needed:.2f}x" in text
    assert "tensor_op" in text and "fp64" not in text
    assert "2.501" in text and "of the ideal" in text


def test_without_ncu_or_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ValueError, match="no ncu on the PATH: install Nsight Compute"):
        counters.ncu()
    monkeypatch.setattr(counters.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="counters need a CUDA device"):
        counters.under_ncu("m", {}, [])


def test_the_metrics_are_those_of_the_chip(tmp_path):
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho 'sm__inst_executed_pipe_tensor_op_gmma  Counter  warps'\n")
    program.chmod(0o755)
    assert tool.metrics(str(program))[-1] == "sm__inst_executed_pipe_tensor_op_gmma.sum"


def test_the_counters_of_several_calls_are_told_apart(tmp_path, monkeypatch):
    mark = "at::cuda::<unnamed>::spin_kernel(long)"
    kernels = [(mark, {}), ("a", {"x": 1.0}), ("b", {}), (mark, {}), (mark, {}), ("a", {"x": 2.0})]
    assert counters.apart(kernels) == [[("a", {"x": 1.0}), ("b", {})], [], [("a", {"x": 2.0})]]
    asked = []
    monkeypatch.setattr(counters, "under_ncu", lambda *words: asked.append(words) or kernels)
    assert len(counters.each_under_ncu("m", [{"n": 1}, {"n": 2}, {"n": 3}], ["x"])) == 3
    assert asked == [("m", [{"n": 1}, {"n": 2}, {"n": 3}], ["x"])]
    with pytest.raises(ValueError, match="counters of 3 calls instead of 1"):
        counters.each_under_ncu("m", [{}], ["x"])


def test_calls_are_marked_and_a_failure_ends_none(monkeypatch, capsys):
    events = []
    for name in ("profiler.start", "profiler.stop", "synchronize", "_sleep"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, n=name: events.append(n))
    counters.counted_each([lambda: lambda: events.append("call"), lambda: 1 / 0])
    mark = ["profiler.start", "_sleep", "synchronize", "profiler.stop"]
    once = ["call", "synchronize", "profiler.start", "call", "synchronize", "profiler.stop"]
    assert events == [*mark, *once, *mark] and "not counted: division" in capsys.readouterr().err
