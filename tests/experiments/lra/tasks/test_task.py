"""What the tasks share: dispatch, options, folders, orders, the cache."""

import numpy as np
import pytest

import masks
from experiments.lra.tasks import task as cache
from experiments.lra.tasks.task import Split, Task, best_constant, find, load_task, pixel_order


def split(n=4, length=8, **changes):
    values = {
        "tokens": np.ones((n, length), np.uint8),
        "labels": np.arange(n, dtype=np.int64) % 2,
        "lengths": np.full(n, length, np.int32),
    }
    return Split(**(values | changes))


def task(**changes):
    splits = {"train": split(), "val": split(), "test": split()} | changes
    return Task("text", "official", 2, 3, splits)


def test_a_split_that_does_not_fit_is_refused():
    for val, message in (
        (split(tokens=np.ones((4, 9), np.uint8)), r"val tokens are uint8 \(4, 9\)"),
        (split(tokens=np.ones((4, 8), np.int64)), "val tokens are int64"),
        (split(tokens=np.full((4, 8), 3, np.uint8)), "val tokens reach from 3 to 3"),
        (split(labels=np.array([0, 1, 2, 0])), "val labels reach from 0 to 2"),
        (split(lengths=np.array([0, 1, 2, 3], np.int32)), "val lengths reach from 0 to 3"),
        (split(n=0), "the val split is empty"),
        (split(labels=np.zeros(4, np.int32)), r"val labels are int32 \(4,\), not int64 \(4,\)"),
        (split(lengths=np.ones((4, 2), np.int32)), r"val lengths are int32 \(4, 2\), not int32"),
    ):
        with pytest.raises(ValueError, match=message):
            task(val=val)
    with pytest.raises(ValueError, match="no split val: give train, val and test"):
        Task("text", "official", 2, 3, {"train": split(), "test": split()})


def test_names_and_options_are_checked_before_any_work(tmp_path):
    for name, options, message in (
        ("pathfinder48", {}, "no task 'pathfinder48': choose from .*listops"),
        ("text", {"generate": True}, "text has no option generate: choose from held_out, limit"),
        ("text", {"limit": "5"}, "limit='5'"),
        ("text", {"max_length": 0}, "max_length=0"),
        ("text", {"held_out": 1.0}, r"held_out=1.0"),
        ("image", {"order": 8}, "order=8: choose from row"),
        ("image", {"order": "tiles:2x2x2"}, "order='tiles:2x2x2'"),
        ("listops", {"generate": True, "examples": [10, 10]}, r"examples=\[10, 10\]: give three"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task(name, tmp_path, cache_dir=tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


def test_missing_data_say_what_to_fetch_and_where_to_put_it(tmp_path):
    for name, message in (
        ("listops", "no listops-1000 in .*: fetch the LRA release.*task.generate=true"),
        ("text", "no aclImdb in .*: fetch https://ai.stanford.edu"),
        ("retrieval", "no tsv_data in .*: fetch the LRA release.*task=imdb_same_movie"),
        ("imdb_same_movie", "no aclImdb in .*: fetch"),
        ("image", "no cifar-10-batches-py in .*: fetch .*cifar10_gray.npz"),
    ):
        for place, words in ((tmp_path, message), (tmp_path / "nowhere", "which is not a folder")):
            with pytest.raises(ValueError, match=words):
                load_task(name, place, cache_dir=tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_folders_are_found_below_lra_release_and_the_inner_ones_first(tmp_path):
    outer, inner = tmp_path / "lra_release", tmp_path / "lra_release" / "lra_release"
    (inner / "tsv_data").mkdir(parents=True)
    (outer / "tsv_data").mkdir()
    for data_dir in (tmp_path, outer, inner):
        assert find(data_dir, "tsv_data") == inner / "tsv_data"
    (tmp_path / "tsv_data").mkdir()
    assert find(tmp_path, "tsv_data") == tmp_path / "tsv_data"
    assert find(tmp_path, "aclImdb") is None


def test_pixel_orders_are_those_of_masks():
    grid = (8, 4)
    assert pixel_order(grid, "row").tolist() == list(range(32))
    assert pixel_order(grid, "tiles:2")[:5].tolist() == [0, 1, 4, 5, 2]
    assert pixel_order(grid, "tiles:1x2")[:5].tolist() == [0, 1, 2, 3, 4]
    assert pixel_order(grid, "tiles:2x1")[:5].tolist() == [0, 4, 1, 5, 2]
    for order in ("row", "hilbert", "morton", "tiles:4"):
        assert sorted(pixel_order(grid, order)) == list(range(32))
    np.testing.assert_array_equal(pixel_order(grid, "hilbert"), masks.hilbert(grid).order(32))


def test_best_constant_learns_on_train_and_is_scored_on_test():
    train = split(6, labels=np.array([1, 1, 1, 0, 0, 1]))
    test = split(4, labels=np.array([0, 0, 1, 1]))
    assert best_constant(train, test) == 0.5
    keys = np.array([7, 7, 7, 8, 8, 9]), np.array([8, 8, 7, 6])  # 6 is new: the majority
    assert best_constant(train, test, keys) == 1.0


def test_cached_arrays_are_made_once_for_a_key(tmp_path):
    made = []

    def make():
        made.append(1)
        return {"x": np.arange(3)}

    for key in ({"seed": 0}, {"seed": 0}, {"seed": 1}):
        assert cache.cached(tmp_path, "t", key, make)["x"].tolist() == [0, 1, 2]
    assert len(made) == len([*tmp_path.iterdir()]) == 2


def test_pad_cuts_and_shifts_bytes():
    flat, lengths = np.array([5, 6, 7, 9, 254], np.uint8), np.array([3, 0, 2])
    assert cache.pad(flat, lengths, 2, 4, as_bytes=False).tolist() == [
        [5, 6, 0, 0],
        [0] * 4,
        [9, 254, 0, 0],
    ]
    shifted = cache.pad(flat, lengths, 2, 2, as_bytes=True)
    assert (shifted.dtype, shifted.tolist()) == (np.uint8, [[6, 7], [0, 0], [10, 255]])
    wide = cache.pad(np.array([255, 0], np.uint8), np.array([2]), 2, 2, as_bytes=True)
    assert (wide.dtype, wide.tolist()) == (np.int16, [[256, 1]])
