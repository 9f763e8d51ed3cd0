"""Runs read from folders and archives, and their figures."""

import json

import numpy as np
import pytest

from experiments.common.files import DamagedFile, pack
from experiments.lra.curves import draw_all
from experiments.lra.runs import POINTS, read_runs, write_archive
from experiments.lra.table import Table
from tests.experiments.lra.made_runs import write_run


def test_a_resumed_journal_counts_each_step_once(tmp_path):
    path = write_run(tmp_path, "listops", "standard", steps=100) / "journal.jsonl"
    lines = path.read_text().splitlines()
    again = [json.dumps(json.loads(text) | {"loss": 9.0}) for text in lines[-5:]]
    path.write_text("\n".join([*lines, *again]) + '\n{"kind": "train", "st')  # and is killed
    (run,) = read_runs(str(tmp_path))
    steps = [found["step"] for found in run.of("train")]
    assert steps == sorted(set(steps)) and run.of("train")[-1]["loss"] == 9.0


def test_globs_and_several_folders_find_each_run_once(tmp_path):
    write_run(tmp_path / "one", "listops", "standard")
    write_run(tmp_path / "two", "text", "standard")
    (tmp_path / "link").symlink_to(tmp_path / "two")
    places = [str(tmp_path / "*"), str(tmp_path / "one" / "listops")]
    assert sorted(run.task for run in read_runs(places)) == ["listops", "text"]
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        with pytest.raises(ValueError, match=r"experiments\.train"):
            read_runs(str(tmp_path / place))


def test_an_archive_gives_the_table_of_its_runs_and_the_same_bytes(tmp_path):
    right = np.arange(1000) % 3 == 0
    for seed in (0, 1):
        more = {"density": 0.5, "correct": pack(right), "data": "d" * 12}
        write_run(tmp_path / "runs", "listops", "sparse", seed, more=more)
    cut = write_run(tmp_path / "runs", "text", "flash", steps=330, result=False, memory=70.0)
    with (cut / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"kind": "end", "step": 337, "seconds": 3.5}) + "\n")
    untraced = {"settings": {"pretrain": "masked"}, "commit": "0123456789ab+changes"}
    write_run(tmp_path / "runs", "image", "linear", **untraced)
    runs = read_runs(str(tmp_path / "runs"))
    path = tmp_path / "new" / "some.jsonl.gz"
    write_archive(runs, path)
    again = read_runs(str(tmp_path / "new"))
    assert Table(again).sections == Table(runs).sections
    for run, old in zip(again, runs, strict=True):
        assert run.place == f"{path}: {old.place}"
        assert (run.traced, run.data) == (old.traced, old.data)
        assert run.steps == old.steps == (337 if run.task == "text" else 1000)
        for quantity in ("step", "loss", "accuracy"):
            values = [line[quantity] for line in old.of("val")]
            assert [line[quantity] for line in run.of("val")] == pytest.approx(values, rel=1e-5)
    assert sum(np.array_equal(run.correct, right) for run in again if run.task == "listops") == 2
    before = path.read_bytes()
    write_archive(read_runs([str(tmp_path)]), path)  # each run once, from its folder and from here
    assert path.read_bytes() == before


def test_training_curves_are_averaged_in_archives(tmp_path):
    path = write_run(tmp_path, "listops", "standard")
    train = [
        {"kind": "train", "step": i, "seconds": i, "loss": float(i), "accuracy": None}
        for i in range(1, 2 * POINTS)
    ]
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in train))
    write_archive(read_runs(str(path)), tmp_path / "new.jsonl")
    (run,) = read_runs(str(tmp_path / "new.jsonl"))
    found = run.of("train")
    assert len(found) == POINTS and found[-1]["step"] == 2 * POINTS - 1
    assert (found[0]["step"], found[0]["loss"], found[0]["accuracy"]) == (2, 1.5, None)


def test_damaged_files_are_named(tmp_path):
    path = write_run(tmp_path, "listops", "standard")
    for name in ("journal.jsonl", "run.json"):
        whole = (path / name).read_text()
        (path / name).write_text("[1]\n{}\n")
        with pytest.raises(DamagedFile, match=str(path)):
            read_runs(str(tmp_path))
        (path / name).write_text(whole)
    other = tmp_path / "some.jsonl"
    other.write_text('{"run": "a"}\n')
    for use in (lambda: read_runs(str(other)), lambda: write_archive([], other)):
        with pytest.raises(DamagedFile, match=r"some\.jsonl"):
            use()
    with pytest.raises(ValueError, match=r"rows\.csv.*\.jsonl"):
        write_archive([], tmp_path / "rows.csv")


# ---- figures


def test_figures_of_each_task_of_pretraining_and_of_accuracy_against_speed(tmp_path):
    (write_run(tmp_path, "text", "linear", result=False) / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match="no run has a measurement yet"):
        draw_all(read_runs(str(tmp_path)), tmp_path / "plots")
    write_run(tmp_path, "image", "standard", accuracy=0.6, ms=40.0)
    write_run(tmp_path, "image", "sparse", mask="butterfly", accuracy=0.58, ms=8.0, steps=500)
    write_run(tmp_path, "image", "flash", folder="pre", settings={"pretrain": "masked"})
    for name in ("50k", "50K"):
        write_run(tmp_path, "image", "flash", folder=name, settings={"name": name})
    paths = draw_all(read_runs(str(tmp_path)), tmp_path / "plots")
    found = {path.stem: path.with_suffix(".svg").read_text() for path in paths}
    image = "curves-image-generated-2k"
    own = [f"{image}-pretraining", f"{image}-50k", f"{image}-50k-2"]
    assert found.keys() == {image, *own, "accuracy-speed"}
    assert ["FlashAttention" in found[name] for name in (image, *own)] == [False] + [True] * 3
