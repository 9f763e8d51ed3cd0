"""Training runs as tables and figures read them, from their folders or from archives.

A folder is what experiments.train writes, and an archive a file with one run a line, both in the
format of `experiments.training.run_file`. An archive keeps POINTS averages of the logged training
steps. A name that ends in .gz is a compressed file.
"""

import glob
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.common.files import read_json_lines, reading, unpack, write_json_lines
from experiments.lra.settings import forms
from experiments.training.run_file import JOURNAL, RUN, last_lines, read

POINTS = 200  # of a training curve in an archive
PRETRAINED = "from another run"
USUAL = ("nystrom", "full", "row", "contour 14")  # settings of the reference recipe
NEAR = 1.0  # point: about the standard error of a validation
QUANTITIES = ("loss", "accuracy")
TRAIN_FIRST = "train first: python -m experiments.train task=listops"


class Run:
    """One training run. Accuracies and the density are in percent.

    Args:
        place: its folder, or an archive and the name of the run in it.
        file: the content of run.json.
        lines: of its journal.
    """

    def __init__(self, place: str, file: Mapping[str, Any], lines: Sequence[dict[str, Any]]):
        self.place, self.file, self.lines = place, file, lines
        self.settings: dict[str, Any] = file["settings"]
        settings, attention = self.settings, self.settings["attention"]
        task, result, session = file["task"], file["result"] or {}, file["sessions"][-1]
        self.task: str = task["name"]
        self.source: str = task.get("source", "")  # official, generated, ..
        self.length: int = task.get("length") or 0  # tokens of an example as padded
        # test accuracy of shortcuts
        self.baselines = {name: 100 * value for name, value in task.get("baselines", {}).items()}
        # of train, as the validation split
        self.held_out = float((settings.get("task") or {}).get("held_out") or 0.0)
        self.attention: str = attention["name"]
        sparse = self.attention == "sparse"
        # the mask that the settings name, empty for the default
        mask = settings.get("mask") or attention.get("mask")
        self.mask = str(mask) if mask and sparse else ""
        self.density = 100 * file["density"] if sparse and file["density"] else None
        self.seed = int(settings.get("seed", 0))
        # whether the accuracy is of hidden tokens instead of the classes
        self.pretraining = bool(settings.get("pretrain"))
        self.complete = bool(file["complete"])
        self.steps = int(result.get("steps") or self._most("step"))
        self.seconds = float(result.get("seconds") or self._most("seconds"))
        self.accuracy = _percent(result.get("accuracy"))  # None if the run was not tested
        validations = [line["accuracy"] for line in self.of("val")]
        best = max(validations, default=None)
        self.val_accuracy = _percent(result.get("val_accuracy", best))
        self.last = _percent(validations[-1] if validations else None)
        self.ms_per_step: float | None = result.get("ms_per_step")
        self.memory_mib = result.get("memory_mib") or self._most("memory_mib") or None
        # bool (n,): the test examples with the right answer, if the run kept them
        self.correct = unpack(result["correct"]) if result.get("correct") else None
        self.data: str = file["data"]  # a digest of all splits
        self.device: str = session["device"]
        self.date: str = result.get("date") or session["date"]
        commits = [session["versions"].get("commit") or "" for session in file["sessions"]]
        # whether a commit holds the code of each session of the run
        self.traced = all(commit and not commit.endswith("+changes") for commit in commits)
        names = ("batch", "recipe", "scale", "precision")
        work = {name: settings.get(name) for name in names} | {"length": self.length}
        sizes = {k: v for k, v in (settings.get("model") or {}).items() if v is not None}
        work |= {"model": sizes, "processes": session["processes"]}  # null is a default
        how = ("compile", "graph", "micro_batch", "deterministic")
        work |= {name: settings.get(name) or False for name in how}  # which older runs lack
        # what runs must share for their times to be compared
        self.workload = json.dumps(work, sort_keys=True, default=str)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of a kind (train, val, test) by step."""
        return last_lines(self.lines, kind)

    def _most(self, name: str) -> float:
        return max((line.get(name) or 0 for line in self.lines), default=0)

    @property
    def untrained(self) -> bool:
        """Whether its last validation is at the most frequent class, or at most NEAR above it."""
        most = self.baselines.get("majority")
        known = self.complete and not self.pretraining and None not in (most, self.last)
        return known and self.last <= most + NEAR  # type: ignore[operator]

    @property
    def label(self) -> str:
        """How the run differs from the reference recipe, in words; empty for that recipe."""
        settings, task = self.settings, self.settings.get("task") or {}
        words = [settings.get("recipe"), settings.get("scale"), task.get("order")]
        words.append(task.get("difficulty") and f"contour {task['difficulty']}")
        if strokes := task.get("strokes"):
            several = isinstance(strokes, list)
            words.append(
                f"strokes of {f'{min(strokes)} to {max(strokes)}' if several else strokes}"
            )
        words += [f"{n} {task[n]}" for n in ("margins", "distractors") if task.get(n) is not None]
        words += forms(settings["attention"], task)
        words += [settings.get("init_from") and PRETRAINED, settings.get("name")]
        return ", ".join(str(word) for word in words if word and word not in USUAL)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def read_runs(places: str | Sequence[str]) -> list[Run]:
    """Return every run below the given folders, archives or globs, each once, in order.

    A killed run may leave half a last line in its journal.

    Raises ValueError for a place that does not exist, and if no run is found at all.
    """
    places = [places] if isinstance(places, str) else list(places)
    found: dict[Path, Path] = {}  # by their real paths, so that each counts once
    for place in places:
        roots = [Path(name) for name in sorted(glob.glob(place, recursive=True))]
        if not roots:
            raise ValueError(f"no such folder: {place}; {TRAIN_FIRST}")
        for root in roots:
            for path in [root] if root.is_file() else _inside(root):
                found.setdefault(path.resolve(), path)
    runs: list[Run] = []
    for path in sorted(found.values()):
        if path.is_file():
            with reading(path, "move it away", "is not an archive of runs"):
                runs += [
                    unpacked(row, f"{path}: ") for row in read_json_lines(path, "move it away")
                ]
        elif "source" in (file := read(path) or {}).get("task", {}):  # not a language model
            lines = read_json_lines(path / JOURNAL, "move it away", cut=True)
            with reading(path, "move it away", "does not hold a run"):
                runs.append(Run(str(path), file, lines))
    if not runs:
        raise ValueError(f"no run in {', '.join(places)}; {TRAIN_FIRST}")
    return runs


def _inside(root: Path) -> Iterator[Path]:
    """Yield the folders of runs, and the archives, below a folder."""
    yield from (path.parent for path in root.rglob(JOURNAL) if path.with_name(RUN).exists())
    for path in (*root.rglob("*.jsonl"), *root.rglob("*.jsonl.gz")):
        if path.name != JOURNAL:
            first = next(iter(read_json_lines(path, "move it away")), {})
            if "curves" in first:  # no other rows
                yield path


def unpacked(row: Mapping[str, Any], place: str = "") -> Run:
    """Return the run of a line of an archive."""
    lines = []
    for kind, curve in row["curves"].items():
        steps = zip(*curve.values(), strict=True)
        lines += [{"kind": kind, **dict(zip(curve, values, strict=True))} for values in steps]
    return Run(f"{place}{row['run']}", row, lines)


def write_archive(runs: Sequence[Run], path: Path) -> None:
    """Write an archive of the runs, one line each; the same runs give the same bytes.

    A run that was read both from its folder and from an archive is written once.

    Raises ValueError for a path of another kind of file, and for other rows, which would be lost.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"archive={path}: give a path that ends in .jsonl or .jsonl.gz")
    if path.exists():
        read_runs(glob.escape(str(path)))
    write_json_lines(path, map(_packed, runs), "archive")


def _packed(run: Run) -> dict[str, Any]:
    names, kinds = ["step", "seconds", *QUANTITIES], ["train", "val", "test"]
    if not run.file["result"]:  # which says the rest
        names, kinds = [*names, "memory_mib"], [*kinds, "end"]
    curves = {}
    for kind in kinds:
        lines = _thinned(run.of(kind)) if kind == "train" else run.of(kind)
        curves[kind] = {name: [line.get(name) for line in lines] for name in names}
    place = run.place.rpartition(": ")[2]  # an archive names its file before it
    return {"run": place, **run.file, "curves": curves}


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of groups of lines, each at the last step of its group."""
    size = max(1, math.ceil(len(lines) / POINTS))
    found = []
    for group in (lines[i : i + size] for i in range(0, len(lines), size)):
        values = {q: [x[q] for x in group if x.get(q) is not None] for q in QUANTITIES}
        found.append(group[-1] | {q: fmean(x) if x else None for q, x in values.items()})
    return found
