"""`load_task` finds the data of a task, or makes them on request."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from experiments.lra.tasks.task import PATHFINDER, Task

# Modules are imported when their task is loaded: each needs packages that the others do not.
MODULES = {
    name: f"experiments.lra.tasks.{name}"
    for name in ("listops", "text", "retrieval", "imdb_same_movie", "image", "files")
} | dict.fromkeys(PATHFINDER, "experiments.lra.tasks.pathfinder")
NAMES = tuple(MODULES)
OWN: dict[str, Callable[..., Task]] = {}  # tasks of the user's own
Load = TypeVar("Load", bound=Callable[..., Task])


def task(name: str) -> Callable[[Load], Load]:
    """Decorate the function that loads a task of one's own.

    Its first argument is `data_dir`; the others are keywords, `cache_dir`, `seed` and the options
    of the task.
    """

    def add(load: Load) -> Load:
        OWN[name] = load
        return load

    return add


def load_task(
    name: str, data_dir: str | Path, *, cache_dir: str | Path, seed: int = 0, **options: Any
) -> Task:
    """A task of NAMES: read from its official files below `data_dir`, or generated.

    Args:
        data_dir: the folder of the official folders (listops-1000, aclImdb, tsv_data, pathfinder32,
            cifar-10-batches-bin or cifar10_gray.npz[.xz], ...). It may be or hold lra_release.
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
    unknown = options.keys() - known
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"{name} has no option {', '.join(sorted(unknown))}: "
            f"choose from {', '.join(sorted(known))}"
        )
    limit = options.get("limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit!r}: give a number of examples, at least 1")
    return load(Path(data_dir).expanduser(), cache_dir=Path(cache_dir), seed=seed, **options)


def loader(name: str) -> Callable[..., Task]:
    """The function `load` of a task."""
    if name in OWN:
        return OWN[name]
    if name not in MODULES:
        raise ValueError(f"no task {name!r}: choose from {', '.join(NAMES)}")
    load = import_module(MODULES[name]).load
    return partial(load, PATHFINDER[name]) if name in PATHFINDER else load
