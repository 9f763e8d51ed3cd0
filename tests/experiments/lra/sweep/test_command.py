"""The command experiments.sweep."""

import json
import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments import sweep
from experiments.common.provenance import ROOT
from tests.experiments.lra.sweep.stand_in import wait
from tests.experiments.lra.training.cases import overrides


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": -1}, "minutes=-1: give a number above 0"),
        ({"file": "nowhere.yaml"}, r"file=nowhere\.yaml cannot be read \(No such file"),
        ({"file": "LICENSE"}, r"file=LICENSE cannot be read .*: a sweep has common"),
        ({"sweep": {"runs": None}}, "but this one has no runs"),
        ({"speed": "none.csv"}, r"none\.csv cannot be read .*, or give speed=null"),
        ({"sweep": {"runs": {"a": None}, "known": "none"}}, r"none; .*, or give sweep\.known=null"),
        ({"part_mib": 0}, "part_mib=0: give a number above 0"),
        ({"import": "x.xz"}, "import=x.xz: no such file"),
        ({"minutes": "long"}, "minutes='long': give a number above 0"),
        ({"gpus": 1}, r"gpus=1: give a list, such as \[0,1\]"),
        ({"gpus": []}, r"gpus=\[\]: give a list"),
        ({"with": "seed=1", "sweep": {"runs": {"a": None}}}, "sweep, with: 'seed=1' is not a list"),
    ],
)
def test_wrong_options(changes, message):
    options: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "experiments/conf/sweep.yaml"))
    options |= {"sweep": {"runs": {"a": None}}, "dry_run": True}
    with pytest.raises(ValueError, match=message):
        sweep.run(options | changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x]\nruns: *a\n", "line 2 has an alias"),
        ("runs: {a: null}\nhydra: {callbacks: {x: {_target_: os.getcwd}}}\n", "one has hydra"),
        ("runs: {a: {hydra: {}}}\n", "hydra"),
    ],
)
def test_a_file_holds_a_sweep_and_nothing_else(tmp_path, run_program, text, words):
    (path := tmp_path / "mine.yaml").write_text(text)
    status, *told = run_program("sweep", f"file={path}", "dry_run=true")
    assert status == 2 and words in (told := "".join(told)) and told.count("\n") == 1


def test_a_sweep_runs_outside_of_a_clone(tmp_path, monkeypatch, capsys):
    """Where GPU minutes are known from no file."""
    options: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "experiments/conf/sweep.yaml"))
    options |= {"sweep": {"runs": {"a": None}}, "with": ["scale=full"], "dry_run": True}
    assert sweep.run(options) and "GPU minutes" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert sweep.run(options) and "GPU minutes" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_stops_and_goes_on_elsewhere(tmp_path, monkeypatch, run_program):
    """There with two processes for a run; what starts and stops is as with one."""
    rare = {"eval_every": 40, "checkpoint_every": 40, "log_every": 10}
    common = overrides(tmp_path, "listops", "linear", steps=80, **rare)
    runs = {"one": {}, "two": {"after": "one", "with": ["name=b"]}}
    OmegaConf.save({"common": common, "runs": runs}, tmp_path / "mine.yaml")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def words(place: str) -> list[str]:
        return [f"file={tmp_path}/mine.yaml", f'with=["runs={tmp_path}/{place}"]']

    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", *words("runs"), f"export={tmp_path}/x.xz"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    journal = tmp_path / "runs/listops/linear/seed0/journal.jsonl"
    wait(lambda: journal.exists() and '"step": 10' in journal.read_text(), process)
    process.terminate()
    told = process.communicate(timeout=1200)[0]
    assert process.returncode == 143, told
    assert "exported: " in told and "one: cut short\n" in told and "two: waits for one\n" in told
    del runs["two"]  # every start takes seconds
    OmegaConf.save({"common": common, "runs": runs}, tmp_path / "mine.yaml")
    status, *told = run_program("sweep", *words("other"), "processes=2", f"import={tmp_path}/x.xz")
    told = "".join(told)
    assert status == 0, told
    assert "where it was" in told and "[one] " in told and "one: test accuracy" in told
    folder = tmp_path / "other/listops/linear/seed0"
    assert json.loads((folder / "result.json").read_text())["processes"] == 2
    assert '"resume"' in (folder / "journal.jsonl").read_text()
