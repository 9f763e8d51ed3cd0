"""The result of a run as readers take it until they read run.json themselves."""

from pathlib import Path
from typing import Any

from experiments.lra.run import Classification
from experiments.lra.settings import Settings
from experiments.training import run_file
from experiments.training.run_file import RUN as RESULT
from experiments.training.run_file import SOURCES
from experiments.training.state import CHECKPOINT

__all__ = ["RESULT", "SOURCES", "read_result", "refuse_other_settings", "summary"]


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that was tested, or None."""
    run = run_file.read(folder)
    if run is None or run["result"] is None:
        return None
    settings, session = run["settings"], run["sessions"][-1]
    names = ("label", "seed", "recipe", "scale", "pretrain", "init_from")
    return {
        **run["result"],
        **{name: settings[name] for name in names},
        **{name: run["task"].get(name) for name in ("source", "length", "baselines")},
        **{name: session[name] for name in ("processes", "device", "versions", "command")},
        "task": run["task"]["name"],
        "attention": settings["attention"]["name"],
        "planned_steps": settings["steps"],
        "mask": run["mask"],
        "density": run["density"],
        "complete": run["complete"],
        "data": run["data"],
        "run": run,
    }


def refuse_other_settings(settings: Settings) -> None:
    """Raise ValueError if the folder holds steps that were taken with other settings."""
    run = run_file.read(settings.folder)
    if run is not None and (run["result"] or (settings.folder / CHECKPOINT).exists()):
        run_file.refuse_other_settings(settings.folder, run["settings"], settings)


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return Classification.summary(result["run"])
