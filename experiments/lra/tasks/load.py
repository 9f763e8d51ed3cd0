"""`load_task` finds the data of a task, or makes them on request."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from experiments.lra.tasks.task import PATHFINDER, Task

# Built-in tasks by the name of their module, which is imported when the task is loaded: each needs
# packages that the others do not. `task` adds functions.
TASKS: dict[str, str | Callable[..., Task]] = {
    **dict.fromkeys(PATHFINDER, "pathfinder"),
    **{
        name: name for name in ("listops", "text", "retrieval", "imdb_same_movie", "image", "files")
    },
}
Load = TypeVar("Load", bound=Callable[..., Task])


def task(name: str) -> Callable[[Load], Load]:
    """Decorate the function that loads a task of your own, which task/NAME.yaml names.

    Its first argument is `data_dir`; the others are keywords: `cache_dir`, `seed` and the options
    of the task.
    """

    def add(load: Load) -> Load:
        TASKS[name] = load
        return load

    return add


def load_task(
    name: str, data_dir: str | Path, *, cache_dir: str | Path, seed: int = 0, **options: Any
) -> Task:
    """Return a task: read from its official files below `data_dir`, or generated.

    Args:
        data_dir: the folder of the official folders (listops-1000, aclImdb, tsv_data, pathfinder32,
            cifar-10-batches-py or cifar10_gray.npz[.xz], ...). It may be or hold lra_release.
        cache_dir: where tokenised and generated data are kept.
        seed: of generated data, and of splits that are drawn.
        options: of the task; None keeps the default. `limit`: the first n examples of every split.
            `generate` (ListOps, Pathfinder): make `examples` (train, val, test). `max_length`,
            `order`, ... : see `load` of the task.

    Raises:
        ValueError: there is no such task or option, or data are missing or broken. The error names
            the file, the place in it and the remedy.
    """
    load = loader(name)
    options = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(load).parameters.values()
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"cache_dir", "seed"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}: choose from {', '.join(sorted(known))}"
        )
    limit = options.get("limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit!r}: give a number of examples, at least 1")
    return load(Path(data_dir).expanduser(), cache_dir=Path(cache_dir), seed=seed, **options)


def loader(name: str) -> Callable[..., Task]:
    """Return the function `load` of a task."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: choose from {', '.join(sorted(TASKS))}")
    found = TASKS[name]
    if not isinstance(found, str):
        return found
    load = import_module(f"experiments.lra.tasks.{found}").load
    return partial(load, PATHFINDER[name]) if name in PATHFINDER else load
