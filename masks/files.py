"""Block masks in .npz files, without pickle; files that are there whole or not at all."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from masks.checks import file_path

FORMAT = 2  # of the files
SCALARS = ("n_q", "n_k", "block_size", "batch", "heads", "text")
FIELDS = (*SCALARS, "starts", "tiles", "bits")
EXAMPLE = "mask.npz"


def write(path: str | Path, fields: dict[str, Any], key: str) -> None:
    """Write a block mask and its key to exactly `path`. ValueError for what is no path."""
    content: dict[str, Any] = {"format": FORMAT, "key": key, **fields}
    replace(file_path(path, EXAMPLE), lambda file: np.savez_compressed(file, **content))


def replace(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place, flush it to the disk, and rename it.

    Raises:
        OSError: it cannot be written; the error names `path`, and what was there before stays.
    """
    place = Path(os.path.realpath(path))  # a link stays a link
    special = place.exists() and not place.is_file()  # /dev/stdout or a pipe
    new = place if special else place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with open(new, "wb") as file:
            write(file)
            if not special:
                file.flush()
                os.fsync(file.fileno())
        new.replace(place)  # nothing happens where both are one
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if not special:
            new.unlink(missing_ok=True)


def read(path: str | Path, make: Callable[..., Any]) -> Any:
    """`make(**fields)` of the fields that `write` wrote.

    Raises:
        ValueError: no path, or the file is damaged, changed, or something else; the message names
            it.
    """
    data = io.BytesIO(Path(file_path(path, EXAMPLE)).read_bytes())
    try:
        file = np.load(data, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError
        with file:
            content: dict[str, Any] = {name: file[name] for name in file.files}
    except Exception as error:  # of many kinds, by which byte is wrong
        raise ValueError(
            f"{path} is no block mask, or it is damaged: write it again with BlockMask.save"
        ) from error
    if "format" in content and content["format"].tolist() != FORMAT:
        found = content["format"]
        raise ValueError(
            f"{path} has format {found}, and this version reads {FORMAT}: write it again with "
            "BlockMask.save"
        )
    if set(content) != {"format", "key", *FIELDS}:
        raise ValueError(f"{path} is no block mask: write one with BlockMask.save")
    content |= {name: content[name].tolist() for name in (*SCALARS, "key")}
    try:
        blocks = make(**{name: content[name] for name in FIELDS})
        if blocks.key != content["key"]:
            raise ValueError
    except ValueError as error:
        raise ValueError(
            f"{path} was changed after it was saved: its content does not fit its digest; write it "
            "again with BlockMask.save"
        ) from error
    return blocks
