"""A training run, from its settings to result.json, in one session or several."""

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from experiments.common.bits import pack
from experiments.lra.objectives import Recorded, objective_of
from experiments.lra.result import (
    make_result,
    read_result,
    refuse_other_settings,
    summary,
    versions,
)
from experiments.lra.settings import Settings
from experiments.lra.tasks.load import load_task
from experiments.lra.tasks.task import SPLITS, Task
from experiments.lra.weights import make_model, mask_of, origin, refuse_other_pairs, start_from
from experiments.training import session
from experiments.training import state as checkpoint
from experiments.training.data import DeviceSplit
from experiments.training.device import MIB, peak_mib, reset_memory, same_bits
from experiments.training.distributed import Group, join
from experiments.training.evaluate import Evaluator, Objective
from experiments.training.journal import Progress
from experiments.training.settings import PRECISIONS
from experiments.training.step import Trainer, explained_memory, micro_batches, seed_everything


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
    with lock, same_bits(settings.deterministic), explained_memory(settings, task.length, group):
        return Session(settings, group, task, progress, begun, command).run()


class Session(session.Session):
    """One session of a run: `run` does it all, the other methods are its parts in that order."""

    validation: Evaluator
    kept = "best", "validated", "about"
    pause = 20.0

    def __init__(
        self,
        settings: Settings,
        group: Group,
        task: Task,
        progress: Progress,
        begun: float,
        command: str,
    ):
        tokens = settings.batch * task.length * (1 + task.pair)
        data = fingerprint(task)
        super().__init__(settings, group, progress, begun, command, data=data, tokens=tokens)
        self.task = task
        self.save_every = settings.checkpoint_every or settings.eval_every
        self.mask: tuple[str | None, float | None] = None, None
        self.best: dict[str, Any] | None = None  # the step with the best validation

    def run(self) -> dict[str, Any]:
        settings, task = self.settings, self.task
        old = self._old_checkpoint(f"data of {task.name} than these ({task.source})")
        self.started = self._make_trainer(old)
        trains = self.trainer.step < settings.steps
        if trains:
            self.trainer.prepare(compile=settings.compile, graph=settings.graph)
        self.validation = self._evaluator("val", settings.val_examples)
        if trains and settings.graph:
            self.validation.prepare(self.trainer.pool)
        return self._go(old, settings.tensorboard)

    # ---- before the first step

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

    def _log_start(self) -> None:
        task, settings = self.task, self.settings
        said = self._write_start(
            config=settings.values() | {"scaled": settings.scaled},
            mask=self.mask[0],
            density=self.mask[1],
            versions=versions(),
            task={
                "name": task.name,
                "source": task.source,
                "length": task.length,
                "classes": task.classes,
                "baselines": task.baselines,
                "examples": [len(task.splits[name]) for name in SPLITS],
                **({"manifest": task.manifest} if task.manifest else {}),
            },
            data_mib=self.trainer.split.bytes / MIB,
            started=self.started,
        )
        attention, (mask, density) = settings.attention["name"], self.mask
        if density is not None:
            attention += f" {mask}, {density:.0%} of the blocks"
        self.progress.say(
            f"{self.folder}, from {self.started}\n"
            f"  task: {task.name} ({task.source}), {task.length} tokens\n"
            f"  attention: {attention}\n"
            f"  model: {said}"
        )
        if density == 1:
            self.progress.say(
                f"warning: density 1, the mask {mask} computes every block and saves no time: give"
                " a smaller block_size= or another mask="
            )

    # ---- steps

    def _good_enough(self) -> bool:
        """Whether the last validation reached `stop_at`."""
        goal, accuracy = self.settings.stop_at, self.validated
        return goal is not None and accuracy is not None and accuracy >= goal

    def _training(self, step: int, means: dict[str, float]) -> tuple[dict[str, float], str]:
        epoch = step * self.settings.batch / len(self.trainer.split)
        val = "" if self.validated is None else f"  val {100 * self.validated:.1f} %"
        return means | {"epoch": epoch}, f"  accuracy {100 * means['accuracy']:.1f} %{val}"

    def _spent(self) -> float:
        return self.clock.seconds

    def _validate(self, step: int) -> None:
        found = self.validation()
        self.log.write("val", step, **found, seconds=self.clock.seconds)
        self.validated = found["accuracy"]
        score = -found["loss"] if self.settings.pretrain else found["accuracy"]
        if self.best is None or score > self.best["score"]:
            weights = self.trainer.weights()
            self.best = {"score": score, "step": step, "model": weights} | found

    # ---- after the last step

    def _finish(self, reason: str | None) -> dict[str, Any]:
        """Tests the best weights and writes the result. Raises Interrupted after a signal."""
        if reason not in (None, "minutes"):
            self._end_early(reason)
        step, settings, complete = self.trainer.step, self.settings, reason is None
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
        self._write(result, reason)
        self.progress.say(f"{self.folder}: {summary(result)}")
        if not complete:
            self.progress.say(
                f"stopped after {settings.minutes:g} minutes, at step {step}: {session.AGAIN}"
            )
        self.group.wait()  # a process that leaves early may stop the others
        return result


def _explain_scale(settings: Settings, say: Callable[[str], None]) -> None:
    if settings.scale == "small":
        changes = "".join(f"\n  {k}: {a} -> {b}" for k, (a, b) in settings.scaled.items())
        say(
            f"scale=small: made for a CPU, not the recipe of the reference{changes}\n"
            "  (scale=full trains the recipe; options on the command line are kept)"
        )


def load_data(settings: Settings, group: Group) -> Task:
    """The task of a run. The first process makes the data; the others wait, then read it."""
    if not group.leads:
        group.wait()
    task = load_task(**settings.data())
    if group.leads:
        group.wait()
    return task


def fingerprint(task: Task) -> str:
    """A digest of the task's data: all labels, and the tokens of 256 or more examples a split."""
    found = hashlib.sha256(f"{task.name} {task.source} {task.vocab} {task.length}".encode())
    for name in sorted(task.splits):
        split = task.splits[name]
        step = max(1, len(split.labels) // 256)
        found.update(f"{name} {split.tokens.shape} {split.tokens.dtype}".encode())
        found.update(np.ascontiguousarray(split.labels).tobytes())
        found.update(np.ascontiguousarray(split.tokens[::step]).tobytes())
    return found.hexdigest()[:12]
