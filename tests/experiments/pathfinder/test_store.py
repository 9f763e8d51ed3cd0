"""Arrays of images on disk: threads, interruptions, a full disk."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from experiments.pathfinder import generate
from experiments.pathfinder.generate import RUN, filled, make, on_disk
from experiments.pathfinder.geometry import spec

SHAPE = (200, 4, 5)


def numbers(first, pixels):
    labels = (np.arange(first, first + len(pixels)) % 3).astype(np.uint8)
    pixels[:] = labels[:, None, None] + 10
    return labels


def assert_numbers(pixels, labels):
    expected = np.arange(SHAPE[0]) % 3
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_array_equal(pixels, np.broadcast_to(expected[:, None, None] + 10, SHAPE))


def test_other_images_have_a_file_of_their_own(tmp_path):
    usual = spec(32)
    for specs, seed, first, n in (
        ([usual], 3, 0, 8), ([usual], 4, 0, 8), ([usual], 3, 8, 8), ([spec(32, 6)], 3, 0, 8),
        ([usual, spec(32, distractors=1)], 3, 7, RUN + 3),  # in turn, in several threads
    ):  # fmt: skip
        pixels, labels = on_disk(specs, seed, first, n, tmp_path)
        for number, image, label in zip(range(first, first + n), pixels, labels, strict=True):
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


@pytest.mark.parametrize("flush", [1, generate.FLUSH])
def test_an_interruption_keeps_what_was_made(tmp_path, monkeypatch, flush):
    monkeypatch.setattr(generate, "FLUSH", flush)
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

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        filled(path, SHAPE, numbers)
    monkeypatch.undo()
    assert_numbers(*filled(path, SHAPE, lambda *_: pytest.fail("made again")))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
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
