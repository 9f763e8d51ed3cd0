"""Image: CIFAR-10 in gray as a sequence of 1,024 pixels (Krizhevsky, 2009).

Reads the official Python version, as torchvision fetches it, or a NumPy file of gray images. As in
LRA, the last tenth of the train images is val.
"""

import pickletools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments.common.files import read_arrays, read_bytes, reading
from experiments.lra.tasks import task

GRID = (32, 32)
CLASSES = 10
FOLDER = "cifar-10-batches-py"
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
RECORDS = 10_000  # of a file
PIXELS = 3 * 32 * 32  # bytes of an image: red, green, blue
GRAY = np.array([0.2989, 0.5870, 0.1140], np.float32)
ARRAYS = ("cifar10_gray.npz", "cifar10_gray.npz.xz")
NAMES = "x_train, y_train, x_test, y_test"
SIZES = (45_000, 5_000, 10_000)


def load(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    order: str = "row",
    pad_black: bool = False,
    limit: int | None = None,
) -> task.Task:
    """Return the Image task, from `cifar-10-batches-py` or `cifar10_gray.npz[.xz]`.

    Args:
        order: of the pixels: row, hilbert, morton or tiles:SIZE.
        pad_black: pixels of value 0 are padding, as in google's code and the Nystromformer port.
        limit: the first examples of each split only.
    """
    places = task.pixel_order(GRID, order)
    data = _images(data_dir, cache_dir)
    train = data["x_train"], data["y_train"]
    cut = len(train[0]) * 9 // 10
    parts = {"train": [x[:cut] for x in train], "val": [x[cut:] for x in train]}
    parts["test"] = [data["x_test"], data["y_test"]]
    splits = {}
    for name, arrays in parts.items():
        images, labels = (array[:limit] for array in arrays)
        tokens = images.reshape(len(images), -1)
        splits[name] = task.Split(tokens if order == "row" else tokens[:, places], labels)
    return task.Task(
        name="image",
        source=task.source("CIFAR-10 (gray)", splits, SIZES),
        classes=CLASSES,
        vocab=256,
        splits=splits,
        grid=GRID,
        pad_black=pad_black,
    )


def _images(data_dir: Path, cache_dir: Path) -> task.Arrays:
    """Return x_train, y_train, x_test, y_test."""
    fetch = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    stand_in = f"{ARRAYS[0]}: gray images in {NAMES}"
    path = task.require(data_dir, (FOLDER, *ARRAYS), fetch=fetch, stand_in=stand_in)
    files, read = [path], partial(_read_arrays, path)
    if path.is_dir():
        halves = {half: [path / name for name in names] for half, names in BATCHES.items()}
        files, read = [*halves["train"], *halves["test"]], partial(_read_batches, halves)
    for file in files:
        if not file.is_file():
            raise ValueError(f"no {file.name} in {file.parent}: unpack {path.name} again")
    return task.cached(cache_dir, "image", {"files": task.fingerprint(files)}, read)


def _read_batches(halves: Mapping[str, Sequence[Path]]) -> task.Arrays:
    data = {}
    for half, files in halves.items():
        batches = [_read_pickled(file) for file in files]
        data[f"x_{half}"] = np.concatenate([gray(x.reshape(-1, 3, *GRID)) for x, _ in batches])
        data[f"y_{half}"] = np.concatenate([y.astype(np.int64) for _, y in batches])
    return data


def _read_pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return colours and labels of a file of the Python version, which is a pickle.

    It is not unpickled. Its opcodes are listed, and two of their arguments are what is wanted: the
    only text of the size of all pixels, and the small integers after the text `labels`.
    """
    pixels, labels, key = [], [], ""
    again = f"fetch {FOLDER} again"
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
    """Return gray images uint8 (n, rows, columns) of uint8 (n, 3, rows, columns).

    Rounds as TensorFlow's rgb_to_grayscale: in [0, 1], then times 255.5 and cut off.
    """
    levels = np.einsum("nchw,c->nhw", images.astype(np.float32) / np.float32(255), GRAY)
    return (levels * np.float32(255.5)).astype(np.uint8)


def _read_arrays(path: Path) -> task.Arrays:
    """Return the four arrays of an npz file, checked."""
    arrays = read_arrays(path, f"give {NAMES}")
    if missing := [name for name in NAMES.split(", ") if name not in arrays]:
        raise ValueError(f"{path}: no {', '.join(missing)}; it holds {NAMES}")
    for half in BATCHES:
        x, y = arrays[f"x_{half}"], arrays[f"y_{half}"]
        if x.dtype != np.uint8 or x.shape[1:] != GRID or y.shape != x.shape[:1]:
            raise ValueError(
                f"{path}: x_{half} is {x.dtype} {x.shape} and y_{half} {y.shape}: give uint8 "
                "(n, 32, 32) and (n,)"
            )
        arrays[f"y_{half}"] = y.astype(np.int64)
    return arrays
