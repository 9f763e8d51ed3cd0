"""The training scripts of the guide: they are short, run as files, and learn."""

import os
import re
import subprocess
import sys

import pytest

from experiments.common.provenance import ROOT
from tests.docs.test_guide import BLOCK

GUIDE = ROOT / "docs" / "guide"


def run(*command: object) -> str:
    """What `python command` prints, with one thread and no interpreter of Triton."""
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_trains_a_model_and_the_page_runs(tmp_path):
    script, *rest = BLOCK.findall((GUIDE / "own_model.md").read_text())
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
    path = tmp_path / "train.py"
    path.write_text("\n".join([script, *rest]))
    bits = [float(x) for x in re.findall(r"([\d.]+) bits a byte", run(path))]
    assert len(bits) == 5 and bits[0] > 7.5 and bits[-1] < 4.0


@pytest.mark.slow
def test_two_processes_train_on_one_sequence(tmp_path):
    partition, script = BLOCK.findall((GUIDE / "many_gpus.md").read_text())
    exec(partition.replace("partition.png", str(tmp_path / "partition.png")), {})
    path = tmp_path / "train_long.py"
    path.write_text(script)
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run(*torchrun, path))]
    assert len(losses) == 4 and losses[-1] < 3.0
