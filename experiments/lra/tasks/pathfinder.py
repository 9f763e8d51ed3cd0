"""Pathfinder 32, 64, 128 (Path-X) and 256: do two marks lie on the ends of the same contour?

Reads the release's folders, pathfinderN/<level>/{imgs/<k>/sample_<i>.png,metadata/<k>.npy}, or
generates images of the same distribution (experiments.pathfinder). In both cases the cache holds
the pixels as plain arrays, which are mapped into memory.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.common.config import choose
from experiments.common.files import digest, reading
from experiments.lra.tasks import task
from experiments.pathfinder.generate import VERSION as IMAGES
from experiments.pathfinder.generate import filled, on_disk
from experiments.pathfinder.geometry import LEVELS, spec

VERSION = 3  # of the cache of the release
SIZES = (160_000, 20_000, 20_000)  # of a level
GREY = ("L", "P", "RGB", "1")  # modes of PNG files that hold 8 bits of grey, or fewer
# The release's one broken file: there, but empty.
EMPTY = ("pathfinder32/curv_baseline", "imgs/0/sample_172.png")
STREAM = 2**40  # the most images of a split: the sizes of splits do not affect each other


# of the metadata of an image: its path below the folder of the level, its number, its label
ENTRY = re.compile(r"(imgs/\d+) (sample_\d+\.png) \S+ ([01])( |$)")


def load(
    size: int,
    data_dir: str | Path,
    *,
    cache_dir: str | Path,
    seed: int = 0,
    generate: bool = False,
    examples: Sequence[int] = SIZES,
    difficulty: int = 14,
    strokes: float | list[float] | None = None,
    margins: int | list[int] | None = None,
    distractors: int | None = None,
    order: str = "row",
    pad_black: bool = False,
    limit: int | None = None,
) -> task.Task:
    """Return the Pathfinder task of one size; the pixels are the tokens.

    Args:
        seed: of generated images. The release is split in its order, 80 : 10 : 10.
        generate: make `examples` (train, val, test) images instead of reading the release. An image
            depends only on the seed, its split and its number.
        difficulty: contour length 6, 9 or 14, the release's easy, intermediate and hard levels.
        strokes: generate with the strokes and marks of another size (`geometry.spec`). Images
            take those of a list in turn.
        margins, distractors: generate with other gaps and another number (`geometry.spec`).
        order: of the pixels, see `pixel_order`.
        pad_black: pixels of value 0 are padding, as in google's code and the Nystromformer port.
        limit: the first images of each split only; others are neither read nor made.

    Raises:
        ValueError: data are missing or broken; names the file, the line and the remedy.
    """
    drawn: dict[str, Any] = {"strokes": strokes, "margins": margins, "distractors": distractors}
    for name, value in drawn.items():
        if value is not None and not generate:
            raise ValueError(f"{name}={value} needs generate=true")
    choose("difficulty", difficulty, LEVELS)
    kinds = strokes if isinstance(strokes, list) else [strokes]
    if not kinds:
        raise ValueError("strokes=[]: give at least one, or null")
    looks: list[dict[str, Any]] = [drawn | {"strokes": kind} for kind in kinds]
    specs = [spec(size, difficulty, **look) for look in looks]
    pixel = task.pixel_order((size, size), order)
    cache = Path(cache_dir)
    if generate:
        arrays = {}
        for i, (name, n) in enumerate(zip(task.SPLITS, task.split_sizes(examples), strict=True)):
            n = n if limit is None else min(n, limit)
            arrays[name] = on_disk(specs, seed, i * STREAM, n, cache)
    else:
        arrays = _release(size, difficulty, Path(data_dir), cache, limit)
    splits = {}
    for name, (images, labels) in arrays.items():
        tokens = images.reshape(len(images), -1)
        tokens = tokens if order == "row" else np.take(tokens, pixel, 1)
        splits[name] = task.Split(tokens, labels.astype(np.int64))
    empty = f"pathfinder{size}/{LEVELS[difficulty]}" == EMPTY[0] and len(splits["train"]) < SIZES[0]
    sizes = (SIZES[0] - empty, *SIZES[1:])
    return task.Task(
        name=f"pathfinder{size}",
        source=f"generated v{IMAGES}" if generate else task.source("official", splits, sizes),
        classes=2,
        vocab=256,
        splits=splits,
        grid=(size, size),
        pad_black=pad_black,
    )


# ---- the release


def _release(
    size: int, difficulty: int, data_dir: Path, cache: Path, limit: int | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the images and labels of each split, in the order of the release, 80 : 10 : 10.

    They are cached by their metadata, and the sizes and times of the images.
    """
    name, stand_in = f"pathfinder{size}", "task.generate=true"
    root = task.require(data_dir, name, fetch=task.RELEASE, stand_in=stand_in)
    level = root / LEVELS[difficulty]
    entries: dict[str, int] = {}
    for file in sorted(level.glob("metadata/[0-9]*.npy"), key=lambda file: int(file.stem)):
        entries |= read_metadata(file)
    if EMPTY[0] == f"{root.name}/{level.name}":
        broken = level / EMPTY[1]
        if broken.exists() and not broken.stat().st_size:
            entries.pop(EMPTY[1], None)
    if len(entries) < 10:
        raise ValueError(f"{level} has {len(entries)} images: too few for 80 : 10 : 10")
    ends = [0, len(entries) * 8 // 10, len(entries) * 9 // 10, len(entries)]
    arrays = {}
    for name, first, end in zip(task.SPLITS, ends, ends[1:], strict=False):
        part = list(entries.items())[first:end][:limit]
        try:
            images = task.fingerprint([level / image for image, _ in part])
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: fetch it again") from error
        key = {"version": VERSION, "labels": [label for _, label in part], "images": images}
        path = cache / f"{root.name}-official-{name}-{len(part)}-{digest(key)}.npy"
        make = partial(_decode, level, part)
        what = f"Pathfinder-{size}, official {name} images"
        arrays[name] = filled(path, (len(part), size, size), make, what=what)
    return arrays


def read_metadata(file: Path) -> list[tuple[str, int]]:
    """Return path and label of the images of a metadata file, which is text."""
    with reading(file, task.AGAIN, "is not a text of `imgs/<k> sample_<i>.png <i> <0 or 1> ...`"):
        found = [ENTRY.match(line) for line in file.read_text("ascii").splitlines()]
        return [(f"{one[1]}/{one[2]}", int(one[3])) for one in found]  # type: ignore[index]


def _decode(
    level: Path, entries: Sequence[tuple[str, int]], first: int, pixels: np.ndarray
) -> np.ndarray:
    part = entries[first : first + len(pixels)]
    for image, (path, _) in zip(pixels, part, strict=True):
        image[:] = _read(level / path, image.shape)
    return np.array([label for _, label in part], np.uint8)


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    with reading(path, "fetch it again"), Image.open(path) as image:
        if image.size != shape[::-1] or image.mode not in GREY:
            raise ValueError(f"it is {image.mode} {image.size}, and not a grey image {shape}")
        return np.asarray(image.convert("L"))
