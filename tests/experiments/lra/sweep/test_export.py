"""Exports: what travels to another machine, what is taken from it, and that runs go on exactly."""

import io
import json
import os
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.lra.result import refuse_other_settings
from experiments.lra.sweep.export import read_export, write_export
from experiments.lra.sweep.queue import Queue
from experiments.lra.sweep.runs import SweepRun, sweep_runs
from tests.experiments.lra.sweep.stand_in import limit
from tests.experiments.lra.training.cases import Trained, assert_same, overrides


@pytest.fixture
def machine(make: Callable[..., list[SweepRun]], tmp_path: Path):
    """The same four runs in the folder of a machine; b starts from a, and d from c."""

    def made(name: str) -> dict[str, SweepRun]:
        entries = {"a": {}, "b": {"after": "a"}, "c": {}, "d": {"after": "c"}}
        return {run.name: run for run in make(entries, runs=tmp_path / name)}

    return made


def put(run: SweepRun, complete: bool | None = None, journal: str = "", **files: str) -> None:
    """Files of a run: its result if `complete` is given, its journal, and others by their stem."""
    folder = run.settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("batch: 4")
    (folder / "journal.jsonl").write_text(journal)
    for stem, text in files.items():
        (folder / f"{stem}.pt").write_text(text)
    if complete is not None:
        (folder / "result.json").write_text(json.dumps({"complete": complete}))


def steps(*numbers: int) -> str:
    """A journal with a line for each of these steps."""
    return "".join(f'{{"step": {number}}}\n' for number in numbers)


def files(run: SweepRun) -> dict[str, str]:
    folder = run.settings.folder
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def test_what_travels(machine, tmp_path):
    here, there = machine("here"), machine("there")
    put(here["a"], True, "long", weights="A", checkpoint="old")
    put(here["b"], None, steps(1), weights="not yet", checkpoint="B")
    put(here["c"], True, "long", weights="C")
    put(here["d"], True, "long")
    runs, back = list(here.values()), list(there.values())
    archive = tmp_path / "sweep.tar.xz"
    told = write_export(archive, runs, None)
    assert told.startswith(f"exported: {archive}, 0.0 MiB compressed (result.json 0.0, ")
    assert read_export(archive, back, None) == f"imported: {archive}, 4 of its 4 runs"
    assert set(files(there["a"])) == {"config.yaml", "journal.jsonl", "weights.pt", "result.json"}
    assert files(there["b"]) == {
        "config.yaml": "batch: 4",
        "journal.jsonl": steps(1),
        "checkpoint.pt": "B",
    }
    assert files(there["c"])["weights.pt"] == "C" and there["d"].complete
    few = machine("few")
    write_export(archive, runs, None, weights=False)
    read_export(archive, list(few.values()), None)
    assert files(few["a"])["weights.pt"] == "A"  # b starts from it
    assert "weights.pt" not in files(few["c"]) and files(few["b"]) == files(there["b"])


def test_a_run_that_starts_from_another_goes_on_elsewhere(machine, tmp_path):
    here, there = machine("here"), machine("there")
    put(here["b"], None, steps(1), checkpoint="B")
    OmegaConf.save(here["b"].settings.values(), here["b"].settings.folder / "config.yaml")
    write_export(tmp_path / "x", list(here.values()), None)
    read_export(tmp_path / "x", list(there.values()), None)
    moved = there["b"].settings
    refuse_other_settings(moved)
    other = replace(moved, init_from=there["d"].settings.init_from)
    with pytest.raises(ValueError, match=r"other settings \(init_from .*-a/seed0 -> .*-c/seed0\)"):
        refuse_other_settings(other)


def test_nothing_travels_of_a_run_without_a_checkpoint(machine, tmp_path):
    here, there = machine("here"), machine("there")
    put(here["a"], None, "steps that nothing follows")
    write_export(tmp_path / "x", list(here.values()), None)
    assert read_export(tmp_path / "x", list(there.values()), None).endswith("0 of its 0 runs")


def test_what_got_further_stays(machine, tmp_path):
    here, there = machine("here"), machine("there")
    for name, complete in zip("abcd", (None, None, True, None), strict=True):
        put(here[name], complete, steps(0, 5), checkpoint="here", weights="here")
    put(there["a"], None, steps(6), checkpoint="there")
    put(there["b"], False, steps(0, 1, 1, 3) + '{"step": 9', checkpoint="there", weights="there")
    put(there["c"], False, steps(7), checkpoint="there", weights="there")
    runs = list(there.values())
    write_export(tmp_path / "x", list(here.values()), None, weights=False)
    with there["d"].claim():
        assert read_export(tmp_path / "x", runs, None).endswith("2 of its 4 runs")
    found = [files(there[name]).get("checkpoint.pt") for name in "abcd"]
    assert found == ["there", "here", None, None]
    # old weights would stand for those of b and c
    assert set(files(there["b"])) == {"config.yaml", "journal.jsonl", "checkpoint.pt"}
    assert files(there["c"])["weights.pt"] == "here"
    assert files(there["b"])["journal.jsonl"] == steps(0, 5) and there["c"].complete
    put(here["c"], True, steps(8))
    write_export(tmp_path / "x", list(here.values()), None)
    read_export(tmp_path / "x", runs, None)
    assert files(there["c"])["journal.jsonl"] == steps(0, 5)


