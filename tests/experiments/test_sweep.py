"""The runs of a sweep, in what order they are trained, and what a failure stops."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments import sweep
from experiments.sweep import planned, train

CONF = Path(sweep.__file__).parent / "conf/sweep"

# Stands in for experiments.train: notes when it begins and ends, and completes its run.
STAND_IN = """
import json, os, sys, time
from pathlib import Path
place, given = Path(sys.argv[1]), dict(x.split("=", 1) for x in sys.argv[2:])
name = given["name"] + " data" * ("data_only" in given)
def note(event):
    with open(place / "notes", "a") as file:
        file.write(f"{name} {event} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}".strip() + "\\n")
note("begins")
print("hello", flush=True)
if name in os.environ.get("BROKEN", "").split(","):
    sys.exit(1)
time.sleep(float(given.get("eps", 0)))
note("ends")
if not name.endswith("data"):
    folder, settings = json.loads((place / "runs.json").read_text())[name]
    file = dict.fromkeys("task data params mask density sessions reason".split())
    file |= {"settings": settings, "complete": True, "result": {"accuracy": 0.5, "steps": 1}}
    Path(folder, "part").write_text(json.dumps(file))
    os.replace(Path(folder, "part"), Path(folder, "run.json"))
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that plans runs whose processes are stand-ins."""
    monkeypatch.setattr(sweep, "TRAIN", {"train": ["-c", STAND_IN, str(tmp_path)]})

    def made(entries: dict[str, dict[str, Any]]) -> list[sweep.Planned]:
        entries = {k: e | {"with": [f"name={k}", *e.get("with", [])]} for k, e in entries.items()}
        common = ["device=cpu", f"runs={tmp_path / 'runs'}"]
        runs = planned({"common": common, "runs": entries})
        about = {run.name: (str(run.settings.folder), run.settings.values()) for run in runs}
        (tmp_path / "runs.json").write_text(json.dumps(about))
        return runs

    return made


def notes(place: Path) -> list[str]:
    return (place / "notes").read_text().splitlines()


def test_a_chain_for_every_seed_and_the_last_value_of_a_key_counts(tmp_path):
    common = ["attention=linear", f"runs={tmp_path}", "device=cpu", "batch=2"]
    hard = {"with": ["seed=4,3", "task=pathfinder64"], "after": "easy"}
    entries = {"easy": {"with": ["task=pathfinder32", "batch=4", "seed=3,4"]}, "hard": hard}
    runs = planned({"common": common, "runs": entries}, ["lr=0.5"])
    assert [run.name for run in runs] == ["easy/3", "easy/4", "hard/4", "hard/3"]
    assert [run.after for run in runs] == [None, None, runs[1], runs[0]]
    assert runs[3].settings.init_from == str(runs[0].settings.folder)
    assert [run.settings.batch for run in runs] == [4, 4, 2, 2]
    assert {run.settings.lr for run in runs} == {0.5} and runs[3].settings.seed == 3


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "runs"),
        ({"a": {"with": "seed=1"}}, "sweep, a.*seed=0,1"),
        ({"a": {"wiht": ["seed=1"]}}, "sweep, a.*with"),
        ({"a": {"after": "b"}}, "after=b"),
        ({"a": {"with": ["task=chess"]}}, "a: .*chess"),
        ({"a": {"with": ["hydra/launcher=basic"]}}, "hydra/launcher"),
        ({"a": {"with": ["+x=1"]}}, r"\+x"),
        ({"a": {"with": ["step=1"]}}, "a: option='step': .*did you mean steps"),
        ({"a": {"with": ["task=../../evil"]}}, "evil"),
        ({"a": {}, "b": {}}, "a and b share a folder"),
        ({"a": {"with": ["seed=1,2"]}, "b": {"with": ["seed=3"], "after": "a"}}, "no run of a"),
    ],
)
def test_a_wrong_sweep(entries, words):
    with pytest.raises(ValueError, match=words):
        planned({"common": ["device=cpu"], "runs": entries})


def test_data_come_first_and_then_as_many_runs_as_there_are_places(make, tmp_path):
    runs = make({name: {"with": ["eps=0.5"]} for name in "abc"})
    assert train(runs, ["5", "7"]) == {} and all(run.complete for run in runs)
    told = notes(tmp_path)
    assert told[:2] == ["a data begins", "a data ends"] and len(told) == 8
    assert sorted(told[2:4]) in (["a begins 5", "b begins 7"], ["a begins 7", "b begins 5"])
    assert train(runs, ["5"]) == {} and notes(tmp_path) == told  # there is nothing left to do


def test_a_run_waits_for_the_one_before_it(make, tmp_path):
    hard = {"with": ["task=pathfinder64"], "after": "easy"}
    runs = make({"hard_start": {"with": ["eps=1"]}, "easy": {"with": ["task=image"]}, "hard": hard})
    train(runs, ["", ""])
    told = notes(tmp_path)
    assert told.index("easy ends") < told.index("hard begins") and len(told) == 12


def test_a_failure_stops_only_the_runs_after_it(make, monkeypatch):
    monkeypatch.setenv("BROKEN", "bad,none data")
    entries = {
        "bad": {"with": ["task=image"]},
        "next": {"after": "bad", "with": ["task=pathfinder32"]},
        "none": {"with": ["task=text"]},
        "fine": {},
    }
    runs = make(entries)
    failed = train(runs, [""])
    assert failed.keys() == {"bad", "none"} and "hello" in failed["bad"]
    assert [run.name for run in runs if run.complete] == ["fine"]
    assert sweep.state(runs[1]) == "waits for bad"
    monkeypatch.delenv("BROKEN")
    assert train(runs, [""]) == {} and all(run.complete for run in runs)


def test_a_folder_with_other_settings_is_refused(make):
    train(make({"a": {}}), [""])
    with pytest.raises(ValueError, match=r"lr .*name="):
        make({"a": {"with": ["lr=0.5"]}})


def test_the_time_limit_and_signals_stop_the_processes(make, tmp_path):
    runs = make({"a": {"with": ["eps=60"]}, "b": {"with": ["eps=60"]}, "c": {}})
    assert train(runs, ["", ""], minutes=0.05) == {}
    assert {"a begins", "b begins"} >= {x for x in notes(tmp_path) if "data" not in x}
    before, kill = signal.getsignal(signal.SIGTERM), f"sleep 1; kill -TERM {os.getpid()}"
    try:
        with subprocess.Popen(["sh", "-c", kill]), pytest.raises(KeyboardInterrupt):
            train(runs, [""])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(run.complete for run in runs)


def test_the_sweeps_that_come_with_it():
    """The first run of each; a run takes a fifth of a second."""
    found = {}
    for path in CONF.glob("*.yaml"):
        sweep: Any = OmegaConf.to_container(OmegaConf.load(path))
        count = 2 if path.stem == "spt" else 1
        sweep["runs"] = dict(list(sweep["runs"].items())[:count])
        attention = ["attention=sparse"] if "program" not in sweep else []
        found[path.stem] = planned(sweep, ["device=cpu", "seed=0", *attention])
    first, second = (run.settings for run in found["spt"])
    assert first.pretrain and second.pretrain is None and second.init_from == str(first.folder)
