"""Image: CIFAR-10 in gray as a sequence of 1,024 pixels (Krizhevsky, 2009).

Reads the official binary version, the official Python version, or a NumPy file of gray images. As
in LRA, the last tenth of the train images is val.
"""

import pickletools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments.common.files import read_arrays, read_bytes, reading
from experiments.lra.tasks.cache import Arrays, cached, fingerprint
from experiments.lra.tasks.task import (
    SPLITS,
    Split,
    Task,
    best_constant,
    find,
    missing,
    pixel_order,
    source,
)

GRID = (32, 32)
CLASSES = 10
FOLDER, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
RECORDS = 10_000  # of a file
PIXELS = 3 * 32 * 32  # bytes of an image: red, green, blue
GRAY = np.array([0.2989, 0.5870, 0.1140], np.float32)
ARRAYS = ("cifar10_gray.npz", "cifar10_gray.npz.xz")
NAMES = "x_train, y_train, x_test, y_test"
SIZES = (45_000, 5_000, 10_000)
LEAST = 10  # train images, of which a tenth is val

ReadBatch = Callable[[Path], tuple[np.ndarray, np.ndarray]]


def load(
    data_dir: Path, *, cache_dir: Path, seed: int = 0, order: str = "row", limit: int | None = None
) -> Task:
    """The Image task, from `cifar-10-batches-{bin,py}` or `cifar10_gray.npz[.xz]`.

    Args:
        order: of the pixels: row, hilbert, morton or tiles:SIZE.
        limit: the first examples of each split only.
    """
    places = pixel_order(GRID, order)
    data = _images(data_dir, cache_dir)
    x, y = data["x_train"], data["y_train"]
    cut = len(x) * 9 // 10
    parts = {
        "train": (x[:cut], y[:cut]),
        "val": (x[cut:], y[cut:]),
        "test": (data["x_test"], data["y_test"]),
    }
    splits = {}
    for name in SPLITS:
        images, labels = (array[:limit] for array in parts[name])
        tokens = images.reshape(len(images), -1)
        splits[name] = Split(tokens if order == "row" else tokens[:, places], labels)
    return Task(
        name="image",
        source=source("CIFAR-10 (gray)", splits, SIZES),
        classes=CLASSES,
        vocab=256,
        splits=splits,
        grid=GRID,
        baselines={"majority": best_constant(splits["train"], splits["test"])},
    )


def _images(data_dir: Path, cache_dir: Path) -> Arrays:
    """x_train, y_train, x_test, y_test."""
    places = (FOLDER, PYTHON, *ARRAYS)
    path = next((path for name in places if (path := find(data_dir, name))), None)
    if path is None:
        fetch = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
        stand_in = f"{PYTHON}, or {ARRAYS[0]}: gray images in {NAMES}"
        raise missing(data_dir, FOLDER, fetch=fetch, stand_in=stand_in)
    files, make = [path], partial(_read_arrays, path)
    if path.is_dir():
        ending, read = (".bin", _read_binary) if path.name == FOLDER else ("", _read_pickled)
        halves = {
            half: [path / f"{name}{ending}" for name in names] for half, names in BATCHES.items()
        }
        files, make = [*halves["train"], *halves["test"]], partial(_read_batches, halves, read)
    for file in files:
        if not file.is_file():
            raise ValueError(f"no {file.name} in {file.parent}: unpack {path.name} again")
    return cached(cache_dir, "image", {"files": fingerprint(files)}, make)


def _read_batches(halves: Mapping[str, Sequence[Path]], read: ReadBatch) -> Arrays:
    data = {}
    for half, files in halves.items():
        batches = [read(file) for file in files]
        data[f"x_{half}"] = np.concatenate([gray(x.reshape(-1, 3, *GRID)) for x, _ in batches])
        data[f"y_{half}"] = np.concatenate([y.astype(np.int64) for _, y in batches])
        for file, (_, labels) in zip(files, batches, strict=True):
            _check_labels(file, labels)
    return data


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Colours and labels of a file of the binary version: records of a label and an image."""
    size, whole = path.stat().st_size, RECORDS * (1 + PIXELS)
    if size != whole:
        raise ValueError(f"{path} has {size:,} bytes instead of {whole:,}: fetch {FOLDER} again")
    records = np.fromfile(path, np.uint8).reshape(RECORDS, 1 + PIXELS)
    return records[:, 1:], records[:, 0]


def _read_pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Colours and labels of a file of the Python version, which is a pickle.

    It is not unpickled. Its opcodes are listed, and two of their arguments are what is wanted: the
    only text of the size of all pixels, and the small integers after the text `labels`.
    """
    pixels, labels, key = [], [], ""
    again = f"fetch {PYTHON} again"
    with reading(path, again, "is not a batch of CIFAR-10, or it is damaged"):
        for code, argument, _ in pickletools.genops(read_bytes(path, again)):
            if isinstance(argument, str) and len(argument) == RECORDS * PIXELS:
                pixels.append(np.frombuffer(argument.encode("latin-1"), np.uint8))
            elif isinstance(argument, str):
                key = argument
            elif key == "labels" and code.name == "BININT1":
                labels.append(argument)
        (found,) = pixels
        return found.reshape(RECORDS, PIXELS), np.array(labels, np.uint8).reshape(RECORDS)


def gray(images: np.ndarray) -> np.ndarray:
    """Gray images uint8 (n, rows, columns) of uint8 (n, 3, rows, columns).

    Rounds as TensorFlow's rgb_to_grayscale: in [0, 1], then times 255.5 and cut off.
    """
    levels = np.einsum("nchw,c->nhw", images.astype(np.float32) / np.float32(255), GRAY)
    return (levels * np.float32(255.5)).astype(np.uint8)


def _read_arrays(path: Path) -> Arrays:
    """The four arrays of an npz file, checked."""
    arrays = read_arrays(path, f"give {NAMES}")
    if missing := [name for name in NAMES.split(", ") if name not in arrays]:
        raise ValueError(f"{path}: no {', '.join(missing)}; it holds {NAMES}")
    if len(arrays["x_train"]) < LEAST:
        count = len(arrays["x_train"])
        raise ValueError(f"{path}: x_train has {count} images; val needs {LEAST} or more of them")
    for half in BATCHES:
        x, y = arrays[f"x_{half}"], arrays[f"y_{half}"]
        if x.dtype != np.uint8 or x.shape[1:] != GRID or not len(x):
            raise ValueError(f"{path}: x_{half} is {x.dtype} {x.shape}, not uint8 (n, 32, 32)")
        if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
            raise ValueError(
                f"{path}: y_{half} is {y.dtype} {y.shape}, not whole numbers {x.shape[:1]}"
            )
        arrays[f"y_{half}"] = y.astype(np.int64)
        _check_labels(path, arrays[f"y_{half}"])
    return arrays


def _check_labels(path: Path, labels: np.ndarray) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= CLASSES))
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"{path}: the label of image {i} is {labels[i]}, not 0 to {CLASSES - 1}")
