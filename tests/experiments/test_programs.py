"""A bad option ends in one line that names the option or its value, and exit status 2."""

import shlex
import subprocess
import sys

import pytest
import torch

from experiments.common.provenance import ROOT
from experiments.common.rows import OK, Rows, read
from tests.experiments.bench.bench_cases import ROW

BAD = """
speed rows=rows.csv
speed heads=1.5
speed device=cuda
speed providers=[cpu,no_module:Mine]
speed grid=all
speed heads=3 grid=page
speed mask=causal block_size=24
plot rows=none.jsonl
pathfinder.__main__ size=33
lm.__main__ data=none
""".strip().split("\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_bad_option_is_one_line(run_program, tmp_path):
    for command in BAD:
        module, *words = shlex.split(command)
        if module == "speed" and "rows=" not in command:
            words.insert(0, f"rows={tmp_path}/rows.jsonl")
        status, _, error = run_program(module, *words)
        error = error[error.find("error: ") :]  # after a warning that the machine is busy
        name, _, value = words[-1].lstrip("+").partition("=")
        assert status == 2 and error.startswith("error: ") and error.count("\n") == 1, command
        assert name in error or value.strip("[]").partition(":")[0] in error, (command, error)
    assert not [*tmp_path.iterdir()]


def test_a_misspelt_group_or_study_is_named(run_program):
    for words, expected in (("train taks=text", "mean task?"), ("study nam=io", "name=None")):
        status, _, error = run_program(*words.split())
        assert status == 2 and expected in error


# ---- speed and plot, from end to end

SPEED = """
    rounds=1
    seq_len=128 heads=1 head_dim=16 block_size=32 device=cpu providers=[cpu,sdpa] seconds=0.01
    mask=[dense,"random:0.5:block=32","random:0.25:block=32",local:32]
""".split()


def test_programs_from_end_to_end(tmp_path, run_program):
    """Rows and table, and plots, at a tiny size."""
    rows = f"rows={tmp_path}/s.jsonl"
    command = [sys.executable, "-m", "experiments.speed", rows, *SPEED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "s.jsonl")
    assert len(found) == 10 and {row["status"] for row in found} == {OK}
    assert "random:0.5:block=32" in found[0]["command"]
    table = (tmp_path / "s.txt").read_text()
    assert "random_blocks(0.25" in table and "sdpa" in table
    status, printed, _ = run_program("speed", rows, *SPEED)
    assert status == 0 and len(read(tmp_path / "s.jsonl")) == 10
    assert printed.endswith(f"plots: python -m experiments.plot {rows} out={tmp_path}/plots\n")
    assert run_program("plot", rows, f"out={tmp_path}/plots")[0] == 0
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.split("-")[0] for name in names] == ["speedup"] * 2


def test_plot_says_what_it_lacks_and_leaves_out(tmp_path, run_program):
    rows = Rows(tmp_path / "s.jsonl")
    words = (f"rows={rows.path}", f"out={tmp_path}/plots")
    rows.append(ROW | {"status": "failed: x"})
    assert run_program("plot", *words)[0] == 2
    for number, ms in enumerate((1.0, 2.0), 1):
        rows.append(ROW | {"round": number, "ms_median": ms})
    status, printed, _ = run_program("plot", *words)
    assert status == 0 and "differ by more than 15 % in 1 of the cells: drawn" in printed
    assert "no plot" in printed and not (tmp_path / "plots").exists()
    assert run_program("plot", *words, "unstable=false")[0] == 2
