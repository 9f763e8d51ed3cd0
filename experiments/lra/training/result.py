"""The result of a run: what result.json holds, and a line of it."""

import json
from pathlib import Path
from typing import Any

from experiments.common.devices import device_name
from experiments.common.files import write_whole
from experiments.common.provenance import code_version, now
from experiments.lra.tasks.task import Task
from experiments.lra.training.clock import Clock
from experiments.lra.training.config import Settings
from experiments.lra.training.device import peak_mib
from experiments.lra.training.distributed import Group
from experiments.lra.training.journal import duration, rounded

RESULT = "result.json"
SOURCES = ("masks", "sparseflash", "experiments/lra")  # the code that a result depends on


def make_result(
    settings: Settings,
    task: Task,
    group: Group,
    clock: Clock,
    *,
    mask: tuple[str | None, float | None],
    step: int,
    complete: bool,
    best: dict[str, Any] | None,
    test: dict[str, float],
    data_mib: float,
    command: str,
) -> dict[str, Any]:
    """The result of a run.

    Args:
        mask: its text and its density, see `mask_of`.
        step: how many steps were taken; complete: whether these are all.
        best: the step with the best validation, whose weights were tested, if there was one.
    """
    return {
        "task": task.name,
        "label": settings.label,
        "source": task.source,
        "length": task.length,
        "attention": settings.attention["name"],
        "mask": mask[0],
        "density": mask[1],
        "seed": settings.seed,
        "recipe": settings.recipe,
        "scale": settings.scale,
        "pretrain": settings.pretrain,
        "init_from": settings.init_from,
        "steps": step,
        "planned_steps": settings.steps,
        "complete": complete,
        "accuracy": test["accuracy"],
        "loss": test["loss"],
        "val_accuracy": None if best is None else best["accuracy"],
        "best_step": step if best is None else best["step"],
        "seconds": clock.seconds,
        "ms_per_step": 1e3 * clock.training / step if step else None,
        "memory_mib": peak_mib(group.device),
        "data_mib": data_mib,
        "processes": group.world,
        "device": device_name(str(group.device)),
        "versions": code_version(),
        "date": now(),
        "command": command,
        "baselines": task.baselines,
    }


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Writes result.json into the folder of a run."""
    text = json.dumps(rounded(result), indent=2) + "\n"
    write_whole(folder / RESULT, lambda file: file.write(text.encode()), "runs")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a run; None if it has none yet. Raises ValueError if it cannot be read."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it to recreate it") from error


def summary(result: dict[str, Any]) -> str:
    """A result in a line."""
    what = "hidden pixels" if result["pretrain"] else "test accuracy"
    text = f"{what} {100 * result['accuracy']:.1f} %"
    text += "".join(f", {name} {100 * x:.1f} %" for name, x in result["baselines"].items())
    text += f"; {result['steps']} of {result['planned_steps']} steps"
    text += f" in {duration(result['seconds'])}"
    if result["ms_per_step"] is not None:
        text += f", {result['ms_per_step']:.3g} ms a step"
    return text + ("" if result["scale"] == "full" else f"; scale={result['scale']}")
