"""A training run as tables and figures read it: settings, logged steps and result."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PRETRAINED = "from another run"
STARTS = ("start", "resume")
USUAL = ("nystrom", "full", "row", "contour 14")  # settings of the reference recipe


@dataclass(frozen=True)
class Run:
    """One training run: the lines of its journal, and its result if it has one."""

    place: str  # its folder, or an archive and the name of the run in it
    lines: tuple[dict[str, Any], ...]
    result: dict[str, Any]  # empty if the run stopped before its end

    @cached_property
    def start(self) -> dict[str, Any]:
        """The newest line with the settings, the device and the task."""
        return next((line for line in reversed(self.lines) if line["kind"] in STARTS), {})

    @property
    def config(self) -> dict[str, Any]:
        """The settings. Without a journal, those that the result repeats."""
        return self.start.get("config") or self.result

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind (train, val, test) by step, each step once.

        A resumed run may log a step again: the last line of a step counts.
        """
        last = {line["step"]: line for line in self.lines if line["kind"] == kind}
        return [last[step] for step in sorted(last)]

    def _max(self, name: str) -> float:
        return max((line.get(name, 0) for line in self.lines), default=0)

    @property
    def task(self) -> str:
        return self.result.get("task") or self.start["task"]["name"]

    @property
    def source(self) -> str:
        """Where the data come from: official, generated, ..."""
        return self.result.get("source") or self.start["task"].get("source", "")

    @property
    def attention(self) -> str:
        found = self.result.get("attention") or self.config.get("attention", "")
        return str(_section(found).get("name", "") if isinstance(found, dict) else found)

    @property
    def mask(self) -> str:
        """The mask that the settings name. Empty for the default, and without a mask."""
        mask = self.config.get("mask") or _section(self.config.get("attention")).get("mask")
        return str(mask) if mask and self.attention == "sparse" else ""

    @property
    def resolved_mask(self) -> str:
        """The mask that the run had, defaults included. Empty without a mask."""
        mask = self.result.get("mask") or self.start.get("mask") or self.mask
        return str(mask) if self.attention == "sparse" else ""

    @property
    def density(self) -> float | None:
        """Non-empty blocks / all blocks of a block-sparse run, in percent."""
        found = self.result.get("density") or self.start.get("density")
        return None if found is None or self.attention != "sparse" else 100 * found

    @property
    def reconstructed(self) -> bool:
        """Whether the mask was resolved after the run, from the code of its commit."""
        return bool(self.result.get("mask_reconstructed"))

    @property
    def versions(self) -> dict[str, str]:
        return self.result.get("versions") or self.start.get("versions", {})

    @property
    def traced(self) -> bool:
        """Whether a commit holds the code of the run."""
        commit = self.versions.get("commit", "")
        return bool(commit) and not commit.endswith("+changes")

    @property
    def seed(self) -> int:
        return int(self.result.get("seed", self.config.get("seed", 0)))

    @property
    def label(self) -> str:
        """How the run differs from the reference recipe, in words. Empty for that recipe."""
        config, task = self.config, _section(self.config.get("task"))
        words = [config.get(key) for key in ("recipe", "scale")]
        words += [task.get("order"), task.get("difficulty") and f"contour {task['difficulty']}"]
        words += [task.get("strokes") and f"strokes of {_range(task['strokes'])}"]
        words += [config.get("init_from") and PRETRAINED, config.get("name")]
        return ", ".join(str(word) for word in words if word and word not in USUAL)

    @property
    def pretraining(self) -> bool:
        """Whether the accuracy is of hidden tokens instead of the classes."""
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
        # None means the same as absent
        work["model"] = {k: v for k, v in (work["model"] or {}).items() if v is not None}
        work |= {"length": self.length, "processes": self.start.get("processes", 1)}
        return json.dumps(work, sort_keys=True, default=str)

    @property
    def complete(self) -> bool:
        return bool(self.result.get("complete"))

    @property
    def steps(self) -> int:
        return int(self.result.get("steps") or self._max("step"))

    @property
    def planned_steps(self) -> int | None:
        found = self.result.get("planned_steps") or self.config.get("steps")
        return int(found) if found else None

    @property
    def accuracy(self) -> float | None:
        """On the test split, in percent. None if the run was not tested."""
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
        return float(self.result.get("seconds") or self._max("seconds"))

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


def _range(strokes: Any) -> str:
    """One kind of strokes, or the finest and the coarsest of several."""
    return f"{min(strokes)} to {max(strokes)}" if isinstance(strokes, list) else str(strokes)


def _section(value: Any) -> dict[str, Any]:
    """A section of a configuration. Empty if it is a text or nothing."""
    return value if isinstance(value, dict) else {}
