"""Short runs of the programs that launch random calls, in a process of their own: a hang must not
end the tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparseflash
from tests.gpu import stress as program
from tests.gpu.fuzz import check_calls

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=environment | {"PYTHONPATH": path}, text=True, capture_output=True,
        timeout=900,
    )  # fmt: skip


def stress(*options: str) -> subprocess.CompletedProcess:
    return python("-m", "tests.gpu.stress", *options)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("seed", ["0", "1"])
def test_random_launches_give_the_same_again_and_again(seed, backend):
    options = ["--launches", "200", "--variants", "5", "--jobs", "5", "--seed", seed]
    done = stress("--backend", backend, *options)
    assert done.returncode == 0 and "OK: " in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]


def test_the_program_runs_the_cpu_backend_too(monkeypatch, capsys):
    """In this process: no call on a CPU hangs."""
    words = "--backend cpu --launches 40 --variants 2 --jobs 0 --patience 900"
    monkeypatch.setattr("sys.argv", ["stress", *words.split()])
    monkeypatch.setattr(program, "BURST", 2)
    program.main()
    said = capsys.readouterr().out
    assert "OK: " in said and "problem 4: Case(" in said


def test_a_hang_ends_the_program_and_names_the_case():
    program = """
import time
from tests.processes import Watch
watch = Watch(patience=0.5)
watch.now("problem 6")
watch.now("problem 7")
time.sleep(60)
"""
    done = python("-c", program)
    assert done.returncode == -9 and "HANG" in done.stderr and "problem 7" in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_random_calls_are_right():
    done = python("-m", "tests.gpu.fuzz", "--cases", "60", "--jobs", "4", "--seed", "10000")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_random_calls_on_a_cpu_are_right_and_a_wrong_one_is_told(monkeypatch):
    assert check_calls(range(9), 300, "cpu") == (9, [])
    right = sparseflash.attention

    def wrong(*arguments, **options):
        out, *more = right(*arguments, **options)
        return out * 1.5, *more

    monkeypatch.setattr(sparseflash, "attention", wrong)
    ran, told = check_calls(range(4), 300, "cpu")
    assert ran == 0 and len(told) == 4 and all("AssertionError" in text for text in told)

    def chained(*arguments, **options):
        raise RuntimeError("outer") from ValueError("inner")

    monkeypatch.setattr(sparseflash, "attention", chained)
    assert check_calls(range(1), 300, "cpu")[1][0].endswith("RuntimeError: inner")
