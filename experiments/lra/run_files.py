"""Reads training runs from their folders and from archives, and writes archives.

A folder is what experiments.train writes: settings, journal and result. An archive is a file with
one JSON object a line, and keeps of a run what tables and curves need: settings, result, every
validation, and POINTS averages of the logged training steps. A name that ends in .gz is a
compressed file.
"""

import glob
import gzip
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common.files import read_json_lines, reading, write_whole
from experiments.lra.result import RESULT, read_result
from experiments.lra.runs import STARTS, Run
from experiments.training import run_file
from experiments.training.journal import JOURNAL, rounded

POINTS = 200  # of a training curve in an archive
START = "config mask density device processes versions params task date".split()  # entries
QUANTITIES = ("loss", "accuracy")
REMEDY = "move it away"


def read_runs(places: str | Sequence[str]) -> list[Run]:
    """Returns every run below the given folders, archives or globs, each once, in order.

    Raises ValueError for a place that does not exist, and if no run is found at all.
    """
    places = [places] if isinstance(places, str) else list(places)
    found: dict[Path, Path] = {}  # by their real paths, so that each counts once
    for place in places:
        roots = [Path(name) for name in sorted(glob.glob(place, recursive=True))]
        if not roots:
            raise ValueError(f"no such folder: {place}; train first: python -m experiments.train")
        for root in roots:
            for path in [root] if root.is_file() else _inside(root):
                found.setdefault(path.resolve(), path)
    runs: list[Run] = []
    for path in sorted(found.values()):
        runs += _archived(path) if path.is_file() else [r for r in [read_run(path)] if r]
    if not runs:
        raise ValueError(
            f"no run in {', '.join(places)}; train first: python -m experiments.train task=listops"
        )
    return runs


def _inside(root: Path) -> Iterator[Path]:
    """The folders of runs, and the archives, below a folder."""
    for pattern in ("*.jsonl", "*.jsonl.gz"):
        for path in root.rglob(pattern):
            yield path.parent if path.name == JOURNAL else path
    for path in root.rglob(RESULT):
        yield path.parent


def read_run(folder: Path) -> Run | None:
    """Returns the run of a folder, or None if nothing in it says what was trained.

    Raises ValueError for a file that is not JSON. A killed run may leave half a last line.
    """
    journal = folder / JOURNAL
    lines = read_json_lines(journal, REMEDY, cut=True) if journal.exists() else []
    result = read_result(folder) or {}
    run = result.get("run") or run_file.read(folder)
    result = {key: value for key, value in result.items() if key != "run"}
    if run is not None:  # the settings were in the first line of a journal
        config = run["settings"] | {"attention": run["settings"]["attention"]}
        start = {"config": config} | {k: run[k] for k in ("mask", "density", "params", "task")}
        sessions = [{"kind": "start", **start, **session} for session in run["sessions"]]
        lines = [*sessions, *(line for line in lines if line["kind"] not in STARTS)]
    with reading(folder, REMEDY, "does not hold the journal and the result of a run"):
        if any({"kind", "step"} - line.keys() for line in lines):
            raise KeyError
        begun = any(line["kind"] in STARTS for line in lines)
        return Run(str(folder), lines, result) if result or begun else None


# ---- archives


def write_archive(runs: Sequence[Run], path: Path) -> None:
    """Writes an archive of the runs, one line each; the same runs give the same bytes.

    A run that was read both from its folder and from an archive is written once.

    Raises ValueError for a path of another kind of file, which would be lost.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"archive={path}: give a path that ends in .jsonl or .jsonl.gz")
    lines = (json.dumps(_packed(run), separators=(",", ":")) + "\n" for run in runs)
    data = "".join(dict.fromkeys(lines)).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_whole(path, lambda file: file.write(data), "archive")


def _packed(run: Run) -> dict[str, Any]:
    start = {name: run.start[name] for name in START if name in run.start}
    place = run.place.rpartition(": ")[2]  # an archive names its file before it
    packed = {"run": place, "untraced": not run.traced, "memory_mib": run.memory_mib}
    packed |= {"start": start, "result": run.result}
    for kind in ("train", "val", "test"):
        lines = _thinned(run.of(kind)) if kind == "train" else run.of(kind)
        names = ("step", "seconds", *QUANTITIES)
        packed[kind] = {name: [rounded(line.get(name)) for line in lines] for name in names}
    return packed


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The means of groups of lines, each at the last step of its group."""
    size = max(1, math.ceil(len(lines) / POINTS))
    found = []
    for group in (lines[i : i + size] for i in range(0, len(lines), size)):
        found.append({"step": group[-1]["step"], "seconds": group[-1]["seconds"]})
        for name in QUANTITIES:
            values = [line[name] for line in group if line.get(name) is not None]
            found[-1][name] = statistics.fmean(values) if values else None
    return found


def _archived(path: Path) -> list[Run]:
    lines = read_json_lines(path, REMEDY)
    with reading(path, REMEDY, "is not an archive of runs"):
        return [_unpacked(path, packed) for packed in lines]


def _unpacked(path: Path, packed: dict[str, Any]) -> Run:
    memory = {"memory_mib": packed["memory_mib"]} if packed["memory_mib"] else {}
    lines = [{"kind": "start", "step": 0} | packed["start"] | memory]
    for kind in ("train", "val", "test"):
        names = packed[kind].keys()
        rows = zip(*packed[kind].values(), strict=True)
        lines += [{"kind": kind} | dict(zip(names, row, strict=True)) for row in rows]
    run = Run(f"{path}: {packed['run']}", lines, packed["result"])
    run.traced = not packed["untraced"]  # of all sessions, of which the archive has the newest
    return run
