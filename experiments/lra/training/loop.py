"""A training run, from its settings to result.json, in one session or several."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from omegaconf import OmegaConf

from experiments.common.bits import pack
from experiments.common.devices import device_name
from experiments.common.files import write_whole
from experiments.common.provenance import now
from experiments.lra.tasks.task import SPLITS, Task
from experiments.lra.training import checkpoint
from experiments.lra.training.clock import Clock, Interrupted, Stop
from experiments.lra.training.config import CONFIG, PRECISIONS, Settings
from experiments.lra.training.data import DeviceSplit, fingerprint, load_data, stream
from experiments.lra.training.device import MIB, peak_mib, reset_memory
from experiments.lra.training.distributed import Group, join
from experiments.lra.training.evaluate import Evaluator, Objective, Recorded, objective_of
from experiments.lra.training.journal import Log, Progress, duration
from experiments.lra.training.model import (
    make_model,
    mask_of,
    origin,
    refuse_other_pairs,
    start_from,
)
from experiments.lra.training.result import (
    make_result,
    read_result,
    refuse_other_settings,
    summary,
    versions,
    write_result,
)
from experiments.lra.training.step import Trainer, explained_memory, micro_batches, seed_everything

PAUSE = 20.0  # least seconds between checkpoints if checkpoint_every is not given
STATE = (  # of a checkpoint
    "step model optimizer sums steepest random best validated logged journal seconds training data "
    "about"
).split()


def train(settings: Settings, command: str = "") -> dict[str, Any]:
    """Trains until the last step or the time limit; returns the result ({} with `data_only`).

    The same settings continue from the last checkpoint. A complete run is not trained again.
    `command` is the command line, for the result.

    Raises:
        ValueError: the data are missing or broken, the settings do not fit together, the folder
            holds another run, the batch needs too much memory, or the loss is not finite.
        Interrupted: a signal stopped the run after its checkpoint was written.
    """
    begun = time.monotonic()
    group = join(settings.device)
    progress = Progress(group.leads)
    micro_batches(settings, group)  # refuses a batch that does not divide
    if not settings.data_only:
        result = read_result(settings.folder)
        refuse_other_settings(settings)
        if result is not None and result["complete"]:
            progress.say(f"{settings.folder} is complete: {summary(result)}")
            return result
    _explain_scale(settings, progress.say)
    reset_memory(group.device)
    task = load_data(settings, group)
    if settings.data_only:
        progress.say(f"{task.name} ({task.source}) is ready in {settings.cache_dir}")
        return {}
    lock = checkpoint.locked(settings.folder) if group.leads else nullcontext()
    with lock, explained_memory(settings, task.length, group):
        return Session(settings, group, task, progress, begun, command).run()


class Session:
    """One session of a run: `run` does it all, the other methods are its parts in that order."""

    log: Log
    trainer: Trainer
    validation: Evaluator

    def __init__(
        self,
        settings: Settings,
        group: Group,
        task: Task,
        progress: Progress,
        begun: float,
        command: str,
    ):
        self.settings, self.group, self.task, self.progress = settings, group, task, progress
        self.begun, self.clock, self.command = begun, Clock(group.device, begun), command
        self.folder = settings.folder
        self.data = fingerprint(task)
        self.mask: tuple[str | None, float | None] = None, None
        self.best: dict[str, Any] | None = None  # the step with the best validation
        self.validated: float | None = None  # accuracy of the last validation
        self.logged = 0  # the step of the last training line in the journal
        self.saved = 0.0  # seconds at the last checkpoint

    def run(self) -> dict[str, Any]:
        settings, group = self.settings, self.group
        old = self._old_checkpoint()
        started = self._make_trainer(old)
        trains = self.trainer.step < settings.steps
        if trains:
            self.trainer.prepare(compile=settings.compile, graph=settings.graph)
        self.validation = self._evaluator("val", settings.val_examples)
        if trains and settings.graph:
            self.validation.prepare(self.trainer.pool)
        if old is None and group.leads:
            text = OmegaConf.to_yaml(OmegaConf.create(settings.values()))
            write_whole(self.folder / CONFIG, lambda file: file.write(text.encode()), "runs")
        kept = 0 if old is None else old["journal"]
        self.log = Log(self.folder, kept, self.trainer.step, settings.tensorboard, group.leads)
        try:
            self._log_start(started)
            with Stop(settings.minutes, self.begun) as stop:
                reason = self._train(stop)
                return self._finish(reason)
        finally:
            self.log.close()

    # ---- before the first step

    def _old_checkpoint(self) -> dict[str, Any] | None:
        """The checkpoint of an earlier session."""
        path = self.folder / checkpoint.CHECKPOINT
        if not path.exists():
            return None
        old = checkpoint.load(path, needs=STATE)
        if old["data"] != self.data:
            raise ValueError(
                f"{self.folder} was trained on other data of {self.task.name} than these "
                f"({self.task.source}): restore its data, or give this run a folder of its own "
                "with name="
            )
        return old

    def _make_trainer(self, old: dict[str, Any] | None) -> str:
        """Model, data and optimizer on the device; returns where training starts."""
        settings, group = self.settings, self.group
        seed_everything(settings.seed, 0)  # the same weights in every process
        model = make_model(settings, self.task)
        started = "fresh weights"
        if old is None and settings.init_from:
            about, fresh = origin(settings, self.task, model), settings.init_head == "fresh"
            started = start_from(model, settings.init_from, about, fresh_head=fresh)
        if group.rank:
            seed_everything(settings.seed, group.rank)
        split = DeviceSplit(self.task.splits["train"], group.device)
        self.mask, self.about = mask_of(model, settings), origin(settings, self.task, model)
        model = model.to(group.device).train()
        self.trainer = Trainer(model, split, objective_of(settings), settings, group)
        if old is None:
            return started
        refuse_other_pairs(self.folder / checkpoint.CHECKPOINT, old["about"], model)
        self._resume(old)
        return f"step {self.trainer.step}, where it was"

    def _resume(self, old: dict[str, Any]) -> None:
        path, streams, rank = self.folder / checkpoint.CHECKPOINT, old["random"], self.group.rank
        here = self.trainer.state()
        for name in ("model", "optimizer"):
            checkpoint.refuse_shapes(path, old[name], here[name], checkpoint.RESUME)
        self.trainer.load(old | {"random": streams[min(rank, len(streams) - 1)]})
        if rank >= len(streams):  # fewer processes wrote the checkpoint
            torch.manual_seed(stream(self.settings.seed, rank, old["step"]))
        self.best, self.validated, self.logged = old["best"], old["validated"], old["logged"]
        self.clock.resume(old["seconds"], old["training"])
        self.saved = old["seconds"]

    def _evaluator(
        self, name: str, examples: int | None = None, objective: Objective | None = None
    ) -> Evaluator:
        settings = self.settings
        return Evaluator(
            self.trainer.model,
            DeviceSplit(self.task.splits[name], self.group.device),
            objective or self.trainer.objective,
            self.group,
            batch=settings.eval_batch or settings.micro_batch or settings.batch,
            dtype=PRECISIONS[settings.precision],
            examples=examples,
            forward=self.trainer.forward,
        )

    def _log_start(self, started: str) -> None:
        task, settings, trainer = self.task, self.settings, self.trainer
        device = device_name(str(self.group.device))
        parameters = sum(p.numel() for p in trainer.model.parameters())
        self.log.write(
            "start" if trainer.step == 0 else "resume",
            trainer.step,
            config=settings.values() | {"scaled": settings.scaled},
            mask=self.mask[0],
            density=self.mask[1],
            device=device,
            processes=self.group.world,
            versions=versions(),
            params=parameters,
            task={
                "name": task.name,
                "source": task.source,
                "length": task.length,
                "classes": task.classes,
                "baselines": task.baselines,
                "examples": [len(task.splits[name]) for name in SPLITS],
                **({"manifest": task.manifest} if task.manifest else {}),
            },
            data_mib=trainer.split.bytes / MIB,
            compiled=trainer.compiled,
            captured=trainer.captured,
            started=started,
            date=now(),
            seconds=self.clock.seconds,
        )
        attention = settings.attention["name"]
        if self.mask[1] is not None:
            attention += f" {self.mask[0]} (density {self.mask[1]:.3g})"
        self.progress.say(
            f"{self.folder}: {task.name} ({task.source}), {task.length} tokens; {attention} "
            f"attention, {parameters:,} parameters; {device} x {self.group.world}; from {started}"
        )

    # ---- steps

    def _train(self, stop: Stop) -> str | None:
        """Takes the remaining steps; returns why it stopped before the last one, or None."""
        settings, trainer, clock = self.settings, self.trainer, self.clock
        save_every = settings.checkpoint_every or settings.eval_every
        periods = settings.log_every, settings.eval_every, save_every
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
        """Whether the last validation reached `stop_at`."""
        goal, accuracy = self.settings.stop_at, self.validated
        return goal is not None and accuracy is not None and accuracy >= goal

    def _log_training(self, step: int) -> None:
        settings = self.settings
        means = self.trainer.read_sums(step - self.logged)
        if not math.isfinite(means["loss"] + means["grad_norm"]):
            raise ValueError(
                f"the loss is {means['loss']} and the gradient {means['grad_norm']} by step {step}:"
                f" lower lr={settings.lr:g} or use precision=fp32; the last checkpoint is kept"
            )
        tokens = (step - self.timed) * settings.batch * self.task.length * (1 + self.task.pair)
        rate = tokens / self.clock.window()
        self.logged = self.timed = step
        self.log.write(
            "train",
            step,
            **means,
            seconds=self.clock.seconds,
            tokens_per_s=rate,
            lr=self.trainer.rate.item(),
            epoch=step * settings.batch / len(self.trainer.split),
            memory_mib=peak_mib(self.group.device),
        )
        val = "" if self.validated is None else f"  val {100 * self.validated:.1f} %"
        left = self.clock.seconds / step * (settings.steps - step)
        self.progress.show(
            f"step {step}/{settings.steps}  loss {means['loss']:.3f}  "
            f"accuracy {100 * means['accuracy']:.1f} %{val}  {rate / 1e3:.0f}k tokens/s  "
            f"{duration(left)} left",
            last=step == settings.steps,
        )

    def _validate(self, step: int) -> None:
        found = self.validation()
        self.log.write("val", step, **found, seconds=self.clock.seconds)
        self.validated = found["accuracy"]
        score = -found["loss"] if self.settings.pretrain else found["accuracy"]
        if self.best is None or score > self.best["score"]:
            weights = self.trainer.weights()
            self.best = {"score": score, "step": step, "model": weights} | found

    def _may_save(self, step: int) -> bool:
        """Whether to write a checkpoint now. Those at validations keep some time apart."""
        if self.settings.checkpoint_every or step == self.settings.steps:
            return True
        return self.group.any(self.clock.seconds - self.saved > PAUSE)

    def _save(self) -> None:
        state = self.trainer.state()
        state["random"] = self.group.gather(state["random"])
        if self.group.leads:
            state |= {
                "best": self.best,
                "validated": self.validated,
                "logged": self.logged,
                "journal": self.log.sync(),
                "seconds": self.clock.seconds,
                "training": self.clock.training,
                "data": self.data,
                "about": self.about,
            }
            checkpoint.save(self.folder / checkpoint.CHECKPOINT, state)
        self.saved = self.clock.seconds

    # ---- after the last step

    def _finish(self, reason: str | None) -> dict[str, Any]:
        """Tests the best weights and writes the result. Raises Interrupted after a signal."""
        step, settings = self.trainer.step, self.settings
        complete, again = reason is None, "the same command continues from there"
        if reason not in (None, "minutes"):
            self.log.write("end", step, complete=False, reason=reason, seconds=self.clock.seconds)
            self.progress.say(f"{reason} at step {step} of {settings.steps}: {again}")
            self.group.wait()
            raise Interrupted(reason)
        best = self.best or {"step": step, "accuracy": None}
        if self.best is not None:
            self.trainer.model.load_state_dict(self.best["model"])
        if self.group.leads:
            state = {"step": best["step"], "best": None, "model": self.trainer.weights()}
            state["about"] = self.about
            checkpoint.save(self.folder / checkpoint.WEIGHTS, state)
        recorded = None if settings.pretrain else Recorded()
        found = self._evaluator("test", objective=recorded)()
        self.log.write("test", step, **found, seconds=self.clock.seconds)
        result = make_result(
            settings,
            self.task,
            self.group,
            mask=self.mask[0],
            density=self.mask[1],
            steps=step,
            complete=complete,
            **found,
            val_accuracy=best["accuracy"],
            best_step=best["step"],
            seconds=self.clock.seconds,
            ms_per_step=1e3 * self.clock.training / step if step else None,
            memory_mib=peak_mib(self.group.device),
            data_mib=self.trainer.split.bytes / MIB,
            command=self.command,
            data=self.data,
            correct=None if recorded is None else pack(recorded.right(self.group)),
        )
        self.log.write("end", step, complete=complete, reason=reason, seconds=self.clock.seconds)
        self.log.sync()
        if self.group.leads:
            write_result(self.folder, result)
        self.progress.say(f"{self.folder}: {summary(result)}")
        if not complete:
            self.progress.say(
                f"stopped after {settings.minutes:g} minutes, at step {step}: {again}"
            )
        self.group.wait()  # a process that leaves early may stop the others
        return result


def _explain_scale(settings: Settings, say: Callable[[str], None]) -> None:
    if settings.scale == "small":
        changes = ", ".join(f"{k} {a} -> {b}" for k, (a, b) in settings.scaled.items())
        say(
            "scale=small: made for a CPU, not the recipe of the reference "
            f"({changes or 'as given'}); options on the command line are kept, and scale=full "
            "changes nothing"
        )
