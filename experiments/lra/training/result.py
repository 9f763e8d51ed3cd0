"""The result of a run: what result.json holds, and a line of it."""

from typing import Any

from experiments.common.devices import device_name
from experiments.common.provenance import code_version, now
from experiments.lra.tasks.task import Task
from experiments.lra.training import memory
from experiments.lra.training.clock import Clock
from experiments.lra.training.config import Settings
from experiments.lra.training.distributed import Group
from experiments.lra.training.journal import duration


def make_result(
    settings: Settings,
    task: Task,
    group: Group,
    clock: Clock,
    *,
    step: int,
    complete: bool,
    best: dict[str, Any] | None,
    test: dict[str, float],
    data_mib: float,
) -> dict[str, Any]:
    """What result.json holds.

    Args:
        step: the steps that were taken; complete: whether there are no more to take.
        best: the step with the best validation, if there was one, whose weights were tested.
    """
    return {
        "task": task.name,
        "label": settings.label,
        "source": task.source,
        "attention": settings.attention["name"],
        "mask": settings.mask,
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
        "memory_mib": memory.peak_mib(group.device),
        "data_mib": data_mib,
        "processes": group.world,
        "device": device_name(str(group.device)),
        "versions": code_version(),
        "date": now(),
        "baselines": task.baselines,
    }


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
