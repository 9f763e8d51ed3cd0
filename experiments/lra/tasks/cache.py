"""Arrays kept on disk between runs, written whole or not at all."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.files import DamagedFile, digest, read_arrays, write_whole
from experiments.lra.tasks.task import Split

Arrays = dict[str, np.ndarray]
FORMAT = 1  # of the arrays of all tasks


def cached(
    cache_dir: Path, name: str, key: Mapping[str, Any], make: Callable[[], Arrays]
) -> Arrays:
    """The arrays of `make`, read from cache_dir/NAME-DIGEST.npz if they were made for `key` before.

    The file is written atomically. One that cannot be read is made again.
    """
    path = cache_dir / f"{name}-{digest({'format': FORMAT, **key})}.npz"
    if path.exists():
        try:
            return read_arrays(path, "making it again")
        except DamagedFile as error:
            print(error, file=sys.stderr)
    arrays = make()
    write_whole(path, lambda file: np.savez(file, **arrays), "cache_dir")  # type: ignore[arg-type]
    return arrays


def cached_files(
    cache_dir: Path,
    name: str,
    paths: Mapping[str, Path],
    read: Callable[[Path], tuple[np.ndarray, ...]],
    **key: Any,
) -> Arrays:
    """What `read` makes of the file of each split, cached: SPLIT, SPLIT_lengths and SPLIT_labels.

    key: what it depends on besides the files.
    """

    def make() -> Arrays:
        arrays = {}
        for split, path in paths.items():
            arrays |= named(split, *read(path))
        return arrays

    return cached(cache_dir, name, key | {"files": fingerprint(paths.values())}, make)


def named(split: str, flat: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> Arrays:
    return {split: flat, f"{split}_lengths": lengths, f"{split}_labels": labels}


def fingerprint(paths: Iterable[Path]) -> str:
    """A digest of the names, sizes and times of files, for the key of a cache of their content."""
    stats = ((path, path.stat()) for path in sorted(paths))
    return digest({str(path): [s.st_size, s.st_mtime_ns] for path, s in stats})


def pad(
    flat: np.ndarray, lengths: np.ndarray, most: int, width: int, *, as_bytes: bool = False
) -> np.ndarray:
    """Sequences that lie end to end as rows (n, width), cut to `most` tokens and padded with 0.

    Args:
        as_bytes: byte b becomes b + 1. The result is uint8 unless there is a byte 255, which UTF-8
            does not have.
    """
    wide = as_bytes and len(flat) > 0 and flat.max() == 255
    out = np.zeros((len(lengths), width), np.int16 if wide else flat.dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    for row, end, length in zip(out, ends.tolist(), lengths.tolist(), strict=True):
        keep = min(length, most)
        row[:keep] = flat[end - length : end - length + keep]
        if as_bytes:
            row[:keep] += 1
    return out


def padded_split(
    data: Arrays, name: str, most: int, width: int, limit: int | None, *, as_bytes: bool = False
) -> Split:
    """The first `limit` examples of a split of `cached_files`, as `pad` makes them."""
    lengths = data[f"{name}_lengths"][:limit]
    tokens = pad(data[name], lengths, most, width, as_bytes=as_bytes)
    return Split(tokens, data[f"{name}_labels"][:limit], np.minimum(lengths, most))
