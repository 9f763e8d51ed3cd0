"""The training loop: a run from its settings to its result, in one session or several.

What is trained is a `Work`: experiments.lra.run has the classifiers of the Long Range Arena,
experiments.lm.run language models. The same settings continue from the last checkpoint.
"""

import math
import sys
import time
from contextlib import nullcontext
from typing import Any, ClassVar, Protocol

from torch import nn
from tqdm import tqdm

from experiments.common.devices import device_name
from experiments.common.files import reading
from experiments.common.provenance import now
from experiments.training import run_file, state
from experiments.training.clock import Clock, Interrupted, Stop
from experiments.training.device import MIB, peak_mib, reset_memory, same_bits
from experiments.training.distributed import Group, join
from experiments.training.evaluate import Objective, seed_everything
from experiments.training.settings import Training
from experiments.training.step import Trainer, explained_memory, micro_batches

STATE = "step model optimizer sums steepest random logged best validated about data journal"
STATE += " seconds training"
AGAIN = "the same command continues from there"
SMALLER = ", whose gradients are added up, a smaller model, or shorter sequences"
# what the time of a step depends on that may differ between sessions
PLACE = "device processes versions compiled captured micro_batch context_parallel deterministic"


class Work(Protocol):
    """What is trained on which data, and how it is evaluated; the base of such classes."""

    settings: Any
    pause: ClassVar[float]  # least seconds between checkpoints without checkpoint_every
    scored: ClassVar[bool]  # whether the objective counts right answers
    objective: Objective  # what a step minimises
    data: str  # a digest
    source: str  # of the data, for errors and the terminal
    task: dict[str, Any]  # of `run_file`
    unit: str  # what a batch has, such as "examples of 128 tokens"
    tokens: int  # of a step, of all processes together
    save_every: int  # steps, at which a checkpoint is considered

    def __init__(self, settings: Any, group: Group): ...

    def make_model(self, old: dict[str, Any] | None) -> tuple[nn.Module, str]:
        """Return a model on the CPU, and where its weights come from; old: a checkpoint."""
        ...

    def about(self) -> dict[str, Any]: ...  # what weights have to say of their run

    def masks(self) -> dict[str, Any]: ...  # mask, density, ... of `run_file`

    def train_split(self) -> Any: ...  # on the device: len() and batch(rows)

    def prepare(self, trainer: Trainer) -> None: ...  # compile the step, make the validation

    def validate(self, last: bool) -> dict[str, float]: ...  # loss, perhaps accuracy

    def score(self, found: dict[str, float]) -> float | None:
        """Return what the best weights have most of; None: the last weights are the best."""
        ...

    def good_enough(self, found: dict[str, float] | None) -> bool:
        """Return whether the run may end early, by what its last validation found."""
        goal = self.settings.stop_at
        return goal is not None and found is not None and found["accuracy"] >= goal

    def test(self, validated: dict[str, float] | None) -> dict[str, Any]:
        """Return `result` of `run_file` of the model, which now has its best weights."""
        ...

    @staticmethod
    def summary(run: dict[str, Any]) -> str: ...  # a run that was tested, in a line


def say(group: Group, text: str) -> None:
    """Print a line on stderr, once for all processes."""
    if group.leads:
        tqdm.write(text, file=sys.stderr)


def train(settings: Training, work_of: Any, command: str = "") -> dict[str, Any]:
    """Train until the last step or the time limit; return the content of run.json.

    A complete run is not trained again.

    Args:
        work_of: the class of a `Work`.
        command: the command line, for run.json.

    Raises:
        ValueError: the data are missing or broken, the settings do not fit together, the folder
            holds another run, the batch needs too much memory, or the loss is not finite.
        Interrupted: a signal stopped the run after its checkpoint was written.
    """
    begun, folder = time.monotonic(), settings.folder
    group = join(str(settings.device), settings.context_parallel)
    micro_batches(settings, group)  # refuses a batch that does not divide
    if (run := _complete(settings)) is None:
        reset_memory(group.device)
        work = work_of(settings, group)
        lock = state.locked(folder) if group.leads else nullcontext()
        micro = f"micro_batch={settings.micro_batch or settings.batch}"
        with lock, same_bits(settings.deterministic), explained_memory(micro, SMALLER):
            group.wait()
            # another process may have trained in the folder while the data were read
            if (run := _complete(settings)) is None:
                return Session(settings, group, work, begun, command).run()
    say(group, f"{folder} is complete: {work_of.summary(run)}")
    return run


def _complete(settings: Training) -> dict[str, Any] | None:
    """Return the run in the folder if it is complete. Raises ValueError for other settings."""
    folder = settings.folder
    run = run_file.read(folder)
    if run is None or not (run["result"] or (folder / state.CHECKPOINT).exists()):
        return None
    run_file.refuse_other_settings(folder, run["settings"], settings)
    return run if run["complete"] else None


