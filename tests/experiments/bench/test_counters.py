"""Counters: what ncu prints, read and compared, and where it cannot run."""

import pytest

from experiments.bench import counters
from experiments.bench.cases import Case

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
    text = counters.report(counters.parse(PRINTED), CASE, "forward", "NVIDIA H200")
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
    assert counters.metrics(str(program))[-1] == "sm__inst_executed_pipe_tensor_op_gmma.sum"