def test_parts_and_compiled_code(machine, tmp_path):
    here, there = machine("here"), machine("there")
    code = random.Random(0).randbytes(40_000)
    for place in (tmp_path / "code/inductor/ab", tmp_path / "other/inductor/ab"):
        place.mkdir(parents=True)
    (tmp_path / "code/inductor/ab/x.so").write_bytes(code)
    (tmp_path / "code/inductor/ab/y.so").write_bytes(b"new")
    (tmp_path / "other/inductor/ab/y.so").write_bytes(b"in use")
    put(here["a"], True, "long")
    archive, runs = tmp_path / "x.xz", list(here.values())
    write_export(archive, runs, tmp_path / "code")
    told = write_export(archive, runs, tmp_path / "code", part_mib=15_000 / 2**20)
    parts = sorted(tmp_path.glob("x.xz*"))
    assert [part.name for part in parts] == ["x.xz.00", "x.xz.01", "x.xz.02"]
    assert all(part.stat().st_size <= 15_000 for part in parts)
    assert f"{archive}.00 to x.xz.02" in told and "compiled code 0.0" in told
    read_export(archive, list(there.values()), tmp_path / "other")
    assert there["a"].complete
    assert (tmp_path / "other/inductor/ab/x.so").read_bytes() == code
    assert (tmp_path / "other/inductor/ab/y.so").read_bytes() == b"in use"
    write_export(archive, runs, tmp_path / "code", part_mib=300 / 2**20)
    assert (tmp_path / "x.xz.100").exists()
    more = machine("more")
    read_export(archive, list(more.values()), None)
    assert more["a"].complete
    max(tmp_path.glob("x.xz.*"), key=lambda part: int(part.suffix[1:])).unlink()
    with pytest.raises(ValueError, match=r"import=.*x\.xz cannot be read \(Compressed file ended"):
        read_export(archive, list(there.values()), None)
    write_export(archive, runs, None)
    assert sorted(tmp_path.glob("x.xz*")) == [archive]


def test_wrong_exports(machine, tmp_path):
    runs = list(machine("here").values())
    with pytest.raises(ValueError, match=r"import=.*nothing: no such file; export=FILE writes one"):
        read_export(tmp_path / "nothing", runs, None)
    (tmp_path / "text").write_text("something else")
    with pytest.raises(ValueError, match=r"import=.*text cannot be read"):
        read_export(tmp_path / "text", runs, None)
    with tarfile.open(tmp_path / "wild", "w:xz") as tar:
        member = tarfile.TarInfo("compiled/../../wild.so")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    with pytest.raises(ValueError, match=r"\.\./\.\./wild\.so lies outside"):
        read_export(tmp_path / "wild", runs, tmp_path / "code")
    assert not (tmp_path.parent / "wild.so").exists()


@pytest.mark.slow
def test_another_machine_goes_on_to_the_same_bits(tmp_path, monkeypatch, one_thread):
    """Stopped by the limit, exported, imported into another folder, and continued: the same bits
    as those of a run in this process, which makes the data of all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rare = {"eval_every": 40, "checkpoint_every": 40, "log_every": 10}
    common = overrides(tmp_path, "listops", "linear", steps=120, **rare)
    one = Trained(tmp_path, "listops", "linear", steps=120, **rare)

    def trained(name: str, *taken: Path, ends: bool = True) -> SweepRun:
        (run,) = sweep_runs(
            {"common": common, "runs": {"x": {"with": [f"runs={tmp_path / name}"]}}}
        )
        for archive in taken:
            read_export(archive, [run], None)
        queue = Queue([run], [None])
        queue.ready.add(run.data)
        journal = run.settings.folder / "journal.jsonl"
        if not ends:
            limit(queue, lambda: journal.exists() and '"step": 10,' in journal.read_text())
        queue.run()
        assert not queue.failed and run.complete == ends
        return run

    cut = trained("first", ends=False)
    assert not (cut.settings.folder / "result.json").exists()
    write_export(tmp_path / "x", [cut], None)
    rest = trained("second", tmp_path / "x")
    other = Trained.at(rest.settings.folder)
    assert any(line["kind"] == "resume" and line["step"] > 0 for line in other.journal)
    for name in ("model", "optimizer", "random", "best"):
        assert_same(one.state[name], other.state[name])
    assert one.result["correct"] == other.result["correct"]
    assert one.result["best_step"] == other.result["best_step"]
    training = [
        [{k: v for k, v in line.items() if k in ("kind", "step", "loss", "accuracy")}
         for line in run.journal if line["kind"] in ("train", "val", "test")]
        for run in (one, other)
    ]  # fmt: skip
    assert training[0] == training[1] and len(training[0]) == 16
    before = os.stat(rest.settings.folder / "result.json")
    trained("second", tmp_path / "x")  # complete: neither imported nor run again
    assert os.stat(rest.settings.folder / "result.json") == before
