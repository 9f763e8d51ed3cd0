import json
from pathlib import Path

import pytest

from experiments.lra.sweep import queue
from experiments.lra.sweep.runs import SweepRun, sweep_runs
from tests.experiments.lra.sweep.stand_in import TRAIN


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs of a sweep whose processes are stand-ins, none of them at work after the test."""
    monkeypatch.setattr(queue, "TRAIN", ("-c", TRAIN, str(tmp_path)))
    monkeypatch.setattr(queue, "POLL", 0.01)

    def made(entries: dict, **common: object) -> list[SweepRun]:
        values = {"runs": tmp_path / "runs", "device": "cpu"} | common
        lines = [f"{key}={value}" for key, value in values.items()]
        runs = {
            name: entry | {"with": [f"name={name}", *entry.get("with", [])]}
            for name, entry in entries.items()
        }
        found = sweep_runs({"common": lines, "runs": runs})
        told = {run.name: (str(run.settings.folder), run.settings.values()) for run in found}
        (tmp_path / "runs.json").write_text(json.dumps(told))
        return found

    return made
