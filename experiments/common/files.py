"""Files that are there whole or not at all, and names that follow from what is in them."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from masks.files import replace


def write_whole(path: Path, write: Callable[[IO[bytes]], object], option: str) -> None:
    """Writes a file beside its place, flushes it to the disk, and renames it.

    option: names the setting that puts the file elsewhere.
    ValueError, with the remedy, if it cannot be written; what was there before stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, write)
    except (OSError, RuntimeError) as error:
        reason = error
        while not isinstance(reason, OSError):  # torch.save raises a RuntimeError after it
            if reason.__context__ is None:
                raise
            reason = reason.__context__
        raise ValueError(
            f"cannot write {path} ({reason.strerror}): free some space, or name another place with"
            f" {option}="
        ) from error


def write_text(path: Path, text: str, option: str) -> None:
    """Writes a text as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()), option)


def beside(csv: Path, kind: str) -> Path:
    """The place of the tables of a CSV file: rows.md for rows.csv and for rows.csv.gz.

    Raises ValueError where that is the file itself.
    """
    path = csv.with_name(csv.name.removesuffix(".gz")).with_suffix(kind)
    if path == csv:
        raise ValueError(f"csv={csv}: {kind} is for its tables; give a path that ends in .csv")
    return path


def digest(values: Mapping[str, Any]) -> str:
    """Twelve hex digits of the values (JSON-able), in whatever order they come."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
