"""Seconds of a run, its earlier sessions included."""

import time

import torch


class Clock:
    """`seconds` since the start of the run; `training`, those of them in training steps."""

    def __init__(self, device: torch.device, begun: float):
        self.device = device
        self.before, self.training = 0.0, 0.0  # of earlier sessions; of all
        self._begun, self._lap = begun, begun
        self._window = 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self._begun

    def resume(self, seconds: float, training: float) -> None:
        """Goes on from an earlier session."""
        self.before, self.training = seconds, training

    def start(self) -> None:
        """Training steps begin, or go on after something else."""
        self._lap = time.monotonic()

    def stop(self) -> None:
        """Training steps are interrupted by something else; waits until the GPU has done them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        here = time.monotonic()
        self.training += here - self._lap
        self._window += here - self._lap
        self._lap = here

    def window(self) -> float:
        """Seconds in training steps since the last call."""
        self.stop()
        window, self._window = self._window, 0.0
        return max(window, 1e-9)
