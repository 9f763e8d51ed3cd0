"""The log of a run: journal.jsonl, TensorBoard events, and a line on the terminal."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

JOURNAL = "journal.jsonl"


class Log:
    """journal.jsonl, one JSON object a line, and the TensorBoard events of a session.

    Silent in processes that do not lead.

    Args:
        kept: bytes of the journal to keep from earlier sessions. The rest is about steps that are
            taken again.
        step: the step at which the session starts.
        tensorboard: whether to write events; None: if it is installed.
    """

    def __init__(
        self,
        folder: Path,
        kept: int = 0,
        step: int = 0,
        tensorboard: bool | None = False,
        leads: bool = True,
    ):
        self._events = self._file = None
        if not leads:
            return
        self._events = _event_writer(folder, step, tensorboard)
        path = folder / JOURNAL
        path.touch()
        if path.stat().st_size < kept:
            raise ValueError(
                f"{path} is shorter than the checkpoint beside it says: "
                "delete that checkpoint to start over"
            )
        os.truncate(path, kept)
        self._file = open(path, "ab", buffering=0)

    def write(self, kind: str, step: int, **values: Any) -> None:
        if self._file is not None:
            line = json.dumps({"kind": kind, "step": step} | rounded(values))
            self._file.write(line.encode() + b"\n")
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> int:
        """Flushes the journal to the disk; returns its size in bytes."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        for file in (self._file, self._events):
            if file is not None:
                file.close()


def _event_writer(folder: Path, step: int, wanted: bool | None) -> Any:
    """A writer of TensorBoard events; None if they are not wanted or tensorboard is missing."""
    if wanted is False:
        return None
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        if wanted:
            raise ValueError(
                "tensorboard=true, but it is not installed: pip install tensorboard"
            ) from None
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def rounded(values: Any) -> Any:
    """The values with floats rounded to six digits."""
    if isinstance(values, float):
        return float(f"{values:.6g}")
    if isinstance(values, dict):
        return {str(key): rounded(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    return values


class Progress:
    """A line on stderr, rewritten on a terminal and repeated every ten seconds elsewhere."""

    def __init__(self, wanted: bool):
        self.wanted, self.live, self._last = wanted, sys.stderr.isatty(), 0.0

    def show(self, text: str, *, last: bool = False) -> None:
        now = time.monotonic()
        if not self.wanted or not (last or now - self._last > (0.2 if self.live else 10)):
            return
        self._last = now
        end = "\n" if last or not self.live else "\r"
        print(f"{text:<100}" if self.live else text, end=end, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Prints a line that is not overwritten."""
        if self.wanted:
            print(f"{text:<100}" if self.live else text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
