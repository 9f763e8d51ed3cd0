"""A training run of a language model: what it is made of, and what is measured of it."""

import math
import warnings
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.bench.step import saved_bytes
from experiments.common.files import digest
from experiments.lm.model import LanguageModel, mlp_density, resolve, shares
from experiments.lm.questions import COMPRESS, NONE, asks, synthetic
from experiments.lm.settings import LAYERS, Settings
from experiments.lm.text import Corpus, load_corpus, refuse_vocabulary
from experiments.training import train as loop
from experiments.training.device import DTYPES, MIB, autocast
from experiments.training.distributed import Group, share
from experiments.training.evaluate import DeviceSplit, Evaluator, Sums
from experiments.training.run_file import read_journal, took
from experiments.training.step import Trainer

SAVE_EVERY = 100  # steps, at which a checkpoint is considered if checkpoint_every is not given
MOST = 2**27  # tokens of the training sequences of questions
LAST = 100  # steps whose mean loss is the training loss of a result


def train(settings: Settings, command: str = "") -> dict[str, Any]:
    """Train a run; return the content of run.json. Raises as `loop.train`."""
    return loop.train(settings, Answering if asks(settings.data) else Language, command)


class Language(loop.Work):
    """A language model on its text, as the training loop takes it."""

    pause = 120.0
    scored = False

    def __init__(self, settings: Settings, group: Group):
        self.settings, self.group = settings, group
        corpus: Any = group.in_turn(lambda: read_corpus(settings))
        self.corpus = corpus
        self.data, self.source = corpus.digest, f"text of {settings.data}"
        self.task = {
            "name": corpus.name,
            "tokenizer": corpus.tokenizer,
            "vocab": corpus.vocab,
            "train_tokens": len(corpus.train),
            "bytes_per_token": corpus.bytes_per_token,
        }
        self.unit = f"windows of {settings.context} tokens"
        self._batches(settings)
        self.objective = next_token
        self.positions: list[float] = []  # the loss at every position of a window

    def _batches(self, settings: Settings) -> None:
        self.tokens = settings.batch * settings.context
        self.save_every = settings.checkpoint_every or min(settings.eval_every, SAVE_EVERY)
        self.dtype = DTYPES[settings.precision or "fp32"]

    def make_model(self, old: dict[str, Any] | None) -> tuple[nn.Module, str]:
        self.model = make_model(self.settings, self.corpus)
        self.shares = shares(self.model)
        self.model.shared = share(self.model, self.settings.context, self.group)
        return self.model, "fresh weights"

    def about(self) -> dict[str, Any]:
        names = ("model", "context", "tokenizer")
        return {name: getattr(self.settings, name) for name in names} | {"data": self.data}

    def masks(self) -> dict[str, Any]:
        density, pairs = self.shares
        mask = str(resolve(self.settings.mask))
        mlp = mlp_density(self.model)
        return {"mask": mask, "density": density, "pairs": pairs, "mlp_density": mlp}

    def train_split(self) -> "Windows":
        return Windows(self.corpus.train, self.settings.context, self.group.device)

    def val_split(self) -> Any:
        count = self.settings.val_tokens // self.settings.context
        return Windows(self.corpus.val, self.settings.context, self.group.device, count)

    def prepare(self, trainer: Trainer) -> None:
        self.trainer, settings = trainer, self.settings
        if trainer.step < settings.steps:
            by_layer = self.model.by_layer if settings.compile == LAYERS else None
            trainer.prepare(
                compile=bool(settings.compile), graph=bool(settings.graph), parts=by_layer
            )
        self.validation = self._evaluator(self.val_split())
        if trainer.captured and settings.eval_every < settings.steps:
            self.validation.prepare(trainer.pool)

    def _evaluator(self, split: Any) -> Evaluator:
        size = self.settings.micro_batch or self.settings.batch
        given = self.trainer.model, split, self.objective, self.group
        return Evaluator(*given, batch=size, dtype=self.dtype)

    def validate(self, last: bool) -> dict[str, float]:
        if last:
            self.positions = self._by_position()
            return {"loss": fmean(self.positions)}
        return {"loss": self.validation()["loss"]}

    def score(self, found: dict[str, float]) -> None:
        return None

    def test(self, validated: dict[str, float] | None) -> dict[str, Any]:
        settings = self.settings
        if validated is None or not self.positions:
            validated = self.validate(last=True)
        lines = read_journal(settings.folder, "train") if self.group.leads else []
        curve = [(line["step"], line["loss"]) for line in lines]
        return {
            "val_loss": validated["loss"],
            "val_tokens": self.validation.examples * settings.context,
            "train_loss": tail(curve, self.trainer.step),
            "saved_mib": self._saved_mib(),
            "positions": self.positions,
            "curve": curve,
        }

    @torch.no_grad()
    def _by_position(self) -> list[float]:
        """Return the mean cross-entropy at every position of a window."""
        device, model, windows = self.group.device, self.trainer.model, self.validation.split
        sums = torch.zeros(windows.context, dtype=torch.float64, device=device)
        size = self.settings.micro_batch or self.settings.batch
        model.eval()
        for rows in torch.arange(len(windows), device=device).split(size):
            tokens, _, targets = windows.batch(rows)
            with autocast(device, self.dtype):
                losses = model(tokens, targets)
            shared = self.model.shared
            losses = losses if shared is None else shared.unshard(losses)
            sums += losses.double().sum(0)
        model.train()
        return (sums / len(windows)).tolist()

    def _saved_mib(self) -> float | None:
        """Return the MiB that a micro-batch keeps from forward to backward, without the weights.

        Counted in the model that is not compiled, each storage once. None where it does not fit.
        """
        trainer = self.trainer
        state = torch.get_rng_state()
        size = self.settings.batch // self.group.replicas // trainer.parts
        rows = torch.arange(size, device=trainer.device) % len(trainer.split)

        def forward() -> Sums:
            with autocast(trainer.device, self.dtype):
                return trainer.objective(trainer.model, trainer.split.batch(rows), None)

        try:
            return saved_bytes(forward, without=trainer.model.parameters()) / MIB
        except torch.OutOfMemoryError:
            return None
        finally:
            torch.set_rng_state(state)

    @staticmethod
    def summary(run: dict[str, Any]) -> str:
        result = run["result"]
        loss, train_loss = result["val_loss"], result["train_loss"]
        trained = "" if train_loss is None else f", training {train_loss:.4f}"
        return f"validation loss {loss:.4f} (perplexity {math.exp(loss):.2f}){trained}; {took(run)}"


