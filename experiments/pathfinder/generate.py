"""Images by (seed, index), one or many at a time, and as arrays on disk.

An array on disk is filled by threads and survives interruptions.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from experiments.common.files import digest, read_array, write_whole
from experiments.common.work import progress, threads
from experiments.pathfinder.geometry import Spec, tables
from experiments.pathfinder.kernels import INFO, make_images

VERSION = 2  # of the images: raise it with every change of the image of a (seed, index)
RUN = 64  # images that a thread makes at a time: under a second, so Ctrl-C works
FLUSH = 32  # runs between two safe points

Shape = tuple[int, int, int]
MakeRun = Callable[[int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Images:
    """Consecutive images with what the generator knows about them."""

    pixels: np.ndarray  # uint8 (n, N, N)
    info: np.ndarray  # int64 (n, INFO), columns as named in render
    placed: np.ndarray  # int64 (n, paddles, 4): snake, direction, row, column of the paddle's start
    counts: np.ndarray  # int64 (n,): paddles of every image

    @property
    def labels(self) -> np.ndarray:
        return self.info[:, 0].astype(np.uint8)


def make(spec: Spec, seed: int, first: int, n: int, pixels: np.ndarray | None = None) -> Images:
    """Return images first .. first + n - 1 of a seed.

    They are the same however many are made at a time, and in however many threads.

    pixels: uint8 (n, N, N) to write them into. None makes a new array.
    """
    check_seed(seed)
    paddles = 2 * spec.contour + spec.distractors * spec.distractor_length
    images = Images(
        np.empty((n, spec.size, spec.size), np.uint8) if pixels is None else pixels,
        np.zeros((n, INFO), np.int64),
        np.zeros((n, paddles, 4), np.int64),
        np.zeros(n, np.int64),
    )
    for which, margin in enumerate(spec.margins):
        make_images(
            tables(spec, margin), which, len(spec.margins), seed, first, 2 * spec.seed_distance,
            spec.contour, spec.distractor_length, spec.distractors, spec.contrast,
            images.pixels, images.info, images.placed, images.counts,
        )  # fmt: skip
    return images


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1")


def on_disk(
    specs: Sequence[Spec],
    seed: int,
    first: int,
    n: int,
    cache_dir: Path,
) -> tuple[np.ndarray, np.ndarray]:
    """Return images first .. first + n - 1 of a seed and their labels, kept in `cache_dir`.

    The images are uint8 (n, N, N), mapped from the disk, and the labels uint8 (n,). They are made
    once. An interrupted call (Ctrl-C, kill) continues where it stopped.

    specs: of one size. Images take several in turn.
    """
    check_seed(seed)
    one, count = specs[0], len(specs)
    described = asdict(one) if count == 1 else [asdict(spec) for spec in specs]
    key = {"version": VERSION, "spec": described, "seed": seed, "first": first, "n": n}
    path = cache_dir / f"pathfinder{one.size}-{digest(key)}.npy"

    def run(start: int, pixels: np.ndarray) -> np.ndarray:
        if count == 1:
            return make(one, seed, first + start, len(pixels), pixels).labels
        labels = [
            make(specs[number % count], seed, number, 1, pixels[i : i + 1]).labels
            for i, number in enumerate(range(first + start, first + start + len(pixels)))
        ]
        return np.concatenate(labels)

    what = f"Pathfinder-{one.size}, contour {one.contour}"
    return filled(path, (n, one.size, one.size), run, what=what)


# ---- arrays on disk


def filled(
    path: Path, shape: Shape, make: MakeRun, *, workers: int | None = None, what: str = "images"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the array in `path` and its labels, and makes them if they are missing.

    Args:
        shape: (images, rows, columns).
        make: (first, pixels) fills `pixels` with the images from number `first`, and returns
            their labels. Called from several threads.

    Returns:
        uint8 `shape`, mapped from the disk and read-only, and uint8 (images,).

    The images are written to files named .part, and renamed when complete. A later call continues
    an incomplete file. If several processes need them, one makes them and the others wait.
    """
    labels_path = path.with_suffix(".labels.npy")
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock"), what):
                if not path.exists():
                    _fill(path, labels_path, shape, make, workers, what)
        except OSError as error:
            gib = np.prod(shape, dtype=np.int64) / 2**30
            raise ValueError(
                f"cannot write {path}, {gib:.2f} GiB ({error}): free some space or give another "
                "folder with cache_dir="
            ) from error
    pixels = read_array(path, f"delete it and {labels_path}", "r")
    labels = read_array(labels_path, f"delete it and {path}")
    if (pixels.shape, labels.shape) != (shape, shape[:1]):
        raise ValueError(f"{path} holds {pixels.shape}, not {shape}: delete it and {labels_path}")
    return pixels, labels


def _fill(
    path: Path, labels_path: Path, shape: Shape, make: MakeRun, workers: int | None, what: str
) -> None:
    part, labels_part = path.with_suffix(".part"), path.with_suffix(".labels.part")
    pixels, marks = _opened(part, shape), _opened(labels_part, shape[:1])
    if pixels is None or marks is None:  # new, or interrupted at once
        labels_part.unlink(missing_ok=True)
        pixels, marks = _created(part, shape), _created(labels_part, shape[:1])
    starts = [i for i in range(0, shape[0], RUN) if not marks[i : i + RUN].all()]
    done: list[tuple[int, np.ndarray]] = []

    def one(first: int) -> tuple[int, np.ndarray]:
        return first, make(first, pixels[first : first + RUN])

    def keep() -> None:
        pixels.flush()  # a mark says that the image is on disk
        for first, labels in done:
            marks[first : first + len(labels)] = labels + 1
        marks.flush()
        done.clear()

    try:
        with threads(workers) as pool:
            runs = pool.map(one, starts)
            for run in progress(runs, len(starts), f"{what}, {RUN} at a time"):
                done.append(run)
                if len(done) >= FLUSH:
                    keep()
    finally:
        keep()
    write_whole(labels_path, lambda file: np.save(file, marks - np.uint8(1)), "cache_dir")
    os.replace(part, path)  # last: it says that all is there
    labels_part.unlink()


def _created(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """Zeros, with space reserved on the disk."""
    try:
        array = open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        if hasattr(os, "posix_fallocate"):  # otherwise a write to a full disk ends the process
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return array


def _opened(path: Path, shape: tuple[int, ...]) -> np.memmap | None:
    try:
        array = open_memmap(path, mode="r+")
    except (OSError, ValueError, EOFError):
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: waiting for another process that makes them", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
