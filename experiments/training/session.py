"""One session of a run of any model: its steps, journal and checkpoints, and how it ends early."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from omegaconf import OmegaConf

from experiments.common.devices import device_name
from experiments.common.files import write_whole
from experiments.common.provenance import now
from experiments.lra.result import write_result
from experiments.lra.settings import CONFIG
from experiments.training import run_file
from experiments.training import state as checkpoint
from experiments.training.clock import Clock, Interrupted, Stop
from experiments.training.data import stream
from experiments.training.device import peak_mib
from experiments.training.distributed import Group
from experiments.training.journal import Log, Progress, duration
from experiments.training.step import Trainer

STATE = "step model optimizer sums steepest random logged journal seconds training data".split()
AGAIN = "the same command continues from there"


class Session(ABC):
    """One session of a run. `run` of a subclass makes `trainer`, and has `_go` do the rest.

    Args:
        begun: when the time of `minutes` began.
        data: a digest of the data.
        tokens: those of a step, of all processes together.
    """

    log: Log
    run_about: dict[str, Any]
    trainer: Trainer
    kept: tuple[str, ...]  # the attributes that a checkpoint has beside STATE
    pause: float  # least seconds between checkpoints if checkpoint_every is not given
    save_every: int  # steps, at which a checkpoint is considered

    def __init__(
        self,
        settings: Any,
        group: Group,
        progress: Progress,
        begun: float,
        command: str,
        *,
        data: str,
        tokens: int,
    ):
        self.settings, self.group, self.progress = settings, group, progress
        self.begun, self.clock, self.command = begun, Clock(group.device, begun), command
        self.folder, self.data, self.tokens = settings.folder, data, tokens
        self.validated: float | None = None  # what the last validation found
        self.logged = 0  # the step of the last training line in the journal
        self.saved = 0.0  # seconds at the last checkpoint

    # ---- before the first step

    def _old_checkpoint(self, data: str) -> dict[str, Any] | None:
        """The checkpoint of an earlier session; `data` says what it was trained on, if other."""
        path = self.folder / checkpoint.CHECKPOINT
        if not path.exists():
            return None
        old = checkpoint.load(path, needs=(*STATE, *self.kept))
        if old["data"] != self.data:
            raise ValueError(
                f"{self.folder} was trained on other {data}: restore it, or give this run a folder"
                " of its own with name="
            )
        return old

    def _resume(self, old: dict[str, Any]) -> None:
        path, streams, rank = self.folder / checkpoint.CHECKPOINT, old["random"], self.group.rank
        here = self.trainer.state()
        for name in ("model", "optimizer"):
            checkpoint.refuse_shapes(path, old[name], here[name], checkpoint.RESUME)
        self.trainer.load(old | {"random": streams[min(rank, len(streams) - 1)]})
        if rank >= len(streams):  # fewer processes wrote the checkpoint
            torch.manual_seed(stream(self.settings.seed, rank, old["step"]))
        for name in ("logged", *self.kept):
            setattr(self, name, old[name])
        self.clock.resume(old["seconds"], old["training"])
        self.saved = old["seconds"]

    def _go(self, old: dict[str, Any] | None, tensorboard: bool | None = False) -> dict[str, Any]:
        """Takes the steps; returns what `_finish` does."""
        if old is None and self.group.leads:
            text = OmegaConf.to_yaml(OmegaConf.create(self.settings.values()))
            write_whole(self.folder / CONFIG, lambda file: file.write(text.encode()), "runs")
        size = 0 if old is None else old["journal"]
        self.log = Log(self.folder, size, self.trainer.step, tensorboard, self.group.leads)
        try:
            self._log_start()
            with Stop(self.settings.minutes, self.begun) as stop:
                return self._finish(self._train(stop))
        finally:
            self.log.close()

    @abstractmethod
    def _log_start(self) -> None:
        """Says what is trained, in the journal and on the terminal."""

    def _write_start(self, **values: Any) -> str:
        """Writes the first line of the session; returns the device and the parameters as text."""
        trainer, device = self.trainer, device_name(str(self.group.device))
        parameters = sum(p.numel() for p in trainer.model.parameters())
        session = {
            "date": now(),
            "step": trainer.step,
            "device": device,
            "processes": self.group.world,
            "versions": values["versions"],
            "command": self.command,
            "compiled": trainer.compiled,
            "captured": trainer.captured,
            "started": values.get("started", ""),
        }
        old = run_file.read(self.folder) if trainer.step else None
        self.run_about = {
            "settings": self.settings.values(),
            "scaled": getattr(self.settings, "scaled", {}),
            "task": values.get("task"),
            "data": self.data,
            "params": parameters,
            "mask": values.get("mask"),
            "density": values["density"],
            **({"pairs": values["pairs"]} if "pairs" in values else {}),
            "sessions": [*(old["sessions"] if old else []), session],
            "complete": False,
            "reason": None,
            "result": None,
        }
        if self.group.leads:
            run_file.write(self.folder, self.run_about)
        self.log.write(
            "start" if trainer.step == 0 else "resume",
            trainer.step,
            device=device,
            processes=self.group.world,
            params=parameters,
            compiled=trainer.compiled,
            captured=trainer.captured,
            date=now(),
            seconds=self.clock.seconds,
            **values,
        )
        return f"{parameters:,} parameters; {device} x {self.group.world}"

    # ---- steps

    def _train(self, stop: Stop) -> str | None:
        """Takes the remaining steps; returns why it stopped before the last one, or None."""
        settings, trainer, clock = self.settings, self.trainer, self.clock
        periods = settings.log_every, settings.eval_every, self.save_every
        self.timed = trainer.step
        clock.start()
        while trainer.step < settings.steps and not self._good_enough():
            trainer.advance()
            step, last = trainer.step, trainer.step == settings.steps
            log, validate, save = (last or step % every == 0 for every in periods)
            if log:
                self._log_training(step)
            if validate:
                with clock.paused():
                    self._validate(step)
            if self._good_enough() or (save and self._may_save(step)):
                with clock.paused():
                    self._save()
            # Several processes agree to stop, which takes time, so they ask only where one is due.
            asks = log or validate or save or self.group.world == 1
            if asks and not last and not self._good_enough():
                if self.group.any(stop.reason is not None):
                    clock.stop()
                    self._save()
                    return stop.reason or "SIGTERM"
        return None

    def _good_enough(self) -> bool:
        """Whether the run may end before its last step."""
        return False

    def _log_training(self, step: int) -> None:
        settings, clock = self.settings, self.clock
        means = self.trainer.read_sums(step - self.logged)
        if not math.isfinite(means["loss"] + means["grad_norm"]):
            raise ValueError(
                f"the loss is {means['loss']} and the gradient {means['grad_norm']} by step {step}:"
                f" lower lr={settings.lr:g} or use precision=fp32; the last checkpoint is kept"
            )
        rate = (step - self.timed) * self.tokens / clock.window()
        self.logged = self.timed = step
        values, text = self._training(step, means)
        self.log.write(
            "train",
            step,
            **values,
            seconds=clock.seconds,
            tokens_per_s=rate,
            lr=self.trainer.rate.item(),
            memory_mib=peak_mib(self.group.device),
        )
        left = self._spent() / step * (settings.steps - step)
        self.progress.show(
            f"step {step}/{settings.steps}  loss {means['loss']:.3f}{text}  "
            f"{rate / 1e3:.0f}k tokens/s  {duration(left)} left",
            last=step == settings.steps,
        )

    @abstractmethod
    def _training(self, step: int, means: dict[str, float]) -> tuple[dict[str, float], str]:
        """The values of a training line, and what the terminal says after the loss."""

    def _spent(self) -> float:
        """The seconds up to this step, from which those that are left follow."""
        return self.clock.training

    @abstractmethod
    def _validate(self, step: int) -> None: ...

    def _may_save(self, step: int) -> bool:
        """Whether to write a checkpoint now. Those at validations keep some time apart."""
        if self.settings.checkpoint_every or step == self.settings.steps:
            return True
        return self.group.any(self.clock.seconds - self.saved > self.pause)

    def _save(self) -> None:
        state = self.trainer.state()
        state["random"] = self.group.gather(state["random"])
        if self.group.leads:
            state |= {name: getattr(self, name) for name in ("logged", "data", *self.kept)}
            state |= {"journal": self.log.sync()}
            state |= {"seconds": self.clock.seconds, "training": self.clock.training}
            checkpoint.save(self.folder / checkpoint.CHECKPOINT, state)
        self.saved = self.clock.seconds

    # ---- after the last step

    @abstractmethod
    def _finish(self, reason: str | None) -> dict[str, Any]:
        """The result, written to the folder; `reason` says why steps are left, if they are.

        Raises Interrupted after a signal.
        """

    def _end_early(self, reason: str) -> None:
        """Says that steps are left. Raises Interrupted unless the time was up."""
        step = self.trainer.step
        self.log.write("end", step, complete=False, reason=reason, seconds=self.clock.seconds)
        self.progress.say(f"{reason} at step {step} of {self.settings.steps}: {AGAIN}")
        self.group.wait()
        if reason != "minutes":
            raise Interrupted(reason)

    def _write(self, result: dict[str, Any], reason: str | None = None) -> None:
        """Ends the journal and writes the result."""
        values = {"complete": reason is None, "reason": reason, "seconds": self.clock.seconds}
        self.log.write("end", self.trainer.step, **values)
        self.log.sync()
        if self.group.leads:
            write_result(self.folder, result)
            ended = {"complete": values["complete"], "reason": reason, "result": result}
            run_file.write(self.folder, self.run_about | ended)
