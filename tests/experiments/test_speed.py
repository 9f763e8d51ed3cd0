"""The programs speed, plot and compare from end to end."""

import subprocess
import sys
from pathlib import Path

from experiments.bench.rows import SpeedRow
from experiments.common.records import OK, read

ROOT = Path(__file__).resolve().parents[2]


def test_programs_from_end_to_end(tmp_path):
    """Two commands at a tiny size: CSV and table, then plots."""

    def run(module, *words):
        command = [sys.executable, "-m", f"experiments.{module}", f"csv={tmp_path}/s.csv", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    small = "seq_len=128 heads=1 head_dim=16 block_size=32 device=cpu providers=[cpu,sdpa]".split()
    done = run(
        "speed",
        'mask=[dense,"random:0.5:block=32","random:0.25:block=32",local:32]',
        "seconds=0.01",
        *small,
    )
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "s.csv", SpeedRow)
    assert len(rows) == 10 and {row.status for row in rows} == {OK}
    assert "random:0.5:block=32" in rows[0].command
    assert "random_blocks(0.25" in (tmp_path / "s.txt").read_text()

    compared = run("compare", "own=cpu")
    assert compared.returncode == 0, compared.stderr
    assert "sdpa" in (tmp_path / "s.txt").read_text()
    assert "summary" in (tmp_path / "s-compared.txt").read_text()

    drawn = run("plot", f"out={tmp_path}/plots")
    assert drawn.returncode == 0, drawn.stderr
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.split("-")[0] for name in names] == ["masks.png", "masks.svg"] + ["speedup"] * 2

    wrong = run("speed", "providers=[fast]")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: providers='fast': choose")
