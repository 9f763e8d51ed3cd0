"""Time and interruption: the seconds of a run, its time limit, and signals."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clock:
    """Seconds since the start of a run, including earlier sessions.

    `seconds` counts everything, `training` only the time in training steps.
    """

    def __init__(self, device: torch.device, begun: float):
        self.device = device
        self.before, self.training = 0.0, 0.0  # `before`: of earlier sessions
        self._begun, self._lap = begun, begun
        self._window = 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self._begun

    def start(self) -> None:
        """Start to count training time."""
        self._lap = time.monotonic()

    def stop(self) -> None:
        """Stop counting training time, after the GPU has finished its steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.training += now - self._lap
        self._window += now - self._lap
        self._lap = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this block as training."""
        self.stop()
        yield
        self.start()

    def window(self) -> float:
        """Return the seconds in training steps since the last call."""
        self.stop()
        window, self._window = self._window, 0.0
        return max(window, 1e-9)


class Interrupted(SystemExit):
    """A signal ended a session of a run, after its checkpoint was written."""

    def __init__(self, name: str):
        super().__init__(128 + signal.Signals[name].value)


class Stop:
    """Says when to stop early: `reason` becomes "minutes", "SIGTERM", "SIGINT" or "SIGHUP".

    Catches these signals inside its `with` block, except those that the process ignores, as with
    nohup. A second signal has its usual effect, but for SIGHUP, of which a lost terminal sends
    several.
    """

    def __init__(self, minutes: float | None, begun: float):
        self._deadline = math.inf if minutes is None else begun + 60 * minutes
        self._signal: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        if self._signal is None and time.monotonic() > self._deadline:
            return "minutes"
        return self._signal

    def __enter__(self) -> "Stop":
        heard = (n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN)
        self._before = {number: signal.signal(number, self._take) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        again = signal.SIG_IGN if number == signal.SIGHUP else self._before[number]
        signal.signal(number, again)
