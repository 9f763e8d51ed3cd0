"""A run from its settings to result.json, in one session or several."""

import math
import time
from dataclasses import asdict
from typing import Any

import torch
from omegaconf import OmegaConf

from experiments.common.devices import device_name
from experiments.common.files import write_whole
from experiments.common.provenance import code_version, now
from experiments.lra.tasks.task import Task
from experiments.lra.training import begin, checkpoint, initial, memory
from experiments.lra.training.clock import Clock
from experiments.lra.training.config import PRECISIONS, Settings
from experiments.lra.training.data import DeviceSplit, fingerprint, stream
from experiments.lra.training.distributed import Group, join
from experiments.lra.training.evaluate import Evaluator
from experiments.lra.training.journal import Log, Progress, duration, read_result, write_result
from experiments.lra.training.objective import MaskedPixels, Objective, classify
from experiments.lra.training.result import make_result, summary
from experiments.lra.training.step import Trainer, parts, seed_everything
from experiments.lra.training.stop import Interrupted, Stop


def train(settings: Settings) -> dict[str, Any]:
    """Trains until the last step or until `settings.minutes` are over; returns the result, or {}
    of `settings.data_only`.

    The same settings go on from the last checkpoint. A run that is complete is left as it is.

    Raises:
        ValueError: missing or broken data, settings that do not fit together, a folder that holds
            another run, a batch that does not fit into the memory, a loss that is not finite.
        Interrupted: a signal came, and the checkpoint is written.
    """
    begun = time.monotonic()
    group = join(settings.device)
    progress = Progress(group.leads)
    parts(settings, group)
    folder = settings.folder
    if not settings.data_only:  # data for the runs of a GPU may be made without one
        done = read_result(folder)
        begin.refuse_other_settings(settings)
        if done is not None and done["complete"]:
            progress.say(f"{folder} is complete: {summary(done)}")
            return done
    begin.explain_scale(settings, progress.say)
    memory.start(group.device)
    task = begin.load(settings, group)
    if settings.data_only:
        progress.say(f"{task.name} ({task.source}) is ready in {settings.cache_dir}")
        return {}
    clock = Clock(group.device, begun)
    if not group.leads:
        return Run(settings, group, task, clock, progress).go(begun)
    with checkpoint.locked(folder):
        return Run(settings, group, task, clock, progress).go(begun)


PAUSE = 20.0  # seconds from one checkpoint to the next, where checkpoint_every is not given


