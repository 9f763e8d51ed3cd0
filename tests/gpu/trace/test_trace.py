"""The program that watches the attention of a training run, on the CPU with a fault put in."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import sparseflash.backends.cpu as cpu
from tests.gpu.trace.__main__ import main
backward, calls = cpu.Backward.__call__, 0
def faulty(*arguments):
    global calls
    calls += 1
    found = backward(*arguments)
    if calls == int(sys.argv[1]):
        found = found._replace(k=found.k.clone())
        found.k[1, 0, 5] *= 1e6
    return found
cpu.Backward.__call__ = faulty
main(sys.argv[2:])
"""


def run(place: Path, faulty_call: int) -> str:
    overrides = f"""
        task=listops task.generate=true task.max_length=64 task.examples=[64,8,8]
        attention=sparse +attention.backend=cpu scale=full device=cpu batch=4
        model.layers=1 model.dim=16 model.heads=2 model.head_dim=8 model.mlp_dim=16
        steps=30 warmup=1 log_every=30 eval_every=30
        runs={place}/runs cache_dir={place}/cache data_dir={place}
    """.split()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(faulty_call), *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_gradient_that_stands_out_is_found_and_run_again(tmp_path):
    found = run(tmp_path, 27)
    assert "place 1, backward, call 26, cpu" in found
    assert "1 of 512 rows stand out" in found and "[[1, 0]], rows [5]" in found
    (again, *_) = [line for line in found.splitlines() if "again by" in line]
    assert "dq 0, dk" in again and "dv 0" in again and "dk 0," not in again
