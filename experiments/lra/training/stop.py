"""When a run has to stop before its last step: a time limit, or a signal."""

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended a session of a run, which has written its checkpoint."""

    def __init__(self, name: str):
        super().__init__(name)
        self.code = 128 + signal.Signals[name].value


class Stop:
    """`reason` becomes "minutes", "SIGTERM" or "SIGINT". Signals are taken while it is entered; a
    second one ends the process as it always does."""

    def __init__(self, minutes: float | None, begun: float):
        self._deadline = None if minutes is None else begun + 60 * minutes
        self._signal: str | None = None
        self._before: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        if self._signal is None and self._deadline and time.monotonic() > self._deadline:
            return "minutes"
        return self._signal

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        signal.signal(number, self._before[number])  # type: ignore[arg-type]
