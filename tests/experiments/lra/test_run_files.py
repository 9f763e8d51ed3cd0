"""Runs read from folders and archives."""

import json
from itertools import count

import pytest

from experiments.common.files import DamagedFile
from experiments.lra.run_files import POINTS, read_runs, write_archive
from experiments.lra.table import Table, as_csv
from tests.experiments.lra.made_runs import write_run


def test_a_resumed_journal_counts_each_step_once(tmp_path):
    path = write_run(tmp_path, "listops", "standard", steps=100)
    lines = (path / "journal.jsonl").read_text().splitlines()
    again = [json.dumps(json.loads(text) | {"loss": 9.0}) for text in lines[-5:]]
    (path / "journal.jsonl").write_text("\n".join([*lines, lines[0], *again]) + "\n")
    (run,) = read_runs(str(tmp_path))
    steps = [found["step"] for found in run.of("train")]
    assert steps == sorted(set(steps)) and run.of("train")[-1]["loss"] == 9.0


def test_globs_and_several_folders_find_each_run_once(tmp_path):
    write_run(tmp_path / "one", "listops", "standard")
    write_run(tmp_path / "two", "text", "standard")
    (tmp_path / "link").symlink_to(tmp_path / "two")
    places = [str(tmp_path / "*"), str(tmp_path / "one" / "listops")]
    assert sorted(run.task for run in read_runs(places)) == ["listops", "text"]


def test_no_run_says_how_to_make_one(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"train first: python -m experiments\.train"):
            read_runs(str(place))


def test_a_damaged_journal_names_its_line(tmp_path):
    path = write_run(tmp_path, "listops", "standard") / "journal.jsonl"
    path.write_text(path.read_text().replace('"kind": "val"', '"kind": val', 1))
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 3 cannot be read"):
        read_runs(str(tmp_path))


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ({}, ""),
        ({"strokes": 192}, "strokes of 192"),
        ({"strokes": [256, 128, 160.5]}, "strokes of 128 to 256"),
        ({"margins": [1, 2], "distractors": 0}, "margins [1, 2], distractors 0"),
        ({"margins": None, "distractors": None}, ""),
    ],
)
def test_settings_as_sections_are_read(tmp_path, task, label):
    sections = {"attention": {"name": "sparse", "mask": "butterfly"}, "task": task}
    write_run(tmp_path, "listops", "sparse", result=False, settings=sections)
    (run,) = read_runs(str(tmp_path))
    assert (run.attention, run.mask, run.label) == ("sparse", "butterfly", label)


def test_an_archive_replaces_no_file_of_another_kind(tmp_path):
    (path := tmp_path / "rows.csv").write_text("rows")
    with pytest.raises(ValueError, match=r"archive=.*rows\.csv: give a path that ends in \.jsonl"):
        write_archive([], path)
    assert path.read_text() == "rows"