class Answering(Language):
    """A language model on the questions of a task, as the training loop takes it.

    Each training sequence is seen once, as far as `MOST` tokens go.
    """

    scored = True

    def __init__(self, settings: Settings, group: Group):
        self.settings, self.group = settings, group
        task = self.corpus = synthetic(settings.data, settings.context)
        count = min(settings.batch * settings.steps, MOST // settings.context)
        self.counts = {
            "train": count,
            **dict.fromkeys(("val", "test"), max(1, settings.val_tokens // settings.context)),
        }
        self.data = digest({"task": settings.data, "context": settings.context, "train": count})
        self.source = f"questions of {settings.data}"
        self.task = {
            "name": task.name,
            "amount": task.amount,
            "vocab": task.vocab,
            "chance": task.chance,
            "examples": self.counts,
        }
        self.unit = f"sequences of {settings.context} tokens"
        self._batches(settings)
        self.objective = answer

    def _split(self, name: str) -> DeviceSplit:
        questions = self.corpus.make(name, self.counts[name])
        return DeviceSplit(questions[:3], self.group.device)  # without where answers stand

    def train_split(self) -> DeviceSplit:
        return self._split("train")

    def val_split(self) -> DeviceSplit:
        return self._split("val")

    def validate(self, last: bool) -> dict[str, float]:
        return self.validation()

    def test(self, validated: dict[str, float] | None) -> dict[str, Any]:
        lines = read_journal(self.settings.folder, "val") if self.group.leads else []
        curve = [(line["step"], line["accuracy"]) for line in lines]
        return {**self._evaluator(self._split("test"))(), "curve": curve}

    @staticmethod
    def summary(run: dict[str, Any]) -> str:
        accuracy, chance = 100 * run["result"]["accuracy"], 100 * run["task"]["chance"]
        return f"answers {accuracy:.1f} % (chance {chance:.1f}); {took(run)}"


def make_model(settings: Settings, corpus: Any) -> LanguageModel:
    """Return the model of a run with fresh weights, on the CPU; corpus: with `vocab` and `end`."""
    sizes = settings.sizes
    return LanguageModel(
        sizes,
        corpus.vocab or settings.vocab or sizes.vocab,
        settings.context,
        settings.provider,
        resolve(settings.mask),
        dropout=settings.dropout,
        end=corpus.end if settings.packed else None,
        positions=settings.positions,
        init_std=settings.init_std,
        decode=settings.data.partition(":")[0] == COMPRESS,
    )


def read_corpus(settings: Settings) -> Corpus:
    """Return the tokens of a run, checked."""
    corpus = load_corpus(
        settings.data, settings.tokenizer, settings.cache_dir, pattern=settings.pattern
    )
    size = settings.vocab or settings.sizes.vocab
    if not corpus.vocab and not size:
        raise ValueError(f"data={settings.data} has ids without a tokenizer: give vocab=50257")
    if settings.vocab or not corpus.vocab:
        option = f"vocab={size}" if settings.vocab else f"of model={settings.model}"
        refuse_vocabulary(corpus, size, option)
    for name, ids in (("training", corpus.train), ("validation", corpus.val)):
        if len(ids) <= settings.context:
            raise ValueError(
                f"{corpus.name}, for {name}, has {len(ids)} tokens, and a window of "
                f"context={settings.context} needs {settings.context + 1}: give more text, or a "
                "shorter context"
            )
    return corpus


def tail(curve: Sequence[tuple[int, float]], last: int) -> float | None:
    """Return the mean training loss of the last `LAST` steps, as far as the means logged tell."""
    before, total, steps = 0, 0.0, 0
    for step, loss in curve:
        if before >= max(0, last - LAST) or step == last:
            total, steps = total + loss * (step - before), steps + step - before
        before = step
    return total / steps if steps else None


# ---- windows of text, and what a model learns from one


class Windows:
    """Windows of `context` + 1 tokens, each begins where the one before has its last.

    count: how many windows of the corpus are used, from the start; None: all.
    """

    def __init__(
        self, ids: np.ndarray, context: int, device: torch.device, count: int | None = None
    ):
        self.context, whole = context, (len(ids) - 1) // context
        self.count = whole if count is None else min(whole, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped files are read-only
            flat = torch.from_numpy(ids[: self.count * context + 1].view(np.int16))
        self.ids = flat.to(device)  # int16: kernels of torch do not take uint16
        self._places = torch.arange(context + 1, device=device)

    def __len__(self) -> int:
        return self.count

    @property
    def bytes(self) -> int:
        return self.ids.nbytes

    def batch(self, rows: Tensor) -> tuple[Tensor, None, Tensor]:
        """Tokens and the token after each, int64 (rows, context), of the windows `rows`."""
        found = self.ids[(rows * self.context)[:, None] + self._places].long() & 0xFFFF
        return found[:, :-1], None, found[:, 1:]


def answer(model: nn.Module, batch: tuple, weights: Tensor | None) -> Sums:
    """Return the sums of the cross-entropy of every answer, of the right ones, and of all.

    batch: tokens (rows, context), places and answers (rows, questions); weights: of the sequences.
    """
    tokens, places, answers = (each.long() for each in batch)
    logits = model(tokens, places=places).float()
    counts = (answers != NONE).float()
    counts = counts if weights is None else counts * weights[:, None]
    given = logits.flatten(0, 1), answers.flatten()
    losses = F.cross_entropy(*given, ignore_index=NONE, reduction="none").view(answers.shape)
    right = (logits.argmax(-1) == answers).float()
    return (losses * counts).sum(), (right * counts).sum(), counts.sum()


def next_token(model: nn.Module, batch: tuple, weights: Tensor | None) -> Sums:
    """Return the sums of the cross-entropy of every next token, of nothing, and of the tokens.

    weights: of the windows.
    """
    tokens, _, targets = batch
    losses = model(tokens, targets)
    nothing = torch.zeros((), device=losses.device)
    if weights is None:
        count = torch.full((), float(losses.numel()), device=losses.device)
        return losses.sum(), nothing, count
    losses = losses * weights[:, None]
    return losses.sum(), nothing, weights.sum() * losses.shape[1]