class Session:
    """One session of a run. `run` does it all; the other methods are its parts in that order."""

    def __init__(self, settings: Training, group: Group, work: Work, begun: float, command: str):
        self.settings, self.group, self.work = settings, group, work
        self.folder, self.clock, self.command = settings.folder, Clock(group.device, begun), command
        self.stop = Stop(settings.minutes, begun)
        # what a checkpoint has beside the state of the trainer
        self.logged = 0  # the step of the last training line in the journal
        self.best: dict[str, Any] | None = None  # the step with the best validation
        self.validated: dict[str, float] | None = None  # what the last validation found
        self.place = ""  # where `clock.training` was measured
        self.first = 0  # the step from which on

    def run(self) -> dict[str, Any]:
        settings, group, work = self.settings, self.group, self.work
        old = self._read_checkpoint()
        seed_everything(settings.seed, 0)  # the same weights in every process
        model, started = work.make_model(old)
        if group.rank:  # which drops hidden states of its own tokens
            seed_everything(settings.seed, group.rank)
        self.about = work.about()
        model = model.to(group.device).train()
        self.trainer = Trainer(model, work.train_split(), work.objective, settings, group)
        if old is not None:
            self._resume(old)
        self.saved = self.clock.seconds if old is None else old["seconds"]
        work.prepare(self.trainer)
        kept = 0 if old is None else old["journal"]
        self.log = run_file.Log(self.folder, kept, group.leads)
        try:
            self._start(f"step {self.trainer.step}, where it was" if old else started)
            with self.stop:
                return self._finish(self._steps())
        finally:
            self.log.close()

    # ---- before the first step

    def _read_checkpoint(self) -> dict[str, Any] | None:
        path = self.folder / state.CHECKPOINT
        if not path.exists():
            return None
        old = state.load(path, needs=STATE.split())
        if old["data"] != self.work.data:
            raise ValueError(
                f"{self.folder} was trained on other data than {self.work.source}: restore them, "
                "or give this run a folder of its own with name="
            )
        return old

    def _resume(self, old: dict[str, Any]) -> None:
        streams, rank = old["random"], self.group.rank
        with reading(self.folder / state.CHECKPOINT, state.RESUME, "does not fit this model"):
            self.trainer.load(old | {"random": streams[min(rank, len(streams) - 1)]})
        if rank >= len(streams):  # fewer processes wrote the checkpoint
            seed_everything(self.settings.seed, rank, old["step"])
        self.logged, self.best, self.validated = old["logged"], old["best"], old["validated"]
        self.clock.before, self.clock.training = old["seconds"], old["training"]
        self.place, self.first = old.get("place", ""), old.get("first", 0)

    def _start(self, started: str) -> None:
        """Write run.json and the first line of the session, and say what is trained."""
        trainer, work, device = self.trainer, self.work, device_name(str(self.group.device))
        parameters = sum(p.numel() for p in trainer.model.parameters())
        session = {
            "date": now(),
            "step": trainer.step,
            "device": device,
            "processes": self.group.world,
            "versions": run_file.versions(),
            "command": self.command,
            "compiled": self.settings.compile if trainer.compiled else False,
            "captured": trainer.captured,
            "started": started,
        }
        about = self.settings.values() | session
        place = str([about[name] for name in PLACE.split()])
        if place != self.place:
            self.place, self.first, self.clock.training = place, trainer.step, 0.0
        old = run_file.read(self.folder) if trainer.step else None
        self.file: dict[str, Any] = {
            "settings": self.settings.values(),
            "scaled": self.settings.scaled,
            "task": work.task,
            "data": work.data,
            "params": parameters,
            **work.masks(),
            "sessions": [*(old["sessions"] if old else []), session],
            "complete": False,
            "reason": None,
            "result": None,
        }
        self._write()
        if self.group.leads:  # weights of an earlier result
            (self.folder / state.WEIGHTS).unlink(missing_ok=True)
        kind = "resume" if trainer.step else "start"
        self.log.write(kind, trainer.step, date=session["date"], seconds=self.clock.seconds)
        mask, density = self.file["mask"], self.file["density"]
        share = "" if density is None else f", {density:.0%} of the blocks"
        masked = "" if mask is None else f", mask {mask}{share}"
        say(
            self.group,
            f"{self.folder}, from {started}\n  {work.source}; {work.unit}{masked}\n"
            f"  {parameters:,} parameters; {device} x {self.group.world}",
        )
        if density == 1 and mask != "causal()":
            say(
                self.group,
                f"warning: density 1, the mask {mask} computes every block and saves no time: give"
                " another mask=, or smaller blocks",
            )

    # ---- steps

    def _steps(self) -> str | None:
        """Take the remaining steps; return why it stopped before the last one, or None."""
        settings, trainer, work, clock = self.settings, self.trainer, self.work, self.clock
        periods = settings.log_every, settings.eval_every, work.save_every
        self.timed = trainer.step
        live = sys.stderr.isatty()
        self.bar = tqdm(
            total=settings.steps, initial=trainer.step, unit=" steps", file=sys.stderr,
            disable=not self.group.leads, mininterval=0.2 if live else 10, dynamic_ncols=live,
        )  # fmt: skip
        clock.start()
        with self.bar:
            while trainer.step < settings.steps and not work.good_enough(self.validated):
                trainer.advance()
                step, last = trainer.step, trainer.step == settings.steps
                log, validate, save = (last or step % every == 0 for every in periods)
                if log:
                    self._log(step)
                if validate:
                    with clock.paused():
                        self._validate(step, last)
                done = work.good_enough(self.validated)
                if done or (save and self._may_save(last)):
                    with clock.paused():
                        self._save()
                # Processes agree to stop, which takes time, so they ask only where one is due.
                asks = log or validate or save or self.group.world == 1
                if asks and not last and not done:
                    if self.group.any(self.stop.reason is not None):
                        clock.stop()
                        self._save()
                        return self.stop.reason or "SIGTERM"
        return None

    def _log(self, step: int) -> None:
        settings, clock = self.settings, self.clock
        means = self.trainer.read_sums(step - self.logged)
        if not math.isfinite(means["loss"] + means["grad_norm"]):
            raise ValueError(
                f"the loss is {means['loss']} and the gradient {means['grad_norm']} by step {step}:"
                f" lower lr={settings.lr:g} or use precision=fp32; the last checkpoint is kept"
            )
        rate = (step - self.timed) * self.work.tokens / clock.window()
        self.logged = self.timed = step
        if not self.work.scored:
            del means["accuracy"]
        self.log.write(
            "train",
            step,
            **means,
            epoch=step * settings.batch / len(self.trainer.split),
            seconds=clock.seconds,
            tokens_per_s=rate,
            lr=self.trainer.rate.item(),
            memory_mib=peak_mib(self.group.device),
        )
        text = f"loss {means['loss']:.3f}, {rate / 1e3:.0f}k tokens/s"
        if "accuracy" in means:
            text += f", accuracy {100 * means['accuracy']:.1f} %"
        for name, value in (self.validated or {}).items():
            text += f", val {name} {value:.3f}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)

    def _validate(self, step: int, last: bool) -> None:
        found = self.validated = self.work.validate(last)
        self.log.write("val", step, **found, seconds=self.clock.seconds)
        score = self.work.score(found)
        if score is not None and (self.best is None or score > self.best["score"]):
            weights = self.trainer.weights()
            self.best = {"score": score, "step": step, "model": weights} | found

    def _may_save(self, last: bool) -> bool:
        """Return whether to write a checkpoint now. Those at validations are some time apart."""
        if last:
            return self.settings.keep  # else it would be removed at once
        if self.settings.checkpoint_every:
            return True
        return self.group.any(self.clock.seconds - self.saved > self.work.pause)

    def _save(self) -> None:
        saved = self.trainer.state()
        saved["random"] = self.group.gather(saved["random"])
        if self.group.leads:
            names = ("logged", "best", "validated", "about", "place", "first")
            saved |= {name: getattr(self, name) for name in names}
            saved |= {"data": self.work.data, "journal": self.log.sync()}
            saved |= {"seconds": self.clock.seconds, "training": self.clock.training}
            state.save(self.folder / state.CHECKPOINT, saved)
        self.saved = self.clock.seconds

    # ---- after the last step

    def _finish(self, reason: str | None) -> dict[str, Any]:
        """Test the best weights and complete run.json. Raises Interrupted after a signal."""
        step, group, clock, trainer = self.trainer.step, self.group, self.clock, self.trainer
        if reason is not None:
            self.file["reason"] = reason
            say(group, f"{reason} at step {step} of {self.settings.steps}: {AGAIN}")
        if reason not in (None, "minutes"):
            self.log.write("end", step, complete=False, reason=reason, seconds=clock.seconds)
            self._write()
            group.wait()
            raise Interrupted(reason)
        best = self.best or {"step": step, "accuracy": None}
        if self.best is not None:
            trainer.model.load_state_dict(self.best["model"])
        memory, training = peak_mib(group.device), clock.training
        result = self.work.test(self.validated)
        numbers = {name: x for name, x in result.items() if isinstance(x, int | float)}
        self.log.write("test", step, **numbers, seconds=clock.seconds)
        self.log.write("end", step, complete=reason is None, reason=reason, seconds=clock.seconds)
        self.log.sync()
        self.file["complete"] = reason is None
        self.file["result"] = result | {
            "best_step": best["step"],
            "steps": step,
            "seconds": clock.seconds,
            "ms_per_step": 1e3 * training / timed if (timed := step - self.first) else None,
            "memory_mib": memory,
            "data_mib": trainer.split.bytes / MIB,
            "date": now(),
        }
        if self.work.scored:
            self.file["result"]["val_accuracy"] = best["accuracy"]
        if group.leads and (self.settings.keep or reason):
            weights = {"step": best["step"], "best": None, "model": trainer.weights()}
            state.save(self.folder / state.WEIGHTS, weights | {"about": self.about})
        self._write()
        if group.leads and not self.settings.keep and reason is None:
            for name in (state.CHECKPOINT, state.WEIGHTS):
                (self.folder / name).unlink(missing_ok=True)
        say(group, f"{self.folder}: {self.work.summary(self.file)}")
        group.wait()  # a process that leaves early may stop the others
        return self.file

    def _write(self) -> None:
        if self.group.leads:
            run_file.write(self.folder, self.file)
