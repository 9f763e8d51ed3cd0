"""Dataclasses as lines of a tidy CSV file: written at once, read back typed, never overwritten."""

import csv
import dataclasses
import io
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def fields_of(kind: type) -> tuple[str, ...]:
    """The columns of a row class: its fields in order."""
    return tuple(field.name for field in dataclasses.fields(kind))


def line(values: Iterable[str]) -> str:
    """One line of a CSV file, with its end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(values)
    return out.getvalue()


def row_line(row: Any) -> str:
    """The line of a row; None is an empty cell."""
    return line(_text(getattr(row, name)) for name in fields_of(type(row)))


def append(path: Path, text: str) -> None:
    """Adds whole lines with a single write, so that a kill cannot mix two rows."""
    with open(path, "ab", buffering=0) as file:
        file.write(text.encode())
        os.fsync(file.fileno())


def heal(path: Path, columns: Iterable[str]) -> None:
    """Cuts off a last line that has no end, as a killed run or a full disk leaves it."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
    if not path.stat().st_size:
        path.write_text(line(columns))


def from_texts(kind: type, texts: Mapping[str, str]) -> Any:
    """The row whose cells have these texts."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], text) for name, text in texts.items()})


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())  # one row is one line


def _typed(kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType):
        if text == "":
            return None
        kind = typing.get_args(kind)[0]
    return kind(text)
