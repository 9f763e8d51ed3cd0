"""`load_task` finds the data of a task, or makes them where that is asked for."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.lra.tasks.task import PATHFINDER, Task

NAMES = ("listops", "text", "retrieval", "imdb_same_movie", "image", *PATHFINDER)


def load_task(
    name: str, data_dir: str | Path, *, cache_dir: str | Path, seed: int = 0, **options: Any
) -> Task:
    """A task of NAMES: read from its official files under `data_dir`, or generated.

    Args:
        data_dir: holds the official folders (listops-1000, aclImdb, tsv_data, cifar-10-batches-bin
            or cifar10_gray.npz[.xz], pathfinder32 ...) side by side, or is or holds lra_release.
        cache_dir: where tokenised and generated data are kept from run to run.
        seed: of generated data, and of splits that are drawn.
        options: by task; None leaves an option at its default. `limit`: the first n examples of
            every split. `generate` (ListOps, Pathfinder): make the data, `examples` (train, val,
            test) of them. `max_length`, `order`, ... : see the task's own `load`.

    Raises:
        ValueError: no such task or option, or data that are missing or broken: it names the file,
            the place in it and the remedy.
    """
    load = _loader(name)
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


def _loader(name: str) -> Callable[..., Task]:
    # Imported here: each task reads in its own way, with packages that the others do without.
    match name:
        case "listops":
            from experiments.lra.tasks.listops import load
        case "text":
            from experiments.lra.tasks.text import load
        case "retrieval":
            from experiments.lra.tasks.retrieval import load
        case "imdb_same_movie":
            from experiments.lra.tasks.retrieval import load_same_movie as load
        case "image":
            from experiments.lra.tasks.image import load
        case _ if name in PATHFINDER:
            from experiments.lra.tasks.pathfinder import load as load_size

            load = partial(load_size, PATHFINDER[name])
        case _:
            raise ValueError(f"no task {name!r}: choose from {', '.join(NAMES)}")
    return load
