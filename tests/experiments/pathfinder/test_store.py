"""Arrays of images on disk: threads, interruptions, a full disk; statistics."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from experiments.pathfinder import store
from experiments.pathfinder.__main__ import measure
from experiments.pathfinder.generate import Images, make, on_disk
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.render import DISTRACTORS, INFO, LABEL, RESTARTS
from experiments.pathfinder.store import filled

SHAPE = (200, 4, 5)


def numbers(first, pixels):
    labels = (np.arange(first, first + len(pixels)) % 3).astype(np.uint8)
    pixels[:] = labels[:, None, None] + 10
    return labels


def assert_numbers(pixels, labels):
    expected = np.arange(SHAPE[0]) % 3
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_array_equal(pixels, np.broadcast_to(expected[:, None, None] + 10, SHAPE))


def test_generated_images_are_those_of_their_numbers(tmp_path):
    pixels, labels = on_disk([spec(32)], 3, 10, 150, tmp_path)
    expected = make(spec(32), 3, 10, 150)
    np.testing.assert_array_equal(pixels, expected.pixels)
    np.testing.assert_array_equal(labels, expected.labels)
    names = sorted(path.suffixes[-1] for path in tmp_path.iterdir())
    assert names == [".lock", ".npy", ".npy"]


@pytest.mark.parametrize(
    ("specs", "seed", "first"),
    [
        ([spec(32)], 4, 0),
        ([spec(32)], 3, 8),
        ([spec(32, 6)], 3, 0),
        ([spec(32, distractors=1)], 3, 0),
        ([spec(32), spec(32, distractors=1)], 3, 8),
    ],
)
def test_other_images_have_a_file_of_their_own(tmp_path, specs, seed, first):
    on_disk([spec(32)], 3, 0, 8, tmp_path)
    pixels, labels = on_disk(specs, seed, first, 8, tmp_path)
    for number, image, label in zip(range(first, first + 8), pixels, labels, strict=True):
        own = make(specs[number % len(specs)], seed, number, 1)
        assert (image == own.pixels[0]).all() and label == own.labels[0]


def test_made_once_and_read_only(tmp_path):
    path = tmp_path / "images.npy"
    assert_numbers(*filled(path, SHAPE, numbers))
    pixels, labels = filled(path, SHAPE, lambda *_: pytest.fail("made again"))
    assert_numbers(pixels, labels)
    with pytest.raises(ValueError, match="read-only"):
        pixels[0] = 1
    with pytest.raises(ValueError, match="delete it"):
        filled(path, (9, 4, 5), numbers)


@pytest.mark.parametrize("flush", [1, store.FLUSH])
def test_an_interruption_keeps_what_was_made(tmp_path, monkeypatch, flush):
    monkeypatch.setattr(store, "FLUSH", flush)
    path, made = tmp_path / "images.npy", []

    def interrupted_once(first, pixels):
        made.append(first)
        if len(made) == 3:
            raise KeyboardInterrupt
        return numbers(first, pixels)

    with pytest.raises(KeyboardInterrupt):
        filled(path, SHAPE, interrupted_once, workers=1)
    assert not path.exists() and made[:3] == [0, 64, 128]
    before = len(made)
    assert_numbers(*filled(path, SHAPE, interrupted_once, workers=1))
    assert 128 in made[before:] and 0 not in made[before:]


def test_killed_between_the_last_two_renames(tmp_path, monkeypatch):
    path, rename = tmp_path / "images.npy", os.replace

    def killed(old, new):
        if Path(new) == path:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(store.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        filled(path, SHAPE, numbers)
    monkeypatch.undo()
    assert_numbers(*filled(path, SHAPE, lambda *_: pytest.fail("made again")))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"No space left.*cache_dir"):
        filled(tmp_path / "images.npy", SHAPE, numbers)
    assert [path.name for path in tmp_path.iterdir()] == ["images.lock"]


def test_of_two_at_once_one_makes_them(tmp_path):
    made = []

    def slow(first, pixels):
        made.append(first)
        time.sleep(0.05)
        return numbers(first, pixels)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(filled, tmp_path / "images.npy", SHAPE, slow) for _ in range(2)]
        for job in jobs:
            assert_numbers(*job.result())
    assert sorted(made) == [0, 64, 128, 192]


# ---- statistics, and the program


def test_statistics_have_means_shares_and_standard_errors():
    pixels = np.zeros((4, 2, 2), np.uint8)
    pixels[0], pixels[1, 0] = 8, 4  # means of 8, 2, 0 and 0
    info = np.zeros((4, INFO), np.int64)
    info[:, LABEL], info[:, DISTRACTORS], info[:, RESTARTS] = (1, 0, 0, 0), (1, 2, 3, 4), 7
    found = measure(Images(pixels, info, np.zeros((4, 1, 4), np.int64), np.zeros(4, np.int64)))
    expected = {"images": 4, "mean": 2.5, "non-zero": 1.5, "positive": 0.25, "distractors": 2.5}
    expected |= {"restarts": 7, "std": ((4 * 64 + 2 * 16) / 16 - 2.5**2) ** 0.5}
    expected["mean error"] = (68 / 4 - 2.5**2) ** 0.5 / 2
    expected["non-zero error"] = (20 / 4 - 1.5**2) ** 0.5 / 2
    assert found == pytest.approx(expected)


def test_command(tmp_path, run_program):
    words = f"size=[32,256] examples=20 statistics=true pictures={tmp_path}"
    status, printed, _ = run_program("pathfinder.__main__", *words.split())
    assert status == 0
    assert "curv_contour_length_14  generated" in printed and "official" in printed
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pathfinder-32.png", "pathfinder-256.png"}
