"""The files task, on small folders of made-up text and on a few packages of this machine."""

import numpy as np
import pytest

from experiments.lra.tasks.task import load_task
from tests.experiments.lra.tasks.test_texts import read

EACH = 20  # files of a label


def words(rng, n=80, kind=""):
    return " ".join(f"{kind}{rng.integers(1000)}" for _ in range(n))


def write(root, labels=("apple", "pear", "plum")):
    """Files that begin with their label and number, so that a test can read them off."""
    rng = np.random.default_rng(0)
    for label in labels:
        (root / label / "more").mkdir(parents=True)
        for i in range(EACH):
            path = root / label / ("more" if i % 2 else ".") / f"{i}.txt"
            path.write_text(f"{label} {i}: {words(rng, kind=label[0])} é", encoding="utf-8")
    return root


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "texts")


def load(folder, /, **options):
    place, options = folder.parent, {"folder": str(folder), "length": 512} | options
    return load_task("files", place / "data", cache_dir=place / "cache", **options)


def examples(task):
    """The first words of every file, by split: its label and number."""
    return {
        name: [read(row).partition(":")[0] for row in split.tokens]
        for name, split in task.splits.items()
    }


def test_every_file_is_in_one_split_with_its_label(folder):
    task = load(folder)
    found = examples(task)
    assert {name: len(some) for name, some in found.items()} == {"train": 42, "val": 9, "test": 9}
    assert len(set().union(*found.values())) == 3 * EACH
    for name, split in task.splits.items():
        labels = [("apple", "pear", "plum").index(text.split()[0]) for text in found[name]]
        assert split.labels.tolist() == labels
    assert np.bincount(task.splits["test"].labels).tolist() == [3, 3, 3]
    assert len(set(task.splits["train"].labels[:8])) > 1  # labels are mixed
    assert (task.classes, task.vocab, task.length) == (3, 257, 512)
    assert task.source.startswith("texts ") and task.source.endswith("3 labels, 42 + 9 + 9 files")


def test_a_shorter_length_reads_less_of_the_same_files(folder):
    long, short = load(folder, length=500), load(folder, length=60)
    assert (long.length, short.length) == (512, 64)
    assert short.splits["test"].lengths.max() == 60
    for name, split in short.splits.items():
        np.testing.assert_array_equal(split.tokens[:, :60], long.splits[name].tokens[:, :60])


def test_the_seed_draws_the_split_and_nothing_else_does(folder):
    assert examples(load(folder)) == examples(load(folder))
    assert examples(load(folder, seed=1))["test"] != examples(load(folder))["test"]
    few = load(folder, limit=4)
    assert examples(few)["train"] == examples(load(folder))["train"][:4]
    assert load(folder, per_label=8).source.endswith("18 + 3 + 3 files")
    assert load(folder, labels=2).classes == 2


def test_copies_and_files_of_no_use_are_left_out_wherever_they_are(folder):
    first = (folder / "apple" / "0.txt").read_text("utf-8")
    (folder / "apple" / "copy.txt").write_text(first.replace(":", " :"))
    (folder / "plum" / "copy.txt").write_text(first.upper())
    (folder / "pear" / "bytes.txt").write_bytes(b"\xff\xfe" * 200)
    (folder / "pear" / "short.txt").write_text("pear")
    task = load(folder)
    found = [text.lower() for some in examples(task).values() for text in some]
    assert len(found) == 3 * EACH and sum(text.strip() == "apple 0" for text in found) == 1


def test_the_source_tells_which_files_were_read(folder):
    once = load(folder).source
    assert load(folder).source == once != load(folder, seed=1).source
    (folder / "pear" / "0.txt").write_text("pear 0: " + words(np.random.default_rng(2)))
    assert load(folder).source != once


def test_packages_of_this_machine_are_labels(tmp_path):
    task = load_task(
        "files", tmp_path, cache_dir=tmp_path / "cache", length=256, labels=3, per_label=10
    )
    assert task.source.startswith("Python packages ") and "3 labels, 18 + 6 + 6" in task.source


def test_options_and_folders_without_enough_are_refused(tmp_path):
    for options, message in (
        ({"length": 16385}, "length=16385: give at most 16384 bytes"),
        ({"folder": "/nowhere"}, "folder=/nowhere is not a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "texts", **options)
    root = write(tmp_path / "texts", labels=("apple",))
    with pytest.raises(ValueError, match="texts: give a folder with two"):
        load(root)
    write(root, labels=("pear",))
    for i in range(7, EACH):
        (root / "pear" / ("more" if i % 2 else ".") / f"{i}.txt").unlink()
    with pytest.raises(ValueError, match="label pear has 7 different UTF-8 files"):
        load(root)
