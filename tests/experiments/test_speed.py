"""The programs speed and plot from end to end."""

import subprocess
import sys

from experiments.common.provenance import ROOT
from experiments.common.rows import OK, Rows, read
from tests.experiments.bench.bench_cases import ROW

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
    assert status == 0 and printed.count("(measured ") == 10
    assert printed.endswith(f"plots: python -m experiments.plot {rows} out={tmp_path}/plots\n")
    assert run_program("plot", rows, f"out={tmp_path}/plots")[0] == 0
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.split("-")[0] for name in names] == ["masks.png", "masks.svg"] + ["speedup"] * 2


def test_plot_says_what_it_lacks_and_leaves_out(tmp_path, run_program):
    rows = Rows(tmp_path / "s.jsonl")
    words = (f"rows={rows.path}", f"out={tmp_path}/plots")
    rows.append(ROW | {"status": "failed: x"})
    status, _, error = run_program("plot", *words)
    assert status == 2 and "has no time" in error
    for number, ms in enumerate((1.0, 2.0), 1):
        rows.append(ROW | {"round": number, "ms_median": ms})
    status, printed, _ = run_program("plot", *words)
    assert status == 0 and "differ by more than 15 % in 1 of the cells: drawn" in printed
    assert run_program("plot", *words, "unstable=false")[0] == 2
    status, _, error = run_program("plot", *words, "triton=3.7.1")
    assert status == 2 and "triton=3.7.1" in error