def test_an_archive_gives_the_table_of_its_runs(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs", "listops", "sparse", seed, more={"density": 0.5})
    write_run(tmp_path / "runs", "text", "flash", steps=330, result=False, memory=70.0)
    write_run(tmp_path / "runs", "image", "linear", settings={"pretrain": "masked"})
    runs = read_runs(str(tmp_path / "runs"))
    write_archive(runs, tmp_path / "new" / "some.jsonl")
    for place in ("new", "new/some.jsonl"):
        again = read_runs(str(tmp_path / place))
        assert as_csv(Table(again)) == as_csv(Table(runs))
        assert again[-1].place == f"{tmp_path}/new/some.jsonl: {runs[-1].place}"
        for run, old in zip(again, runs, strict=True):
            for quantity in ("step", "loss", "accuracy"):
                values = [line[quantity] for line in old.of("val")]
                assert [line[quantity] for line in run.of("val")] == pytest.approx(values, rel=1e-5)


def test_an_archive_keeps_the_mask_of_a_run_that_was_killed(tmp_path):
    path = write_run(tmp_path, "text", "sparse", result=False) / "journal.jsonl"
    first, *rest = path.read_text().splitlines()
    start = json.loads(first) | {"mask": "local(64)", "density": 0.25}
    path.write_text("\n".join([json.dumps(start), *rest]))
    write_archive(read_runs(str(tmp_path)), tmp_path / "new.jsonl")
    (run,) = read_runs(str(tmp_path / "new.jsonl"))
    assert (run.mask, run.resolved_mask, run.density) == ("", "local(64)", 25)


def test_an_archive_grows_by_the_runs_of_another(tmp_path, monkeypatch):
    """Its bytes are those of its runs, whenever it is written."""
    seconds = count(1_700_000_000, 10)
    monkeypatch.setattr("time.time", lambda: float(next(seconds)))
    for seed in (0, 1):
        write_run(tmp_path / "runs", "listops", "sparse", seed)
        write_archive(read_runs(str(tmp_path / "runs")), tmp_path / f"{seed}.jsonl.gz")
    old, new = (str(tmp_path / name) for name in ("0.jsonl.gz", "runs/listops/sparse/seed1"))
    write_archive(read_runs([old, new]), tmp_path / "both.jsonl.gz")
    assert (tmp_path / "both.jsonl.gz").read_bytes() == (tmp_path / "1.jsonl.gz").read_bytes()


def test_an_archive_among_its_own_sources_has_each_run_once(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "listops", "sparse", seed, more={"density": 0.5})
    write_run(tmp_path, "text", "flash", steps=330, result=False)
    path, found = tmp_path / "all.jsonl.gz", []
    for _ in range(3):
        write_archive(read_runs(str(tmp_path)), path)
        found.append(path.read_bytes())
    assert len(read_runs(str(path))) == 3 and len(set(found)) == 1


def test_training_curves_are_averaged_in_archives(tmp_path):
    path = write_run(tmp_path, "listops", "standard")
    lines = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    train = [
        {"kind": "train", "step": i, "seconds": i, "loss": float(i), "accuracy": None}
        for i in range(1, 2 * POINTS)
    ]
    (path / "journal.jsonl").write_text("".join(json.dumps(l) + "\n" for l in [lines[0], *train]))
    write_archive(read_runs(str(path)), tmp_path / "new.jsonl")
    (run,) = read_runs(str(tmp_path / "new.jsonl"))
    found = run.of("train")
    assert len(found) == POINTS and found[-1]["step"] == 2 * POINTS - 1
    assert (found[0]["step"], found[0]["loss"], found[0]["accuracy"]) == (2, 1.5, None)


def test_an_archive_says_which_runs_are_untraced(tmp_path):
    write_run(tmp_path / "runs", "listops", "standard", commit="0123456789ab+changes")
    write_run(tmp_path / "runs", "text", "standard")
    write_archive(read_runs(str(tmp_path / "runs")), tmp_path / "new.jsonl")
    packed = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert [line["untraced"] for line in packed] == [True, False]


def test_a_run_is_traced_if_all_its_sessions_are(tmp_path):
    path = write_run(tmp_path / "runs", "listops", "standard", commit="0123456789ab+changes")
    journal, result = path / "journal.jsonl", path / "result.json"
    versions = {"commit": "0123456789ab"}
    last = {"kind": "resume", "step": 1000, "seconds": 1.0, "config": {}, "versions": versions}
    journal.write_text(journal.read_text() + json.dumps(last) + "\n")
    result.write_text(json.dumps(json.loads(result.read_text()) | {"versions": versions}))
    runs = read_runs(str(tmp_path / "runs"))
    write_archive(runs, tmp_path / "new.jsonl")
    for (run,) in (runs, read_runs(str(tmp_path / "new.jsonl"))):
        assert not run.traced


@pytest.mark.parametrize("text", ['{"run": "a"}\n', "[1]\n", '{"run": "a", "start": \n'])
def test_a_damaged_archive_names_its_file(tmp_path, text):
    (tmp_path / "some.jsonl").write_text(text)
    with pytest.raises(DamagedFile, match=r"some\.jsonl"):
        read_runs(str(tmp_path))


@pytest.mark.parametrize("name", ["journal.jsonl", "result.json"])
def test_files_of_a_run_that_are_no_tables_are_named(tmp_path, name):
    path = write_run(tmp_path, "listops", "standard")
    for text in ("[1]\n", '{"kind": 1}\n', '{"complete": [], "seed": []}'):
        (path / name).write_text(text + "\n")
        with pytest.raises(DamagedFile, match=rf"{path}.*: "):
            read_runs(str(tmp_path))
