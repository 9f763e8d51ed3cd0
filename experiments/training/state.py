"""Checkpoints and weights of a run, written whole or not at all, and the lock of its folder."""

import fcntl
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common.files import reading, write_whole

CHECKPOINT = "checkpoint.pt"
WEIGHTS = "weights.pt"
FORMAT = 1
RESUME = "delete it to start over"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically: other processes see the old file or the new one."""
    write_whole(path, lambda file: torch.save(state | {"format": FORMAT}, file), "runs")


def load(path: Path, remedy: str = RESUME, needs: Collection[str] = ()) -> dict[str, Any]:
    """Return the state in a file, on the CPU. Runs no code that the file may hold.

    Args:
        remedy: what to do if the file cannot be used, for the error.
        needs: the keys that the state must have.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    with reading(path, remedy, "is not a checkpoint, or it is damaged"), open(path, "rb") as file:
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version: {remedy}")
    if missing := [name for name in needs if name not in state]:
        raise ValueError(f"{path} has no {', '.join(missing)}: {remedy}")
    return state


def weights_file(folder: Path) -> Path | None:
    """Return the file with the best weights of a run: `weights.pt` once it is complete, before that
    `checkpoint.pt`. None if there is neither.
    """
    return next((path for name in (WEIGHTS, CHECKPOINT) if (path := folder / name).exists()), None)


def load_weights(path: Path, remedy: str) -> tuple[dict[str, Tensor], int, dict[str, Any]]:
    """Return the best weights in a file, their step, and what the file says about their run.

    Raises ValueError if the file is not a checkpoint or the weights of a run.
    """
    state = load(path, remedy, ("step", "best", "model", "about"))
    source = state["best"] or state
    return source["model"], source["step"], state["about"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder and lock it for this process; remove it if it stays empty.

    The lock ends with the process, even if it is killed. Remove what a killed one had half written.

    Raises:
        ValueError: another process holds the lock.
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
        for name in (CHECKPOINT, WEIGHTS):
            for half in folder.glob(f".{name}.*"):
                half.unlink()
        try:
            yield
        finally:
            if list(folder.iterdir()) == [lock]:
                lock.unlink()
                for empty in (folder, folder.parent, folder.parent.parent):
                    with suppress(OSError):
                        empty.rmdir()
