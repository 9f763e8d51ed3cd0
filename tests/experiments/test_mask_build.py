"""The program mask_build from end to end."""

import subprocess
import sys
from pathlib import Path

from experiments.bench.rows import BuildRow
from experiments.common.records import OK, read

ROOT = Path(__file__).resolve().parents[2]


def test_program(tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "experiments.mask_build", f"csv={tmp_path}/m.csv"]
        words = ("seq_len=[1024,2048]", "seconds=0.01", "device=cpu", *words)
        return subprocess.run(
            [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    for _ in range(2):  # what there is already is not measured again
        done = run("mask=[causal,local:256]", "builders=[masks]")
        assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "m.csv", BuildRow)
    assert [(row.mask, row.seq_len, row.status) for row in rows] == [
        (mask, n, OK) for mask in ("causal", "local:256") for n in (1024, 2048)
    ]
    assert "mask=[causal,local:256]" in rows[0].command and "masks ms (MiB)" in done.stdout
    wrong = run("builders=[fast]")
    assert wrong.returncode != 0 and "builders='fast': choose from masks" in wrong.stderr
