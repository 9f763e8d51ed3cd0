"""One session of a run: from fresh weights or a checkpoint to the next checkpoint or the result."""

import json
import time
from typing import Any

from experiments.common.files import write_text
from experiments.common.provenance import code_version
from experiments.lm.model import shares
from experiments.lm.prepare import make_model
from experiments.lm.result import MANIFEST, make_result, summary
from experiments.lm.rows import SOURCES
from experiments.lm.settings import LAYERS, Settings
from experiments.lm.tokens import Corpus
from experiments.lm.windows import Objective, Windows
from experiments.training import session
from experiments.training import state as checkpoint
from experiments.training.clock import Clock
from experiments.training.distributed import Group
from experiments.training.evaluate import Evaluator
from experiments.training.journal import Progress
from experiments.training.settings import PRECISIONS
from experiments.training.step import Trainer, seed_everything

SAVE_EVERY = 100  # steps, at which a checkpoint is considered if checkpoint_every is not given


class Session(session.Session):
    """One session of a run: `run` does it all, the other methods are its parts in that order."""

    kept = ("losses",)
    pause = 120.0

    def __init__(
        self,
        settings: Settings,
        group: Group,
        corpus: Corpus,
        progress: Progress,
        begun: float,
        command: str,
    ):
        tokens = settings.batch * settings.context
        data = corpus.digest
        super().__init__(settings, group, progress, begun, command, data=data, tokens=tokens)
        self.clock = Clock(group.device, time.monotonic())  # `begun` may be of several runs
        self.corpus = corpus
        self.save_every = settings.checkpoint_every or min(settings.eval_every, SAVE_EVERY)
        self.losses: list[tuple[int, float]] = []  # (step, mean loss since the one before)

    def run(self) -> dict[str, Any]:
        settings, group = self.settings, self.group
        old = self._old_checkpoint(f"text of {settings.data}")
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
            manifest = json.dumps(self.corpus.manifest, indent=1) + "\n"
            write_text(self.folder / MANIFEST, manifest, "runs")
        return self._go(old)

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
        settings = self.settings
        said = self._write_start(
            config=settings.values(),
            density=self.density,
            pairs=self.pairs,
            versions=code_version(SOURCES),
        )
        share = "" if self.density is None else f", density {self.density:.3g}"
        self.progress.say(
            f"{self.folder}: {settings.provider} attention (mask {settings.mask or 'dense'}"
            f"{share}), {said}; {self.corpus.name}, {len(self.corpus.train):,} tokens; from step "
            f"{self.trainer.step}"
        )

    def _training(self, step: int, means: dict[str, float]) -> tuple[dict[str, float], str]:
        del means["accuracy"]
        self.losses.append((step, means["loss"]))
        return means, "" if self.validated is None else f"  val {self.validated:.3f}"

    def _validate(self, step: int) -> None:
        if step < self.settings.steps:  # the result has the last one
            self.validated = self.validation()["loss"]
            self.log.write("val", step, loss=self.validated, seconds=self.clock.seconds)

    def _may_save(self, step: int) -> bool:
        if step == self.settings.steps:
            return self.settings.keep  # else it would be removed at once
        return super()._may_save(step)

    def _finish(self, reason: str | None) -> dict[str, Any]:
        step, settings = self.trainer.step, self.settings
        if reason is not None:
            self._end_early(reason)
            return {"complete": False, "steps": step}
        result = make_result(
            settings, self.corpus, self.trainer, self.validation, self.losses,
            density=self.density, pairs=self.pairs, seconds=self.clock.seconds,
            ms_per_step=1e3 * self.clock.training / step, command=self.command,
        )  # fmt: skip
        self.log.write("val", step, loss=result["val_loss"], seconds=self.clock.seconds)
        self._write(result)
        if self.group.leads and not settings.keep:
            (self.folder / checkpoint.CHECKPOINT).unlink(missing_ok=True)
        self.progress.say(f"{self.folder}: {summary(result)}")
        self.group.wait()
        return result
