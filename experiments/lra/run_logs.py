"""Reads the folders that experiments.train writes: configuration, journal and result of each run.

A run that was killed has a journal and no result; its last line may be half-written.
"""

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

JOURNAL, RESULT = "journal.jsonl", "result.json"
PRETRAINED = "from another run"
STARTS = ("start", "resume")
USUAL = ("nystrom", "full", "row", "contour 14")  # settings that need no word


@dataclass(frozen=True)
class Run:
    """One training run: the lines of its journal, and its result where it has one."""

    folder: Path
    lines: tuple[dict[str, Any], ...]
    result: dict[str, Any]  # empty: stopped before its end

    @cached_property
    def start(self) -> dict[str, Any]:
        """The newest line that says what is trained, and where."""
        return next((line for line in reversed(self.lines) if line["kind"] in STARTS), {})

    @property
    def config(self) -> dict[str, Any]:
        """The settings; without a journal those that the result repeats."""
        return self.start.get("config") or self.result

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind (train, val, test) by step.

        What was run twice, because a run resumed behind the end of its journal, counts once.
        """
        last = {line["step"]: line for line in self.lines if line["kind"] == kind}
        return [last[step] for step in sorted(last)]

    def _last(self, name: str) -> float:
        return max((line.get(name, 0) for line in self.lines), default=0)

    @property
    def task(self) -> str:
        return self.result.get("task") or self.start["task"]["name"]

    @property
    def source(self) -> str:
        """What the data is: official, generated, ..."""
        return self.result.get("source") or self.start["task"].get("source", "")

    @property
    def attention(self) -> str:
        found = self.result.get("attention") or self.config.get("attention", "")
        return str(_section(found).get("name", "") if isinstance(found, dict) else found)

    @property
    def mask(self) -> str:
        """Empty but for block-sparse attention."""
        mask = self.result.get("mask") or self.config.get("mask")
        mask = mask or _section(self.config.get("attention")).get("mask")
        return str(mask) if mask and self.attention == "sparse" else ""

    @property
    def seed(self) -> int:
        return int(self.result.get("seed", self.config.get("seed", 0)))

    @property
    def label(self) -> str:
        """What sets the run apart from the reference recipe, in words; empty for that recipe."""
        config, task = self.config, _section(self.config.get("task"))
        words = [config.get(key) for key in ("recipe", "scale")]
        words += [task.get("order"), task.get("difficulty") and f"contour {task['difficulty']}"]
        words += [task.get("strokes") and f"strokes of {_reach(task['strokes'])}"]
        words += [config.get("init_from") and PRETRAINED, config.get("name")]
        return ", ".join(str(word) for word in words if word and word not in USUAL)

    @property
    def pretraining(self) -> bool:
        """Whether the accuracy is of hidden tokens, not of the classes."""
        return bool(self.config.get("pretrain"))

    @property
    def length(self) -> int | None:
        """Tokens of an example as padded."""
        return self.start.get("task", {}).get("length")

    @property
    def workload(self) -> str:
        """What runs must share for their times to be compared."""
        names = ("batch", "model", "recipe", "scale", "precision")
        work = {name: self.config.get(name) for name in names}
        # an option that is not set counts like one that did not exist yet
        work["model"] = {k: v for k, v in (work["model"] or {}).items() if v is not None}
        work |= {"length": self.length, "processes": self.start.get("processes", 1)}
        return json.dumps(work, sort_keys=True, default=str)

    @property
    def complete(self) -> bool:
        return bool(self.result.get("complete"))

    @property
    def steps(self) -> int:
        return int(
            self.result.get("steps") or max((l.get("step", 0) for l in self.lines), default=0)
        )

    @property
    def planned_steps(self) -> int | None:
        found = self.result.get("planned_steps") or self.config.get("steps")
        return int(found) if found else None

    @property
    def accuracy(self) -> float | None:
        """On the test split, in percent; None where the run never got there."""
        found = self.result.get("accuracy")
        if found is None:
            found = next((line["accuracy"] for line in reversed(self.of("test"))), None)
        return None if found is None else 100 * found

    @property
    def val_accuracy(self) -> float | None:
        """The best one on the validation split, in percent."""
        found = self.result.get("val_accuracy")
        if found is None:
            found = max((line["accuracy"] for line in self.of("val")), default=None)
        return None if found is None else 100 * found

    @property
    def seconds(self) -> float:
        return float(
            self.result.get("seconds") or max((l.get("seconds", 0) for l in self.lines), default=0)
        )

    @property
    def ms_per_step(self) -> float | None:
        return self.result.get("ms_per_step")

    @property
    def memory_mib(self) -> float | None:
        found = [line.get("memory_mib") for line in (self.result, *self.lines)]
        return max((mib for mib in found if mib), default=None)

    @property
    def device(self) -> str:
        return self.result.get("device") or self.start.get("device", "")

    @property
    def date(self) -> str:
        return self.result.get("date") or self.start.get("date", "")

    @property
    def baselines(self) -> dict[str, float]:
        """Test accuracy of shortcuts, in percent."""
        found = self.result.get("baselines") or self.start.get("task", {}).get("baselines") or {}
        return {name: 100 * value for name, value in found.items()}


def read_runs(places: str | Sequence[str]) -> list[Run]:
    """Every run below the given folders or globs, each once, by folder.

    Raises ValueError for a place that does not exist, and where no run is found at all.
    """
    places = [places] if isinstance(places, str) else list(places)
    folders: dict[Path, Path] = {}  # by their real paths, so that each counts once
    for place in places:
        roots = [Path(found) for found in sorted(glob.glob(place, recursive=True))]
        if not roots:
            raise ValueError(f"no such folder: {place}; train first: python -m experiments.train")
        for root in roots:
            for name in (JOURNAL, RESULT):
                for path in root.rglob(name):
                    folders.setdefault(path.parent.resolve(), path.parent)
    runs = [run for folder in sorted(folders.values()) if (run := read_run(folder))]
    if not runs:
        raise ValueError(
            f"no run in {', '.join(places)}; train first: python -m experiments.train task=listops"
        )
    return runs


def read_run(folder: Path) -> Run | None:
    """The run of a folder; None where nothing in it says what was trained.

    Raises ValueError for a file that is no JSON, other than by a half-written last line.
    """
    lines, result = [], {}
    journal, file = folder / JOURNAL, folder / RESULT
    if journal.exists():
        texts = journal.read_text(encoding="utf-8").split("\n")
        for i, text in enumerate(texts, 1):
            if not text.strip():
                continue
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError as error:
                if i < len(texts):
                    raise ValueError(f"{journal}, line {i} is no JSON: {error}") from None
    if file.exists():
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is no JSON: {error}") from None
    run = Run(folder, tuple(lines), result)
    return run if result or run.start else None


def _reach(strokes: Any) -> str:
    """Of one kind, or from the finest to the coarsest of several."""
    return f"{min(strokes)} to {max(strokes)}" if isinstance(strokes, list) else str(strokes)


def _section(value: Any) -> dict[str, Any]:
    """A section of a configuration; empty where it is a text or nothing."""
    return value if isinstance(value, dict) else {}
