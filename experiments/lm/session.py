"""One session of a run: from fresh weights or a checkpoint to the next checkpoint or the result."""

import json
import math
import time
from typing import Any

import torch
from omegaconf import OmegaConf

from experiments.common.devices import device_name
from experiments.common.files import write_whole
from experiments.common.provenance import code_version, now
from experiments.lm.model import shares
from experiments.lm.prepare import make_model
from experiments.lm.result import MANIFEST, make_result, summary
from experiments.lm.rows import SOURCES
from experiments.lm.settings import LAYERS, Settings
from experiments.lm.tokens import Corpus
from experiments.lm.windows import Objective, Windows
from experiments.lra.training import checkpoint
from experiments.lra.training.clock import Clock, Interrupted, Stop
from experiments.lra.training.config import CONFIG, PRECISIONS
from experiments.lra.training.data import stream
from experiments.lra.training.device import peak_mib
from experiments.lra.training.distributed import Group
from experiments.lra.training.evaluate import Evaluator
from experiments.lra.training.journal import Log, Progress, duration
from experiments.lra.training.result import write_result
from experiments.lra.training.step import Trainer, seed_everything

PAUSE = 120.0  # least seconds between checkpoints if checkpoint_every is not given
SAVE_EVERY = 100  # steps, at which that is looked at
STATE = (
    "step model optimizer sums steepest random logged journal seconds training data losses"
).split()