class Run:
    """One session of a run."""

    log: Log

    def __init__(
        self, settings: Settings, group: Group, task: Task, clock: Clock, progress: Progress
    ):
        self.settings, self.group, self.task = settings, group, task
        self.clock, self.progress = clock, progress
        self.folder = settings.folder
        self.objective: Objective = classify
        if settings.pretrain:
            self.objective = MaskedPixels(settings.mask_share)
        self.data = fingerprint(task)
        self.about = initial.about(settings, task)
        self.best: dict[str, Any] | None = None  # the step with the best validation
        self.validated: float | None = None  # accuracy of the last validation
        self.logged = 0  # the step of the last line about training
        self.saved = 0.0  # seconds at the last checkpoint
        self.timed = 0  # the step at which the clock's window began

    def go(self, begun: float) -> dict[str, Any]:
        """The session: everything is made and tried, then steps are taken and recorded."""
        settings = self.settings
        old = self._old_checkpoint()
        with memory.explained(settings, self.task, self.group):
            started = self._make(old)
            kept = 0 if old is None else old["journal"]
            self._write_config(fresh=old is None)
            step = self.trainer.step
            self.log = Log(self.folder, kept, step, settings.tensorboard, self.group.leads)
            try:
                self._introduce(started)
                with Stop(settings.minutes, begun) as stop:
                    reason = self._steps(stop)
                    return self._end(reason)
            finally:
                self.log.close()

    # ---- before the first step

    def _old_checkpoint(self) -> dict[str, Any] | None:
        path = self.folder / checkpoint.CHECKPOINT
        if not path.exists():
            return None
        old = checkpoint.load(path)
        if old["data"] != self.data:
            raise ValueError(
                f"{self.folder} was trained on other data of {self.task.name}: bring them back, or "
                "name= gives this run a folder of its own"
            )
        return old

    def _make(self, old: dict[str, Any] | None) -> str:
        """Model, data and step on the device; returns where training begins."""
        settings, group = self.settings, self.group
        seed_everything(settings.seed, 0)  # the same weights in every process
        model = initial.make_model(settings, self.task)
        started = "fresh weights"
        if old is None and settings.init_from:
            started = initial.start_from(
                model, settings.init_from, self.about, fresh_head=settings.init_head == "fresh"
            )
        if group.rank:
            seed_everything(settings.seed, group.rank)
        self.split = DeviceSplit(self.task.splits["train"], group.device)
        self.data_mib = self.split.bytes / memory.MIB
        model = model.to(group.device).train()
        self.trainer = Trainer(model, self.split, self.objective, settings, group)
        if old is not None:
            self._resume(old)
            started = f"step {self.trainer.step}, where it was"
        self.validate = self._evaluator("val", settings.val_examples)
        if self.trainer.step < settings.steps:
            self.trainer.prepare(
                compile=settings.compile, capture=settings.graph, tell=self.progress.say
            )
            if settings.graph:
                self.validate.prepare(self.trainer.pool)
        return started

    def _evaluator(self, name: str, examples: int | None = None) -> Evaluator:
        settings = self.settings
        return Evaluator(
            self.trainer.model,
            DeviceSplit(self.task.splits[name], self.group.device),
            self.objective,
            self.group,
            batch=settings.eval_batch or settings.micro_batch or settings.batch,
            dtype=PRECISIONS[settings.precision],
            examples=examples,
        )

    def _write_config(self, *, fresh: bool) -> None:
        if fresh and self.group.leads:
            values = {k: v for k, v in asdict(self.settings).items() if k != "scaled"}
            text = OmegaConf.to_yaml(OmegaConf.create(values))
            path = self.folder / begin.CONFIG
            write_whole(path, lambda file: file.write(text.encode()), "runs")

    def _introduce(self, started: str) -> None:
        """The first line of the journal, and of the terminal."""
        task, settings, device = self.task, self.settings, device_name(str(self.group.device))
        parameters = sum(p.numel() for p in self.trainer.model.parameters())
        sizes = [len(task.splits[name].labels) for name in ("train", "val", "test")]
        self.log.write(
            "start" if self.trainer.step == 0 else "resume",
            self.trainer.step,
            config=asdict(settings),
            device=device,
            processes=self.group.world,
            versions=code_version(),
            params=parameters,
            task={
                "name": task.name,
                "source": task.source,
                "length": task.length,
                "classes": task.classes,
                "baselines": task.baselines,
                "examples": sizes,
            },
            data_mib=self.data_mib,
            compiled=self.trainer.compiled,
            captured=self.trainer.captured,
            started=started,
            date=now(),
            seconds=self.clock.seconds,
        )
        attention = settings.attention["name"] + (f" {settings.mask}" if settings.mask else "")
        self.progress.say(
            f"{self.folder}: {task.name} ({task.source}), {task.length} tokens; {attention} "
            f"attention, {parameters:,} parameters; {device} x {self.group.world}; from {started}"
        )

    # ---- steps

    def _steps(self, stop: Stop) -> str | None:
        """Takes the steps that are left; returns why it stopped before the last one, or None."""
        trainer, last = self.trainer, self.settings.steps
        self.timed = trainer.step
        self.clock.start()
        while trainer.step < last and not self._good_enough():
            until = min(last, *(trainer.step // n * n + n for n in self._periods()))
            while trainer.step < until:
                trainer.advance()
                if self.group.world == 1 and stop.reason:  # several ask each other at the boundary
                    break
            self._boundary(trainer.step)
            if self._good_enough():
                self._save()
            elif trainer.step < last and self.group.any(stop.reason is not None):
                self.clock.stop()
                self._save()
                return stop.reason or "SIGTERM"
        return None

    def _good_enough(self) -> bool:
        """Whether the last validation reached `stop_at`."""
        goal, found = self.settings.stop_at, self.validated
        return goal is not None and found is not None and found >= goal

    def _periods(self) -> tuple[int, int, int]:
        settings = self.settings
        save_every = settings.checkpoint_every or settings.eval_every
        return settings.log_every, settings.eval_every, save_every

    def _boundary(self, step: int) -> None:
        """What is due after this step: a line of the journal, a validation, a checkpoint."""
        due = [step % n == 0 or step == self.settings.steps for n in self._periods()]
        if due[0]:
            self._tell(step)
        if due[1]:
            self.clock.stop()
            self._validate(step)
            self.clock.start()
        if due[2] and self._may_save(step):
            self.clock.stop()
            self._save()
            self.clock.start()

    def _tell(self, step: int) -> None:
        settings = self.settings
        means = self.trainer.read_sums(step - self.logged)
        if not math.isfinite(means["loss"] + means["grad_norm"]):
            raise ValueError(
                f"the loss is {means['loss']} and the gradient {means['grad_norm']} by step {step}:"
                f" lower lr={settings.lr:g} or take precision=fp32; the last checkpoint is kept"
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
            epoch=step * settings.batch / len(self.split),
            memory_mib=memory.peak_mib(self.group.device),
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
        found = self.validate()
        self.log.write("val", step, **found, seconds=self.clock.seconds)
        self.validated = found["accuracy"]
        score = -found["loss"] if self.settings.pretrain else found["accuracy"]
        if self.best is None or score > self.best["score"]:
            weights = self.trainer.weights()
            self.best = {"score": score, "step": step, "model": weights} | found

    # ---- checkpoints

    def _may_save(self, step: int) -> bool:
        """Whether a checkpoint is worth its time: those of validations are not, one on another."""
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

    def _save_weights(self, step: int) -> None:
        """The weights that are tested, alone, as `init_from` takes them elsewhere."""
        if self.group.leads:
            state = {"step": step, "best": None, "model": self.trainer.weights()}
            checkpoint.save(self.folder / checkpoint.WEIGHTS, state | {"about": self.about})

    def _resume(self, old: dict[str, Any]) -> None:
        streams = old["random"]
        rank = self.group.rank
        self.trainer.load(old | {"random": streams[min(rank, len(streams) - 1)]})
        if rank >= len(streams):  # fewer processes wrote it
            torch.manual_seed(stream(self.settings.seed, rank, old["step"]))
        self.best, self.validated, self.logged = old["best"], old["validated"], old["logged"]
        self.clock.resume(old["seconds"], old["training"])
        self.saved = old["seconds"]

    # ---- the end

    def _end(self, reason: str | None) -> dict[str, Any]:
        step = self.trainer.step
        again = "the same command goes on from there"
        if reason not in (None, "minutes"):
            self.log.write("end", step, complete=False, reason=reason, seconds=self.clock.seconds)
            self.progress.say(f"{reason} at step {step} of {self.settings.steps}: {again}")
            self.group.wait()
            raise Interrupted(reason)
        if self.best is not None:
            self.trainer.model.load_state_dict(self.best["model"])
        self._save_weights(self.best["step"] if self.best else step)
        found = self._evaluator("test")()
        self.log.write("test", step, **found, seconds=self.clock.seconds)
        result = make_result(
            self.settings,
            self.task,
            self.group,
            self.clock,
            step=step,
            complete=reason is None,
            best=self.best,
            test=found,
            data_mib=self.data_mib,
        )
        self.log.write(
            "end", step, complete=reason is None, reason=reason, seconds=self.clock.seconds
        )
        self.log.sync()
        if self.group.leads:
            write_result(self.folder, result)
        self.progress.say(f"{self.folder}: {summary(result)}")
        if reason is not None:
            minutes = f"{self.settings.minutes:g} minutes"
            self.progress.say(f"stopped after {minutes}, at step {step}: {again}")
        self.group.wait()  # one that leaves early may take the others with it
        return result
