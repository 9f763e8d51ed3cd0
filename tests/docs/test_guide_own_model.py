"""The training script of the guide: it is short, runs as a file, and learns."""

import os
import re
import subprocess
import sys

import pytest

from experiments.common.provenance import ROOT
from tests.docs.test_guide import BLOCK

PAGE = ROOT / "docs" / "guide" / "own_model.md"


@pytest.mark.slow
def test_the_script_trains_a_model_and_the_page_runs(tmp_path):
    script, *rest = BLOCK.findall(PAGE.read_text())
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
    path = tmp_path / "train.py"
    path.write_text("\n".join([script, *rest]))
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, path],
        env=plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    bits = [float(x) for x in re.findall(r"([\d.]+) bits a byte", done.stdout)]
    assert len(bits) == 5 and bits[0] > 7.5 and bits[-1] < 4.0
