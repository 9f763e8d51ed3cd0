"""The folder of a run: its settings, and its result in result.json and in a line."""

import json
from pathlib import Path
from typing import Any

from experiments.common.devices import device_name
from experiments.common.files import DamagedFile, read_json, read_yaml, write_whole
from experiments.common.provenance import code_version, now
from experiments.lra.models import dropout as hidden
from experiments.lra.models.attention.registry import options_of
from experiments.lra.settings import CONFIG, Settings
from experiments.lra.tasks.task import Task
from experiments.training.distributed import Group
from experiments.training.journal import duration, rounded
from experiments.training.state import CHECKPOINT
from sparseflash import dropout

RESULT = "result.json"
RECREATE = "delete it to recreate it"
SOURCES = ("masks", "sparseflash", "experiments/lra")  # the code that a result depends on


def versions() -> dict[str, Any]:
    """What a result depends on beside the settings; `dropout`: which probabilities a seed drops,
    `dropout_hidden`: which hidden states.
    """
    return code_version(SOURCES) | {"dropout": dropout.VERSION, "dropout_hidden": hidden.VERSION}


def make_result(settings: Settings, task: Task, group: Group, **measured: Any) -> dict[str, Any]:
    """The content of result.json: task, settings, `measured`, and where they come from."""
    names = ("label", "seed", "recipe", "scale", "pretrain", "init_from")
    return {
        "task": task.name,
        "source": task.source,
        "length": task.length,
        "attention": settings.attention["name"],
        **{name: getattr(settings, name) for name in names},
        "planned_steps": settings.steps,
        **measured,
        "processes": group.world,
        "device": device_name(str(group.device)),
        "versions": versions(),
        "date": now(),
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
    result = read_json(path, RECREATE)
    if "complete" not in result:
        raise DamagedFile(f"{path} is not the result of a run: {RECREATE}")
    return result


def refuse_other_settings(settings: Settings) -> None:
    """Raises ValueError if the folder holds steps that were taken with other settings."""
    folder = settings.folder
    if not any((folder / name).exists() for name in (CHECKPOINT, RESULT)):
        return
    old = read_yaml(folder / CONFIG, f"move {folder}")
    differences = [
        text
        for name, value in settings.identity().items()
        if _place(name, old.get(name), old.get("runs")) != _place(name, value, settings.runs)
        for text in _differences(name, old.get(name), value)
    ]
    if differences:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(differences)}): "
            "give this one a folder of its own with name=, or delete that one"
        )


def _differences(name: str, old: Any, new: Any) -> list[str]:
    """What differs, such as "model.dim 64 -> 32": of a table only the settings that do.

    Older runs lack the settings that came after them. They had the default of an option of the
    attention, and what null means elsewhere.
    """
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{name} {old} -> {new}"]
    if name == "attention" and old.get("name") == new["name"]:
        old, new = (options_of(new["name"]) | table for table in (old, new))
    pairs = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return [text for key, pair in pairs.items() for text in _differences(f"{name}.{key}", *pair)]


def _place(name: str, value: Any, runs: Any) -> Any:
    """A setting; of init_from below the folder of all runs its place there, for both may move."""
    below = name == "init_from" and value and Path(value).is_relative_to(str(runs))
    return Path(value).relative_to(runs) if below else value


def summary(result: dict[str, Any]) -> str:
    """A result in a line."""
    what = "predicted tokens" if result["pretrain"] else "test accuracy"
    text = f"{what} {100 * result['accuracy']:.1f} %"
    if not result["pretrain"]:  # baselines are of the classes
        text += "".join(f", {name} {100 * x:.1f} %" for name, x in result["baselines"].items())
    text += f"; {result['steps']} of {result['planned_steps']} steps"
    text += f" in {duration(result['seconds'])}"
    if result["ms_per_step"] is not None:
        text += f", {result['ms_per_step']:.3g} ms a step"
    return text + ("" if result["scale"] == "full" else f"; scale={result['scale']}")
