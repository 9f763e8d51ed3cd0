"""The programs speed, plot and compare from end to end."""

import gzip
import subprocess
import sys

import pytest

from experiments.bench.rows import SpeedRow
from experiments.common.files import beside
from experiments.common.provenance import ROOT
from experiments.common.records import OK, read

SPEED = """
    rounds=1
    seq_len=128 heads=1 head_dim=16 block_size=32 device=cpu providers=[cpu,sdpa] seconds=0.01
    mask=[dense,"random:0.5:block=32","random:0.25:block=32",local:32]
""".split()
PROGRAMS = """
    speed selection mask_build lra_speed papers.io papers.accuracy papers.decode papers.memory
    papers.picks papers.packed_masks papers.attention_table papers.term_costs
""".split()


def test_programs_from_end_to_end(tmp_path, run_program):
    """Three commands at a tiny size: CSV and table, comparisons, plots."""
    csv = f"csv={tmp_path}/s.csv"
    command = [sys.executable, "-m", "experiments.speed", csv, *SPEED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "s.csv", SpeedRow)
    assert len(rows) == 10 and {row.status for row in rows} == {OK}
    assert "random:0.5:block=32" in rows[0].command
    table = (tmp_path / "s.txt").read_text()
    assert "random_blocks(0.25" in table and "sdpa" in table
    status, printed, _ = run_program("speed", csv, *SPEED)
    assert status == 0 and printed.count("(measured ") == 10
    assert printed.endswith(f"plots: python -m experiments.plot {csv} out={tmp_path}/plots\n")
    assert run_program("compare", csv, "own=cpu")[0] == 0
    assert "summary" in (tmp_path / "s-compared.txt").read_text()
    assert run_program("plot", csv, f"out={tmp_path}/plots")[0] == 0
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.split("-")[0] for name in names] == ["masks.png", "masks.svg"] + ["speedup"] * 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_table_never_takes_the_place_of_its_rows(tmp_path, run_program, program):
    rows = tmp_path / ("s.txt" if program == "speed" else "s.md")
    status, _, error = run_program(program, f"csv={rows}")
    assert status == 2 and f"csv={rows}: give a path that ends in .csv" in error
    assert not rows.exists()


def test_compressed_rows_have_their_tables_beside_them(tmp_path, run_program):
    rows = tmp_path / "s.csv"
    assert run_program("speed", f"csv={rows}", *SPEED)[0] == 0
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    assert run_program("compare", f"csv={packed}", "own=cpu")[0] == 0
    assert "summary" in (tmp_path / "packed-compared.txt").read_text()
    assert beside(tmp_path / "s-0.5.csv.gz", ".md") == tmp_path / "s-0.5.md"
