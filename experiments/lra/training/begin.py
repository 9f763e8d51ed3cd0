"""What happens before a run takes its place: its data, its folder, its scale."""

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from experiments.lra.tasks.load import load_task
from experiments.lra.tasks.task import Task
from experiments.lra.training import checkpoint
from experiments.lra.training.config import Settings
from experiments.lra.training.distributed import Group
from experiments.lra.training.journal import RESULT

CONFIG = "config.yaml"


def load(settings: Settings, group: Group) -> Task:
    """The task; the first process makes what has to be made, and the others find it done."""

    def read() -> Task:
        options = dict(settings.task)
        return load_task(
            options.pop("name"),
            settings.data_dir,
            cache_dir=settings.cache_dir,
            seed=settings.data_seed,
            **options,
        )

    if group.leads:
        task = read()
        group.wait()
        return task
    group.wait()
    return read()


def refuse_other_settings(settings: Settings) -> None:
    """ValueError if the folder holds steps that were taken with other settings."""
    folder = settings.folder
    if not any((folder / name).exists() for name in (checkpoint.CHECKPOINT, RESULT)):
        return
    try:
        old = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read ({error}): move {folder}") from error
    assert isinstance(old, dict)
    here = OmegaConf.to_container(OmegaConf.create(settings.lasting()))
    assert isinstance(here, dict)
    differences = [
        f"{name} {old.get(name)} -> {here[name]}"
        for name in here
        if _given(old.get(name)) != _given(here[name])
    ]
    if differences:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(differences)}): "
            "name= gives this one a folder of its own, or delete that one"
        )


def _given(value: Any) -> Any:
    """Without keys that are null: older runs lack those of newer settings."""
    if not isinstance(value, dict):
        return value
    return {name: _given(inner) for name, inner in value.items() if inner is not None}


def explain_scale(settings: Settings, say: Callable[[str], None]) -> None:
    if settings.scale == "small":
        changes = ", ".join(f"{k} {a} -> {b}" for k, (a, b) in settings.scaled.items())
        say(
            f"scale=small: made for a CPU, not the recipe of the reference ({changes or 'as given'}"
            "); what the command line gives stays, and scale=full changes nothing"
        )
