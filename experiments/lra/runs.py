"""A training run as tables and figures read it: settings, logged steps and result."""

import json
from collections.abc import Sequence
from typing import Any

from experiments.common.bits import unpack

PRETRAINED = "from another run"
STARTS = ("start", "resume")
USUAL = ("nystrom", "full", "row", "contour 14")  # settings of the reference recipe


class Run:
    """One training run: the lines of its journal, its result, and what they say.

    The result counts first, then the newest start line. Accuracies and the density are in percent.
    """

    def __init__(self, place: str, lines: Sequence[dict[str, Any]], result: dict[str, Any]):
        self.place = place  # its folder, or an archive and the name of the run in it
        self.lines = lines
        self.result = result  # empty if the run stopped before its end
        # the newest line with the settings, the device and the task
        self.start: dict[str, Any] = next((x for x in reversed(lines) if x["kind"] in STARTS), {})
        # without a journal, the settings that the result repeats
        self.config: dict[str, Any] = self.start.get("config") or result

        def told(name: str, otherwise: Any = "") -> Any:
            return result.get(name) or self.start.get(name) or otherwise

        task: dict[str, Any] = self.start.get("task", {})
        self.task: str = result.get("task") or task["name"]
        self.source: str = result.get("source") or task.get("source", "")  # official, generated, ..
        self.length: int | None = task.get("length")  # tokens of an example as padded
        # test accuracy of shortcuts
        baselines = result.get("baselines") or task.get("baselines") or {}
        self.baselines = {name: 100 * value for name, value in baselines.items()}

        section = self.config.get("attention")
        found = result.get("attention") or section
        self.attention = str(found.get("name", "") if isinstance(found, dict) else found or "")
        sparse = self.attention == "sparse"
        mask = self.config.get("mask") or _section(section).get("mask")
        # the mask that the settings name, empty for the default; the one that the run had
        self.mask = str(mask) if mask and sparse else ""
        self.resolved_mask = str(told("mask", self.mask)) if sparse else ""
        density = told("density", None)  # non-empty blocks / all blocks
        self.density = 100 * density if density and sparse else None
        # whether the mask was resolved after the run, from the code of its commit
        self.reconstructed = bool(result.get("mask_reconstructed"))

        self.seed = int(result.get("seed", self.config.get("seed", 0)))
        # whether the accuracy is of hidden tokens instead of the classes
        self.pretraining = bool(self.config.get("pretrain"))
        self.complete = bool(result.get("complete"))
        self.steps = int(result.get("steps") or self._max("step"))
        planned = result.get("planned_steps") or self.config.get("steps")
        self.planned_steps = int(planned) if planned else None
        # None if the run was not tested
        self.accuracy = _percent(result, "accuracy", [x["accuracy"] for x in self.of("test")[-1:]])
        # the best one
        self.val_accuracy = _percent(
            result, "val_accuracy", [x["accuracy"] for x in self.of("val")]
        )
        # bool (n,): the test examples with the right answer; None in runs that did not keep them
        correct = result.get("correct")
        self.correct = None if correct is None else unpack(correct)
        self.data = str(result.get("data", ""))  # a digest of all splits
        # the share of train that became the validation split, where the rule is the test set
        self.held_out = float(_section(self.config.get("task")).get("held_out") or 0.0)
        self.batch: int | None = self.config.get("batch")
        # of train, val and test
        self.examples: tuple[int, ...] = tuple(task.get("examples", ()))
        self.seconds = float(result.get("seconds") or self._max("seconds"))
        self.ms_per_step: float | None = result.get("ms_per_step")
        memory = [line.get("memory_mib") for line in (result, *lines)]
        self.memory_mib = max((mib for mib in memory if mib), default=None)
        self.device: str = told("device")
        self.date: str = told("date")
        self.versions: dict[str, str] = told("versions", {})
        sessions = [x["versions"] for x in lines if x["kind"] in STARTS and "versions" in x]
        commits = [versions.get("commit", "") for versions in (*sessions, self.versions)]
        # whether a commit holds the code of each session of the run
        self.traced = all(commit and not commit.endswith("+changes") for commit in commits)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind (train, val, test) by step, each step once.

        A resumed run may log a step again: the last line of a step counts.
        """
        last = {line["step"]: line for line in self.lines if line["kind"] == kind}
        return [last[step] for step in sorted(last)]

    def _max(self, name: str) -> float:
        return max((line.get(name, 0) for line in self.lines), default=0)

    @property
    def label(self) -> str:
        """How the run differs from the reference recipe, in words. Empty for that recipe."""
        config, task = self.config, _section(self.config.get("task"))
        words = [config.get(key) for key in ("recipe", "scale")]
        words += [task.get("order"), task.get("difficulty") and f"contour {task['difficulty']}"]
        words += [task.get("strokes") and f"strokes of {_range(task['strokes'])}"]
        words += [f"{n} {task[n]}" for n in ("margins", "distractors") if task.get(n) is not None]
        words += [config.get("init_from") and PRETRAINED, config.get("name")]
        return ", ".join(str(word) for word in words if word and word not in USUAL)

    @property
    def workload(self) -> str:
        """What runs must share for their times to be compared."""
        names = ("batch", "model", "recipe", "scale", "precision")
        work = {name: self.config.get(name) for name in names}
        # None means the same as absent
        work["model"] = {k: v for k, v in (work["model"] or {}).items() if v is not None}
        work |= {"length": self.length, "processes": self.start.get("processes", 1)}
        return json.dumps(work, sort_keys=True, default=str)


def _percent(result: dict[str, Any], name: str, logged: list[float]) -> float | None:
    """An accuracy of the result; without one, the best of those that were logged."""
    found = result.get(name)
    found = max(logged, default=None) if found is None else found
    return None if found is None else 100 * found


def _range(strokes: Any) -> str:
    """One kind of strokes, or the finest and the coarsest of several."""
    return f"{min(strokes)} to {max(strokes)}" if isinstance(strokes, list) else str(strokes)


def _section(value: Any) -> dict[str, Any]:
    """A section of a configuration. Empty if it is a text or nothing."""
    return value if isinstance(value, dict) else {}
