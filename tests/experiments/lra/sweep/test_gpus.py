"""The GPUs of a sweep, MPS, and the folders of compiled code."""

import os
from pathlib import Path

import pytest

from experiments.lra.sweep import gpus
from experiments.lra.sweep.gpus import compiler, shared, slots
from experiments.lra.sweep.queue import Queue
from tests.experiments.lra.sweep.stand_in import notes

CONTROL = """#!/bin/sh
echo "$* $CUDA_MPS_PIPE_DIRECTORY ${CUDA_VISIBLE_DEVICES-every}" >> "$CALLS"
[ -n "$1" ] || cat >> "$CALLS"
[ "$BROKEN" != daemon ]
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a stand-in for MPS's control program, whose client works."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(
        gpus, "CLIENT", "import os; exit(os.environ['CUDA_VISIBLE_DEVICES'] != '3')"
    )
    monkeypatch.setattr(gpus, "MPS", tmp_path / "mps")
    monkeypatch.setattr(gpus, "DEFAULT", tmp_path / "default")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "calls"


def test_mps_runs_for_the_block_and_sees_every_gpu(calls, capfd):
    folder = calls.parent / "mps"
    quit = [f" {folder} every", "quit -t 10"]
    start = f"-d {folder} every"
    with shared(["3", "4", "3", "4"]) as environment:
        for what in ("PIPE", "LOG"):
            assert environment[f"CUDA_MPS_{what}_DIRECTORY"] == str(folder)
        assert calls.read_text().splitlines() == [*quit, start]
    assert calls.read_text().splitlines() == [*quit, start, *quit]
    assert "runs share GPUs through MPS" in capfd.readouterr().err


@pytest.mark.parametrize("broken", ["", "daemon"])
def test_sweeps_of_a_machine_share_one_mps_until_the_last_ends(calls, capfd, monkeypatch, broken):
    monkeypatch.setenv("BROKEN", broken)
    first, second, third = (shared(["3", "3"]) for _ in range(3))
    environments = [first.__enter__(), second.__enter__()]
    first.__exit__(None, None, None)
    environments.append(third.__enter__())
    second.__exit__(None, None, None)
    assert calls.read_text().count("-d") == calls.read_text().count("quit") == 1
    third.__exit__(None, None, None)
    assert calls.read_text().count("quit") == 2 and environments == environments[:1] * 3
    how = "by turns, without MPS: nvidia-cuda-mps-control -d ended" if broken else "through MPS"
    assert capfd.readouterr().err.count(f"runs share GPUs {how}") == 3
    with shared(["3", "3"]):
        assert calls.read_text().count("-d") == 2


@pytest.mark.parametrize("told", [False, True])
def test_an_mps_that_runs_already_is_used_as_it_is(calls, capfd, monkeypatch, told):
    folder = calls.parent / ("own" if told else "default")
    folder.mkdir()
    (folder / "control").touch()
    if told:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder))
    with shared(["3", "3"]) as environment:
        assert environment == {}
    assert not calls.exists() and "through the MPS that runs already" in capfd.readouterr().err


@pytest.mark.parametrize("broken", ["none", "daemon", "client"])
def test_without_mps_it_says_why(calls, capfd, monkeypatch, broken):
    reasons = {"none": "No such file", "daemon": "control -d ended with 1", "client": "with 37"}
    monkeypatch.setenv("BROKEN", broken)
    if broken == "none":
        (calls.parent / gpus.CONTROL).unlink()
    if broken == "client":
        monkeypatch.setattr(gpus, "CLIENT", "exit(805)")
    with shared(["3", "3"]) as environment:
        assert environment == {}
    told = capfd.readouterr().err
    assert "runs share GPUs by turns, without MPS: " in told and reasons[broken] in told
    assert broken == "none" or "quit" in calls.read_text()


def test_nothing_is_started_where_nothing_is_shared(calls):
    for places in (["3", "4"], [None, None]):
        with shared(places) as environment:
            assert environment == {} and not calls.exists()


def test_runs_share_compiled_code_and_cores(make, tmp_path, monkeypatch):
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda _: range(7))
    places: list[str | None] = ["0", "0", "1"]
    queue = Queue(make({"a": {}}), places)
    queue.environment = compiler(tmp_path / "compiled", len(places))
    queue.run()
    (told,) = [line for line in notes(tmp_path) if line["event"] == "begin"]
    assert told["compiled"] == [f"{tmp_path}/compiled/{n}" for n in ("inductor", "triton")] + ["2"]
    assert compiler(None, 9) == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def test_slots(monkeypatch):
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert slots(None, 2) == ["4", "6", "4", "6"]
    assert slots([1], 1) == ["6"]
    assert slots(None, 2, 2) == ["4,6", "4,6"]
    assert slots([0], 1, 1) == ["4"]
    with pytest.raises(ValueError, match="processes=3: a run has 2 GPUs"):
        slots(None, 1, 3)
    with pytest.raises(ValueError, match="processes=0: give a whole number"):
        slots(None, 1, 0)
    with pytest.raises(ValueError, match=r"gpus=\[2\]: there are 2 here"):
        slots([0, 2], 1)
    with pytest.raises(ValueError, match="at_once=0"):
        slots(None, 0)
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 0)
    assert slots(None, 1) == slots(None, 1, 2) == [None]
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert slots(None, 1, 2) == ["0,1", "2,3"]
