"""Images by (seed, index), one or many at a time, and as arrays on disk, made by threads."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.lib.format import open_memmap

from experiments.common.files import digest, read_array
from experiments.common.work import cores, progress
from experiments.pathfinder.geometry import Spec, tables
from experiments.pathfinder.kernels import INFO, make_images

VERSION = 2  # of the images: raise it with every change of the image of a (seed, index)
RUN = 64  # images that a thread makes at a time: under a second, so Ctrl-C works

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


def on_disk(
    specs: Sequence[Spec], seed: int, first: int, n: int, cache_dir: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Return images first .. first + n - 1 of a seed and their labels, kept in `cache_dir`.

    The images are uint8 (n, N, N), mapped from the disk, and the labels uint8 (n,).

    specs: of one size. Images take several in turn.
    """
    one, count = specs[0], len(specs)
    described = asdict(one) if count == 1 else [asdict(spec) for spec in specs]
    key = {"version": VERSION, "spec": described, "seed": seed, "first": first, "n": n}
    path = cache_dir / f"pathfinder{one.size}-{digest(key)}.npy"

    def run(start: int, pixels: np.ndarray) -> np.ndarray:
        labels = [
            make(specs[number % count], seed, number, 1, pixels[i : i + 1]).labels
            for i, number in enumerate(range(first + start, first + start + len(pixels)))
        ]
        return np.concatenate(labels)

    what = f"Pathfinder-{one.size}, contour {one.contour}"
    return filled(path, (n, one.size, one.size), run, what=what)


# ---- arrays on disk


def filled(
    path: Path, shape: Shape, make: MakeRun, *, what: str = "images"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the array in `path` and its labels; make them if they are missing.

    Args:
        shape: (images, rows, columns).
        make: (first, pixels) fills `pixels` with the images from number `first`, and returns
            their labels. Called from several threads.

    Returns:
        uint8 `shape`, mapped from the disk and read-only, and uint8 (images,).
    """
    labels_path = path.with_suffix(".labels.npy")
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size, free = math.prod(shape), shutil.disk_usage(path.parent).free
            if size > free:  # a mapped file on a full disk ends the process
                raise OSError(f"{free / 2**30:.2f} GiB are free")
            with TemporaryDirectory(dir=path.parent) as folder:
                parts = _fill(Path(folder), shape, make, what)
                for part, place in zip(parts, (labels_path, path), strict=True):
                    os.replace(part, place)
        except OSError as error:
            raise ValueError(
                f"cannot write {path}, {math.prod(shape) / 2**30:.2f} GiB ({error}): free some "
                "space or give another folder with cache_dir="
            ) from error
    pixels = read_array(path, f"delete it and {labels_path}", "r")
    return pixels, read_array(labels_path, f"delete it and {path}")


def _fill(folder: Path, shape: Shape, make: MakeRun, what: str) -> tuple[Path, Path]:
    """Make all images; return the files of their labels and pixels."""
    labels_part, part = folder / "labels.npy", folder / "pixels.npy"
    pixels, starts = open_memmap(part, "w+", np.uint8, shape), range(0, shape[0], RUN)
    with ThreadPoolExecutor(cores()) as pool:  # numba releases the interpreter's lock
        try:
            runs = pool.map(lambda first: make(first, pixels[first : first + RUN]), starts)
            labels = [*progress(runs, len(starts), f"{what}, {RUN} at a time")]
        finally:  # after an error or Ctrl-C too, what has not begun is dropped
            pool.shutdown(cancel_futures=True)
    pixels.flush()
    np.save(labels_part, np.concatenate(labels))
    return labels_part, part
