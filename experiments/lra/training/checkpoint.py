"""Files that are whole or not there: the checkpoint of a run, its best weights, and its lock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from experiments.common.files import write_whole

CHECKPOINT = "checkpoint.pt"
WEIGHTS = "weights.pt"
FORMAT = 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint in one step, as any other process sees it."""
    write_whole(path, lambda file: torch.save(state | {"format": FORMAT}, file), "runs")


def load(path: Path) -> dict[str, Any]:
    """The checkpoint of a file, on the CPU; no code of it is run.

    Raises ValueError if it cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes make of it
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{path} cannot be read ({first}); delete {path.parent} to start over"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this version; delete it to start over")
    return state


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder and holds it for this process; one that stays empty goes again.

    ValueError if another process has it. A killed process lets go of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another process trains in {folder}: wait for it, or give another name="
            ) from None
        try:
            yield
        finally:
            if list(folder.iterdir()) == [lock]:
                lock.unlink()
                for empty in (folder, folder.parent, folder.parent.parent):
                    with suppress(OSError):
                        empty.rmdir()
