"""Image: CIFAR-10 in gray as a sequence of 1,024 pixels (Krizhevsky, 2009).

Reads the official binary version, or a NumPy file of gray images. As in LRA, the last tenth of the
train images is val.
"""

import io
import lzma
import zipfile
from functools import partial
from pathlib import Path

import numpy as np

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
FOLDER = "cifar-10-batches-bin"
BATCHES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
RECORDS = 10_000  # of a file
RECORD = 1 + 3 * 32 * 32  # bytes: label, red, green, blue
GRAY = np.array([0.2989, 0.5870, 0.1140], np.float32)
ARRAYS = ("cifar10_gray.npz", "cifar10_gray.npz.xz")
SIZES = (45_000, 5_000, 10_000)


def load(
    data_dir: Path, *, cache_dir: Path, seed: int = 0, order: str = "row", limit: int | None = None
) -> Task:
    """The Image task, from `cifar-10-batches-bin` or `cifar10_gray.npz[.xz]`.

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
    path = next((path for name in (FOLDER, *ARRAYS) if (path := find(data_dir, name))), None)
    if path is None:
        fetch = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
        stand_in = f"{ARRAYS[0]}: gray images in x_train, y_train, x_test, y_test"
        raise missing(data_dir, FOLDER, fetch=fetch, stand_in=stand_in)
    in_batches = path.name == FOLDER
    files = [path / name for names in BATCHES.values() for name in names] if in_batches else [path]
    for file in files:
        if not file.is_file():
            raise ValueError(f"no {file.name} in {file.parent}: unpack {FOLDER} again")
    make = partial(_read_batches if in_batches else _read_arrays, path)
    return cached(cache_dir, "image", {"files": fingerprint(files)}, make)


def _read_batches(folder: Path) -> Arrays:
    data = {}
    for half, files in BATCHES.items():
        batches = [_read_batch(folder / file) for file in files]
        data[f"x_{half}"] = np.concatenate([x for x, _ in batches])
        data[f"y_{half}"] = np.concatenate([y for _, y in batches])
    return data


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Gray images and labels of a file of the binary version."""
    size = path.stat().st_size
    if size != RECORDS * RECORD:
        raise ValueError(
            f"{path} has {size:,} bytes instead of {RECORDS * RECORD:,}: fetch {FOLDER} again"
        )
    records = np.fromfile(path, np.uint8).reshape(RECORDS, RECORD)
    labels = records[:, 0].astype(np.int64)
    _check_labels(path, labels)
    return gray(records[:, 1:].reshape(-1, 3, *GRID)), labels


def gray(images: np.ndarray) -> np.ndarray:
    """Gray images uint8 (n, rows, columns) of uint8 (n, 3, rows, columns).

    Rounds as TensorFlow's rgb_to_grayscale: in [0, 1], then times 255.5 and cut off.
    """
    levels = np.einsum("nchw,c->nhw", images.astype(np.float32) / np.float32(255), GRAY)
    return (levels * np.float32(255.5)).astype(np.uint8)


def _read_arrays(path: Path) -> Arrays:
    """The four arrays of an npz file, checked. Nothing pickled is ever loaded."""
    try:
        data = lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for half in BATCHES for name in (f"x_{half}", f"y_{half}")}
    except KeyError as error:
        raise ValueError(f"{path}: {error}; it holds x_train, y_train, x_test, y_test") from error
    except (ValueError, OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an npz file of plain arrays: {error}") from error
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
