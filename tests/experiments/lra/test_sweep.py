"""Sweeps: what their runs are, in what order they run, how they stop and continue."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments import sweep
from experiments.lra import sweep_queue
from experiments.lra.sweep_queue import Queue
from experiments.lra.sweep_runs import SweepRun, sweep_runs
from experiments.lra.training.clock import Interrupted
from tests.experiments.lra.training.cases import overrides

ROOT = Path(__file__).resolve().parents[3]
SWEEPS = ROOT / "experiments/conf/sweep"
# Stands in for experiments.train: notes when it begins and ends, and completes its run.
TRAIN = """
import json, os, sys, time
from pathlib import Path
place = Path(sys.argv[1])
given = dict(x.split("=", 1) for x in sys.argv[2:])
name, data = given["name"], given.get("data_only") == "true"
def note(event):
    line = {"run": name, "event": ("data " if data else "") + event, "at": time.monotonic()}
    line |= {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "minutes": given.get("minutes")}
    with open(place / "notes", "a") as file: file.write(json.dumps(line) + "\\n")
note("begin")
print("hello", flush=True)
time.sleep(float(given.get("eps", 0)))
note("end")
if name + data * " data" in os.environ.get("BROKEN", "").split(","): sys.exit(1)
if not data:
    folder = Path(json.loads((place / "folders").read_text())[name])
    folder.mkdir(parents=True)
    about = dict(accuracy=0.5, pretrain=None, baselines={}, steps=1, planned_steps=1, seconds=1)
    about |= dict(ms_per_step=1, scale="small", complete=True)
    (folder / "result.json").write_text(json.dumps(about))
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs of a sweep whose processes are stand-ins, none of them at work after the test."""
    monkeypatch.setattr(sweep_queue, "TRAIN", ("-c", TRAIN, str(tmp_path)))
    monkeypatch.setattr(sweep_queue, "POLL", 0.01)

    def made(entries: dict, **common: object) -> list[SweepRun]:
        values = {"runs": tmp_path / "runs", "device": "cpu"} | common
        lines = [f"{key}={value}" for key, value in values.items()]
        runs = {
            name: entry | {"with": [f"name={name}", *entry.get("with", [])]}
            for name, entry in entries.items()
        }
        found = sweep_runs({"common": lines, "runs": runs})
        folders = {run.name: str(run.settings.folder) for run in found}
        (tmp_path / "folders").write_text(json.dumps(folders))
        return found

    return made


def notes(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "notes").read_text().splitlines()]


def events(place: Path) -> list[str]:
    return [f"{x['run']} {x['event']}" for x in notes(place)]


# ---- the runs of a sweep


def test_a_chain_for_every_seed(tmp_path):
    runs = sweep_runs(
        {
            "common": ["attention=linear", f"runs={tmp_path}", "device=cpu"],
            "runs": {
                "easy": {"with": ["task=pathfinder32"]},
                "hard": {"with": ["task=pathfinder64"], "after": "easy"},
            },
        },
        ["seed=3,4"],
    )
    assert [run.name for run in runs] == ["easy/3", "easy/4", "hard/3", "hard/4"]
    assert [run.after for run in runs] == [None, None, *runs[:2]]
    assert runs[3].settings.init_from == str(runs[1].settings.folder)
    assert runs[3].settings.seed == 4 and "seed4" in str(runs[3].settings.folder)
    assert runs[0].data == runs[1].data != runs[2].data


def test_all_begin_from_the_only_one_and_the_last_value_counts(tmp_path):
    mask = "mask='(local:8|butterfly)&causal',local:128+butterfly"
    runs = sweep_runs(
        {
            "common": ["task=image", "batch=2", f"runs={tmp_path}", "device=cpu"],
            "runs": {
                "first": {"with": ["batch=4"]},
                "then": {"with": ["attention=sparse", mask, "seed=1,2"], "after": "first"},
            },
        },
        ["batch=8"],
    )
    assert [run.settings.batch for run in runs] == [8] * 5
    assert [run.settings.seed for run in runs[1:]] == [1, 2] * 2
    assert [run.name for run in runs[1::2]] == [
        "then/(local:8|butterfly)&causal/1",
        "then/local:128+butterfly/1",
    ]
    found = [run.settings.mask for run in runs[1:]]
    assert found == ["(local:8|butterfly)&causal"] * 2 + ["local:128+butterfly"] * 2
    assert all(run.after is runs[0] for run in runs[1:])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "but this one has no runs"),
        (["a"], "but this one has no runs"),
        ({"a": "seed=1"}, "sweep, a: 'seed=1' is not {with: "),
        ({"a": {"with": "seed=1"}}, "sweep, a, with: 'seed=1' is not a list of texts"),
        ({"a": {"with": [{"seed": 1}]}}, "sweep, a, with: .* is not a list of texts"),
        ({"a": {"wiht": ["seed=1"]}}, "sweep, a: .*wiht.* is not {with: "),
        ({"a": {"after": "b"}}, "sweep, a: after: b is not an entry above it"),
        ({"a": {"with": ["task=chess"]}}, "sweep, a: .*task/chess"),
        ({"a": {"with": ["bacth=3"]}}, "sweep, a: .*bacth"),
        ({"a": {"with": ["batch=0"]}}, "sweep, a: batch=0: give a whole number"),
        ({"a": {"with": ["batch=[3"]}}, "sweep, a: "),
        ({"a": {}, "b": {}}, "a and b would share the folder .*name="),
        (
            {"a": {"with": ["seed=1,2"]}, "b": {"with": ["seed=3,4,5"], "after": "a"}},
            "sweep, b: 3 runs cannot start from the 2 of a",
        ),
    ],
)
def test_a_wrong_sweep(entries, message):
    with pytest.raises(ValueError, match=message):
        sweep_runs({"common": ["device=cpu"], "runs": entries})
    with pytest.raises(ValueError, match="but this one has run"):
        sweep_runs({"run": {}})


def test_the_sweeps_that_come_with_it():
    """Path-X and Path-256 share the folders of their first runs: neither trains them again."""
    found = {}
    for path in SWEEPS.glob("*.yaml"):
        sweep = OmegaConf.to_container(OmegaConf.load(path))
        found[path.stem] = sweep_runs(sweep, ["device=cpu"])
    counts = {name: len(runs) for name, runs in found.items()}
    paths = {"path_x": 5, "path_256": 11}
    assert counts == {"lra": 45, "files": 24, "files_small": 6, "imdb_whole": 12} | paths
    first = [[run.settings for run in found[name][:2]] for name in ("path_x", "path_256")]
    assert first[0] == first[1]


# ---- in what order they run


def test_data_first_then_as_many_as_there_are_places(make, tmp_path):
    runs = make({name: {"with": ["eps=0.3"]} for name in "abc"})
    Queue(runs, ["5", "7"]).run()
    told = events(tmp_path)
    assert told[:2] == ["a data begin", "a data end"] and sum("data" in x for x in told) == 2
    assert sorted(told[2:4]) == ["a begin", "b begin"] and told[-1] == "c end"
    assert {x["gpu"] for x in notes(tmp_path)[2:4]} == {"5", "7"}
    assert all(run.complete for run in runs)
    Queue(runs, ["5"]).run()  # there is nothing left to do
    assert events(tmp_path) == told


def test_a_run_waits_for_the_one_before_it_and_its_data_do_not(make, tmp_path):
    entries = {
        "easy": {"with": ["task=pathfinder32", "eps=0.5"]},
        "hard": {"with": ["task=pathfinder64"], "after": "easy"},
        "other": {"with": ["task=pathfinder32", "seed=1"]},
    }
    runs = make(entries)
    assert Queue(runs, [None]).state(runs[1]) == "waits for easy"
    Queue(runs, [None, None]).run()
    told = events(tmp_path)
    assert told.index("hard data begin") < told.index("easy end") < told.index("hard begin")
    assert told.index("other end") < told.index("easy end")


def test_what_fails_stops_those_after_it_alone(make, tmp_path, monkeypatch):
    monkeypatch.setenv("BROKEN", "bad,none data")
    entries = {
        "bad": {"with": ["task=image"]},
        "next": {"after": "bad", "with": ["task=pathfinder32", "eps=0.5"]},  # bad has failed then
        "last": {"after": "next", "with": ["task=pathfinder64"]},
        "none": {"with": ["task=text"]},
        "same": {"with": ["task=text", "seed=1"]},
        "fine": {"with": ["task=listops"]},
    }
    runs = make(entries)
    queue = Queue(runs, [None])
    queue.run()
    began = [x.removesuffix(" begin") for x in events(tmp_path) if x.endswith(" begin")]
    assert set(began) <= {"bad data", "bad", "next data", "none data", "fine data", "fine"}
    assert [run.name for run in runs if run.complete] == ["fine"]
    bad, *waits = [queue.state(run) for run in runs[:3]]
    none = [queue.state(run) for run in runs[3:5]]
    assert bad == "failed: exit status 1, see above"
    assert waits == ["waits for bad", "waits for next"]
    assert none == ["failed: its data could not be made, see above"] * 2


def test_time_is_shared_and_ends(make, tmp_path, capfd):
    runs = make({"a": {"with": ["eps=0.4", "minutes=9"]}, "b": {"with": ["eps=0.4"]}, "c": {}})
    queue = Queue(runs, [None], minutes=0.03)
    begin = time.monotonic()
    queue.run()
    assert time.monotonic() - begin < 20
    began = [x for x in notes(tmp_path) if x["event"] == "begin"]
    assert all(0 < float(x["minutes"]) <= 0.03 for x in began) and len(began) < 3
    assert queue.state(runs[2]) == "not started"
    assert "[a] hello" in capfd.readouterr().err


def test_a_signal_ends_the_processes(make, tmp_path):
    runs = make({"a": {"with": ["eps=60"]}})
    queue = Queue(runs, [None])
    queue.ready.add(runs[0].data)
    kill = subprocess.Popen(["sh", "-c", f"sleep 1; kill -TERM {os.getpid()}"])
    begin = time.monotonic()
    with pytest.raises(Interrupted) as stop:
        queue.run()
    kill.wait()
    assert stop.value.code == 128 + signal.SIGTERM and time.monotonic() - begin < 30
    assert not queue.workers and not queue.failed and events(tmp_path) == ["a begin"]


def test_slots(monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert sweep.slots(None, 2) == ["4", "6", "4", "6"]
    assert sweep.slots([1], 1) == ["6"]
    assert sweep.slots(None, 2, 2) == ["4,6", "4,6"]
    assert sweep.slots([0], 1, 1) == ["4"]
    with pytest.raises(ValueError, match="processes=3: a run has 2 GPUs"):
        sweep.slots(None, 1, 3)
    with pytest.raises(ValueError, match="processes=0: give a whole number"):
        sweep.slots(None, 1, 0)
    with pytest.raises(ValueError, match=r"gpus=\[2\]: there are 2 here"):
        sweep.slots([0, 2], 1)
    with pytest.raises(ValueError, match="at_once=0"):
        sweep.slots(None, 0)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 0)
    assert sweep.slots(None, 1) == sweep.slots(None, 1, 2) == [None]
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweep.slots(None, 1, 2) == ["0,1", "2,3"]


# ---- the command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": -1}, "minutes=-1: give a number above 0"),
        ({"file": "nowhere.yaml"}, r"file=nowhere\.yaml cannot be read: .*No such file"),
        ({"file": "LICENSE"}, r"file=LICENSE is not a sweep: a sweep has common|cannot be read"),
        ({"sweep": {"runs": None}}, "but this one has no runs"),
        ({"minutes": "long"}, "minutes='long': give a number above 0"),
        ({"gpus": 1}, r"gpus=1: give a list, such as \[0,1\]"),
        ({"gpus": []}, r"gpus=\[\]: give a list"),
        ({"with": "seed=1", "sweep": {"runs": {"a": None}}}, "sweep, with: 'seed=1' is not a list"),
    ],
)
def test_wrong_options(changes, message):
    options = {"minutes": None, "file": None, "gpus": None, "at_once": 1, "with": [], "sweep": {}}
    options["processes"] = 1
    with pytest.raises(ValueError, match=message):
        sweep.run(options | {"dry_run": False} | changes)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_stops_and_goes_on(processes, tmp_path):
    rare = {"eval_every": 150, "checkpoint_every": 150, "log_every": 10}
    common = overrides(tmp_path, "listops", "linear", steps=300, **rare)
    runs = {"one": {}, "two": {"after": "one", "with": ["name=b", "steps=4", "minutes=1"]}}
    OmegaConf.save({"common": common, "runs": runs}, tmp_path / "mine.yaml")
    command = [sys.executable, "-m", "experiments.sweep", f"file={tmp_path}/mine.yaml"]
    command += [f"processes={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    process = start()
    journal = tmp_path / "runs/listops/linear/seed0/journal.jsonl"
    end = time.monotonic() + 120
    while not journal.exists() or '"step": 10' not in journal.read_text():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.terminate()
    told = process.communicate(timeout=120)[0]
    assert process.returncode == 143, told
    assert "one: cut short\n" in told and "two: waits for one\n" in told
    again = start()
    told = again.communicate(timeout=180)[0]
    assert again.returncode == 0, told
    assert "where it was" in told and "[two] " in told and "one: test accuracy" in told
    folder = tmp_path / "runs/listops/linear-b/seed0"
    settings = OmegaConf.load(folder / "config.yaml")
    assert settings.init_from == str(tmp_path / "runs/listops/linear/seed0")
    assert json.loads((folder / "result.json").read_text())["processes"] == processes
