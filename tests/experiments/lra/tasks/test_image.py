"""Image: CIFAR-10, made small, and files of gray arrays."""

import io
import lzma
import os
import pickle

import numpy as np
import pytest

import masks
from experiments.lra.tasks import image
from experiments.lra.tasks.task import load_task


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Twenty records a file in cifar-10-batches-py, and what is in them."""
    monkeypatch.setattr(image, "RECORDS", 20)
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    data = {}
    for name in [name for names in image.BATCHES.values() for name in names]:
        rows = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(20) % 10
        trap = pickle.dumps(Trap(tmp_path / "trapped"), 2)[2:-1]
        (folder / name).write_bytes(pickled(rows, b"U\x04trap", trap))
        data[name] = rows
    return data


class Trap:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def pickled(rows, *more):
    """A batch as Python 2 pickled it, with opcodes before its end."""
    labels = b"".join(b"K" + bytes([label]) for label in rows[:, 0])
    size = len(rows).to_bytes(2, "little")
    return b"".join((
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x05K\x01K\x02Kq\x03U\x06labelsq\x04](", labels,
        b"eU\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K",
        b"\x01M", size, b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN",
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T", rows[:, 1:].size.to_bytes(4, "little"),
        rows[:, 1:].tobytes(), b"tbU\x09filenames](U\x05a.pnge", *more, b"u.",
    ))  # fmt: skip


def load(root, **options):
    return load_task("image", root, cache_dir=root / "cache", **options)


def test_colours_become_gray_and_the_last_tenth_validates(tmp_path, records):
    task = load(tmp_path)
    assert task.source == "CIFAR-10 (gray), 90 + 10 + 20 examples"
    assert (task.vocab, task.length, task.grid) == (256, 1024, (32, 32))
    train = np.concatenate([records[name] for name in image.BATCHES["train"]])
    for name, rows in (("train", train[:90]), ("val", train[90:]), ("test", records["test_batch"])):
        split = task.splits[name]
        assert split.lengths is None and split.tokens.dtype == np.uint8
        assert split.labels.tolist() == rows[:, 0].tolist()
        planes = rows[:, 1:].reshape(-1, 3, 1024) / 255
        levels = planes[:, 0] * 0.2989 + planes[:, 1] * 0.5870 + planes[:, 2] * 0.1140
        assert (np.abs(split.tokens - np.floor(levels * 255.5)) <= 1).all()
        assert (split.tokens == np.floor(levels * 255.5)).mean() > 0.999  # float32 rounds
    assert task.baselines["majority"] == pytest.approx(0.1)


def test_pickles_are_read_as_they_are_and_never_unpickled(tmp_path, records):
    path, rows = tmp_path / "cifar-10-batches-py" / "data_batch_2", records["data_batch_1"]
    whole = pickle.loads(pickled(rows), encoding="bytes")
    assert whole[b"labels"] == rows[:, 0].tolist() and (whole[b"data"] == rows[:, 1:]).all()
    load(tmp_path)
    assert not (tmp_path / "trapped").exists()
    for content in (pickled(rows[:7]), pickled(rows)[:-50], pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="data_batch_2"):
            load(tmp_path)


def test_pixels_come_in_the_order_that_is_asked_for(tmp_path, records):
    row = load(tmp_path).splits["test"].tokens
    tokens = load(tmp_path, order="hilbert").splits["test"].tokens
    np.testing.assert_array_equal(tokens, row[:, masks.hilbert((32, 32)).order(1024)])
    assert len(list((tmp_path / "cache").iterdir())) == 1


# ---- arrays


def arrays(**changes):
    rng = np.random.default_rng(0)
    values = {
        "x_train": rng.integers(0, 256, (50, 32, 32), dtype=np.uint8),
        "y_train": np.arange(50) % 10,
        "x_test": rng.integers(0, 256, (10, 32, 32), dtype=np.uint8),
        "y_test": np.arange(10, dtype=np.uint8),
    }
    return {key: value for key, value in (values | changes).items() if value is not None}


def packed(values):
    file = io.BytesIO()
    np.savez(file, **values)
    return file.getvalue()


def test_arrays_are_read_packed_or_not(tmp_path):
    data = packed(arrays())
    for name, content in zip(image.ARRAYS, (data, lzma.compress(data)), strict=True):
        (tmp_path / name).write_bytes(content)
        task = load(tmp_path)
        assert [len(task.splits[key]) for key in ("train", "val", "test")] == [45, 5, 10]
        expected = arrays()["x_train"][45:].reshape(5, 1024)
        np.testing.assert_array_equal(task.splits["val"].tokens, expected)
        np.testing.assert_array_equal(load(tmp_path, limit=3).splits["train"].labels, [0, 1, 2])
        (tmp_path / name).unlink()


def test_arrays_that_do_not_fit_are_named(tmp_path):
    trap = np.array([Trap(tmp_path / "trapped")], object)
    for changes, words in (
        ({"y_test": None}, "y_test"),
        ({"x_test": np.zeros((10, 32, 31), np.uint8)}, r"x_test is uint8 \(10, 32, 31\)"),
        ({"y_test": np.zeros(9, np.int64)}, r"y_test \(9,\)"),
        ({"x_train": trap}, "is not an npz file of plain arrays"),
    ):
        (tmp_path / "cifar10_gray.npz").write_bytes(packed(arrays(**changes)))
        with pytest.raises(ValueError, match=rf"cifar10_gray\.npz.* {words}"):
            load(tmp_path)
    assert not (tmp_path / "trapped").exists() and not (tmp_path / "cache").exists()