class Session:
    """One session of a run: `run` does it all, the other methods are its parts in that order."""

    log: Log

    def __init__(
        self,
        settings: Settings,
        group: Group,
        corpus: Corpus,
        progress: Progress,
        begun: float,
        command: str,
    ):
        self.settings, self.group, self.corpus, self.progress = settings, group, corpus, progress
        self.begun, self.command = begun, command
        self.clock = Clock(group.device, time.monotonic())
        self.folder = settings.folder
        self.logged = 0
        self.saved = 0.0  # seconds at the last checkpoint
        self.validated: float | None = None
        self.losses: list[tuple[int, float]] = []  # (step, mean loss since the one before)

    def run(self) -> dict[str, Any]:
        settings, group = self.settings, self.group
        old = self._old_checkpoint()
        seed_everything(settings.seed, 0)  # the same weights in every process
        self.model, objective = make_model(settings, self.corpus)
        self.density, self.pairs = shares(self.model)
        if group.rank:
            seed_everything(settings.seed, group.rank)
        self.model.to(group.device).train()
        windows = Windows(self.corpus.train, settings.context, group.device)
        self.trainer = Trainer(self.model, windows, objective, settings, group)  # type: ignore[arg-type]
        if old is not None:
            self._resume(old)
        self._prepare(objective)
        if old is None and group.leads:
            text = OmegaConf.to_yaml(OmegaConf.create(settings.values()))
            write_whole(self.folder / CONFIG, lambda file: file.write(text.encode()), "runs")
            manifest = json.dumps(self.corpus.manifest, indent=1) + "\n"
            write_whole(self.folder / MANIFEST, lambda file: file.write(manifest.encode()), "runs")
        kept = 0 if old is None else old["journal"]
        self.log = Log(self.folder, kept, self.trainer.step, False, group.leads)
        try:
            self._log_start()
            with Stop(settings.minutes, self.begun) as stop:
                return self._finish(self._train(stop))
        finally:
            self.log.close()

    # ---- before the first step

    def _old_checkpoint(self) -> dict[str, Any] | None:
        path = self.folder / checkpoint.CHECKPOINT
        if not path.exists():
            return None
        old = checkpoint.load(path, needs=STATE)
        if old["data"] != self.corpus.digest:
            raise ValueError(
                f"{self.folder} was trained on other text of {self.settings.data}: restore it, or "
                "give this run a folder of its own with name="
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
        self.logged, self.losses = old["logged"], old["losses"]
        self.clock.resume(old["seconds"], old["training"])
        self.saved = old["seconds"]

    def _prepare(self, objective: Objective) -> None:
        """Compiles the step, and makes the evaluation."""
        settings, trainer = self.settings, self.trainer
        trainer.prepare(
            compile=bool(settings.compile),
            graph=settings.graph,
            parts=self.model.by_layer if settings.compile == LAYERS else None,
        )
        self.count = settings.val_tokens // settings.context
        val = Windows(self.corpus.val, settings.context, self.group.device, self.count)
        self.validation = Evaluator(
            self.model,
            val,  # type: ignore[arg-type]
            objective,
            self.group,
            batch=settings.micro_batch or settings.batch,
            dtype=PRECISIONS[settings.precision],
        )
        if settings.graph and settings.eval_every < settings.steps:
            self.validation.prepare(trainer.pool)

    def _log_start(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log.write(
            "start" if self.trainer.step == 0 else "resume",
            self.trainer.step,
            config=self.settings.values(),
            density=self.density,
            pairs=self.pairs,
            params=parameters,
            device=device_name(str(self.group.device)),
            processes=self.group.world,
            versions=code_version(SOURCES),
            compiled=self.trainer.compiled,
            captured=self.trainer.captured,
            date=now(),
            seconds=self.clock.seconds,
        )
        share = "" if self.density is None else f", density {self.density:.3g}"
        self.progress.say(
            f"{self.folder}: {parameters:,} parameters, {self.settings.provider} attention "
            f"(mask {self.settings.mask or 'dense'}{share}); {self.corpus.name}, "
            f"{len(self.corpus.train):,} tokens; from step {self.trainer.step}"
        )

    # ---- steps

    def _train(self, stop: Stop) -> str | None:
        """Takes the remaining steps; returns why it stopped before the last one, or None."""
        settings, trainer, clock = self.settings, self.trainer, self.clock
        save_every = settings.checkpoint_every or min(settings.eval_every, SAVE_EVERY)
        periods = settings.log_every, settings.eval_every, save_every
        clock.start()
        while trainer.step < settings.steps:
            trainer.advance()
            step, last = trainer.step, trainer.step == settings.steps
            log, validate, save = (last or step % every == 0 for every in periods)
            if log:
                self._log_training(step)
            if validate and not last:  # the result has the last one
                with clock.paused():
                    self.validated = self.validation()["loss"]
                    self.log.write("val", step, loss=self.validated, seconds=clock.seconds)
            if save and self._may_save(step):
                with clock.paused():
                    self._save()
            asks = log or validate or save or self.group.world == 1
            if asks and not last and self.group.any(stop.reason is not None):
                clock.stop()
                self._save()
                return stop.reason or "SIGTERM"
        clock.stop()
        return None

    def _log_training(self, step: int) -> None:
        settings, steps = self.settings, step - self.logged
        means = self.trainer.read_sums(steps)
        del means["accuracy"]
        if not math.isfinite(means["loss"] + means["grad_norm"]):
            raise ValueError(
                f"the loss is {means['loss']} and the gradient {means['grad_norm']} by step {step}:"
                f" lower lr={settings.lr:g} or use precision=fp32; the last checkpoint is kept"
            )
        self.losses.append((step, means["loss"]))
        rate = steps * settings.batch * settings.context / self.clock.window()
        self.logged = step
        self.log.write(
            "train", step, **means, tokens_per_s=rate, lr=self.trainer.rate.item(),
            seconds=self.clock.seconds, memory_mib=peak_mib(self.group.device),
        )  # fmt: skip
        val = "" if self.validated is None else f"  val {self.validated:.3f}"
        left = self.clock.training / step * (settings.steps - step)
        self.progress.show(
            f"step {step}/{settings.steps}  loss {means['loss']:.3f}{val}  "
            f"{rate / 1e3:.0f}k tokens/s  {duration(left)} left",
            last=step == settings.steps,
        )

    def _may_save(self, step: int) -> bool:
        if step == self.settings.steps:
            return self.settings.keep  # else it would be removed at once
        if self.settings.checkpoint_every:
            return True
        return self.group.any(self.clock.seconds - self.saved > PAUSE)

    def _save(self) -> None:
        state = self.trainer.state()
        state["random"] = self.group.gather(state["random"])
        if self.group.leads:
            state |= {
                "logged": self.logged,
                "losses": self.losses,
                "journal": self.log.sync(),
                "seconds": self.clock.seconds,
                "training": self.clock.training,
                "data": self.corpus.digest,
            }
            checkpoint.save(self.folder / checkpoint.CHECKPOINT, state)
        self.saved = self.clock.seconds

    # ---- after the last step

    def _finish(self, reason: str | None) -> dict[str, Any]:
        """Measures what the model learned and writes the result. Raises Interrupted."""
        step, settings, again = self.trainer.step, self.settings, "the same command continues"
        if reason is not None:
            self.log.write("end", step, complete=False, reason=reason, seconds=self.clock.seconds)
            self.progress.say(f"{reason} at step {step} of {settings.steps}: {again}")
            self.group.wait()
            if reason == "minutes":
                return {"complete": False, "steps": step}
            raise Interrupted(reason)
        result = make_result(
            settings, self.corpus, self.trainer, self.validation, self.losses,
            density=self.density, pairs=self.pairs, seconds=self.clock.seconds,
            ms_per_step=1e3 * self.clock.training / step, command=self.command,
        )  # fmt: skip
        self.log.write("val", step, loss=result["val_loss"], seconds=self.clock.seconds)
        self.log.write("end", step, complete=True, seconds=self.clock.seconds)
        self.log.sync()
        if self.group.leads:
            write_result(self.folder, result)
            if not settings.keep:
                (self.folder / checkpoint.CHECKPOINT).unlink(missing_ok=True)
        self.progress.say(f"{self.folder}: {summary(result)}")
        self.group.wait()
        return result
