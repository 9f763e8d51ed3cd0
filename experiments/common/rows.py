"""Measurements as JSON lines: a row is a plain dict, and a later row may have more fields.

    rows = Rows("runs/steps.jsonl", key=("task", "length"))
    row = {"task": "text", "length": 1024, **rows.origin("cpu", "python -m experiments.speed")}
    if rows.find(row) is None:  # rows with equal keys measure the same thing
        rows.append(row | {"status": OK, "ms_median": 3.5})

A file grows by whole lines, also when several processes write to it. `read` and `frame` take
`.jsonl` and `.jsonl.gz`.

A row that has `version`, the version of a peer's package, does not depend on our source. All other
rows do.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.common import provenance
from experiments.common.devices import device_name
from experiments.common.files import read_json_lines

OK = "ok"  # the status of a row that has a time; any other status says why it has none
SOURCES = ("masks", "sparseflash")
PROCESS = uuid.uuid4().hex[:8]  # tells the rows of two processes apart
Row = dict[str, Any]


class Rows:
    """A file of rows that can be added to; `rows` are those that it holds.

    Args:
        path: ends in `.jsonl`. It is created if it does not exist.
        key: the fields that say what was measured, besides mask, device and versions.
        sources: the folders whose Python files the digest `source` covers.
        allow_changes: add to files under docs although code differs from the last commit.

    Raises ValueError for another file name, a damaged line, a file that cannot be written, and
    for a file under docs if no commit could reproduce its rows.
    """

    def __init__(
        self,
        path: str | Path,
        key: Sequence[str] = (),
        sources: tuple[str, ...] = SOURCES,
        *,
        allow_changes: bool = False,
    ):
        self.path, self.key, self.sources = Path(path), tuple(key), sources
        if self.path.suffix == ".gz":
            raise ValueError(f"rows={path} is compressed and cannot be added to: gunzip it first")
        if self.path.suffix != ".jsonl":
            raise ValueError(f"rows={path}: give a path that ends in .jsonl")
        if not allow_changes:
            provenance.check_published(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(b"")
        except OSError as error:
            raise ValueError(
                f"rows={self.path} cannot be written ({error.strerror}): name another file"
            ) from None
        self.rows = read(self.path, key=self.key)
        self._known = {self.key_of(row): row for row in self.rows}

    def append(self, row: Mapping[str, Any]) -> Row:
        """Add a row to the file and return it with floats of six digits, as the file has it."""
        own = {name: _short(value) for name, value in row.items()}
        self._write(json.dumps(own, ensure_ascii=False).encode() + b"\n")
        self.rows.append(own)
        self._known[self.key_of(own)] = own
        return own

    def find(self, row: Mapping[str, Any]) -> Row | None:
        """Return the newest row that measures the same thing with the same versions, or None."""
        return self._known.get(self.key_of(row))

    def origin(self, device: str | torch.device, command: str) -> Row:
        """Return the fields of a row that say where a measurement made now comes from."""
        about = {"device": device_name(device), **provenance.code_version(self.sources)}
        about |= {"date": provenance.now(), "command": command}
        return about | gpu(device) | {"process": PROCESS}

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what two rows share if they measure the same thing with the same versions."""
        code = row.get("source") if row.get("version") is None else row["version"]
        names = (*self.key, "mask", "device", "torch", "triton")
        return (*(_short(row.get(name)) for name in names), code)

    def _write(self, line: bytes) -> None:
        """Append a line, after cutting off half a line that a killed process has left."""
        with open(self.path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read(1) != b"\n":
                os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
            file.write(line)
            os.fsync(file.fileno())


def read(path: str | Path, command: str = "", key: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a file. A last line that a kill has cut short is skipped.

    command: the command that measures such rows, for the error where the file is missing.
    key: the fields of such rows. A row without one of them, as of another program, is a ValueError.
    """
    remedy = f"measure first: {command}" if command else "name another file with rows=PATH"
    rows = read_json_lines(Path(path), remedy, cut=True)
    for number, row in enumerate(rows, 1):
        if lacking := [name for name in key if name not in row]:
            made = f", made by {row['command']}" if "command" in row else ""
            raise ValueError(
                f"{path}, row {number}{made}, lacks {', '.join(lacking)}: name rows of"
                f" {command or 'the same measurement'}"
            )
    return rows


def frame(rows: str | Path | Iterable[Row]) -> pd.DataFrame:
    """Return a file of rows, or a list of rows, as a data frame."""
    return pd.DataFrame(read(rows) if isinstance(rows, str | Path) else [*map(dict, rows)])


def last_versions(frame: Any, key: Sequence[str]) -> pd.DataFrame:
    """Return the rows of the newest versions of what they measure, in all rounds."""
    code = frame.source
    if "version" in frame:
        code = frame.version.where(frame.version.notna(), code)
    code = frame[["torch", "triton"]].fillna("").assign(code=code).agg(" ".join, axis=1)
    names = dict.fromkeys((*key, "mask", "device"))
    what = [frame[name] for name in names if name in frame and name != "round"]
    return frame[code == code.groupby(what, dropna=False).transform("last")]


def gpu(device: str | torch.device) -> Row:
    """Return which GPU a device is, and its driver and clocks now (MHz) as nvidia-smi tells them;
    nothing for a CPU.

    `gpu` is a hash of its UUID: it tells two GPUs of one kind apart.
    """
    if torch.device(device).type != "cuda":
        return {}
    name = str(torch.cuda.get_device_properties(device).uuid)
    about: Row = {"gpu": hashlib.sha256(name.encode()).hexdigest()[:8]}
    what = "--query-gpu=driver_version,clocks.sm,clocks.mem"
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits", f"--id=GPU-{name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return about
    driver, *clocks = map(str.strip, done.stdout.split(","))
    pairs = zip(("sm_mhz", "memory_mhz"), clocks, strict=False)
    return about | {"driver": driver} | {k: int(mhz) for k, mhz in pairs if mhz.isdigit()}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


class Found(dict[str, Any]):
    """A row whose fields are attributes as well. One that it has not is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of others, such as arrays
            raise AttributeError(name)
        return self.get(name)

    def __missing__(self, name: str) -> None:
        return None


def found(frame: Any, kind: Any = Found) -> list[Any]:
    """Return the rows of a data frame, with None for what is missing."""
    rows = frame.to_dict("records") if hasattr(frame, "to_dict") else frame
    return [kind({k: None if v is None or v != v else v for k, v in r.items()}) for r in rows]
