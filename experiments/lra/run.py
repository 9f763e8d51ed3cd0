"""A training run of a classifier of the Long Range Arena, or of its self-pretraining."""

import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.files import pack
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import SPLITS, Task, load_task
from experiments.lra.weights import make_model, mask_of, origin, refuse_other_pairs, start_from
from experiments.training import train as loop
from experiments.training.device import DTYPES
from experiments.training.distributed import Group, join, share
from experiments.training.evaluate import Batch, DeviceSplit, Evaluator, Objective, Sums
from experiments.training.run_file import took
from experiments.training.state import CHECKPOINT
from experiments.training.step import Trainer
from sparseflash.dynamic.lengths import real_tokens


def train(settings: Settings, command: str = "") -> dict[str, Any]:
    """Train a run; return the content of run.json ({} with `data_only`). Raises as `loop.train`."""
    group = join(str(settings.device), settings.context_parallel)
    if settings.scaled:
        changes = "".join(f"\n  {k}: {a} -> {b}" for k, (a, b) in settings.scaled.items())
        loop.say(
            group,
            f"scale=small: made for a CPU, not the recipe of the reference{changes}\n"
            "  (scale=full trains the recipe; options on the command line are kept)",
        )
    if settings.data_only:
        task = group.in_turn(lambda: load_task(**settings.data()))
        loop.say(group, f"{task.name} ({task.source}) is ready in {settings.cache_dir}")
        return {}
    return loop.train(settings, Classification, command)


class Classification(loop.Work):
    """A classifier on its task, as the training loop takes it."""

    pause = 20.0
    scored = True

    def __init__(self, settings: Settings, group: Group):
        self.settings, self.group = settings, group
        task = self.loaded = group.in_turn(lambda: load_task(**settings.data()))
        self.data, self.source = fingerprint(task), f"{task.name} ({task.source})"
        self.task = {
            "name": task.name,
            "source": task.source,
            "length": task.length,
            "classes": task.classes,
            "baselines": task.baselines,
            "examples": [len(task.splits[name]) for name in SPLITS],
        }
        self.unit = f"examples of {task.length} tokens"
        self.tokens = settings.batch * task.length * (1 + task.pair)
        self.save_every = settings.checkpoint_every or settings.eval_every
        self.objective = objective_of(settings, group.context)

    def make_model(self, old: dict[str, Any] | None) -> tuple[Any, str]:
        settings, started = self.settings, "fresh weights"
        model = self.model = make_model(settings, self.loaded)
        model.context = share(model, model.states, self.group)
        if old is not None:
            refuse_other_pairs(settings.folder / CHECKPOINT, old["about"], model)
        elif settings.init_from:
            fresh = settings.init_head == "fresh"
            started = start_from(model, settings.init_from, self.about(), fresh_head=fresh)
        return model, started

    def about(self) -> dict[str, Any]:
        return origin(self.settings, self.loaded, self.model)

    def masks(self) -> dict[str, Any]:
        return dict(zip(("mask", "density"), mask_of(self.model, self.settings), strict=True))

    def train_split(self) -> DeviceSplit:
        return DeviceSplit(self.loaded.splits["train"].arrays, self.group.device)

    def prepare(self, trainer: Trainer) -> None:
        self.trainer, settings = trainer, self.settings
        trains = trainer.step < settings.steps
        if trains:
            trainer.prepare(compile=settings.compile, graph=bool(settings.graph))
        self.validation = self._evaluator("val", settings.val_examples)
        if trains and settings.graph:
            self.validation.prepare(trainer.pool)

    def _evaluator(
        self, name: str, examples: int | None = None, objective: Objective | None = None
    ) -> Evaluator:
        settings = self.settings
        return Evaluator(
            self.trainer.model,
            DeviceSplit(self.loaded.splits[name].arrays, self.group.device),
            objective or self.objective,
            self.group,
            batch=settings.eval_batch or settings.micro_batch or settings.batch,
            dtype=DTYPES[settings.precision or "fp32"],
            examples=examples,
            forward=self.trainer.forward,
        )

    def validate(self, last: bool) -> dict[str, float]:
        return self.validation()

    def score(self, found: dict[str, float]) -> float:
        return -found["loss"] if self.settings.pretrain else found["accuracy"]

    def test(self, validated: dict[str, float] | None) -> dict[str, Any]:
        recorded = None if self.settings.pretrain else Recorded()
        found: dict[str, Any] = self._evaluator("test", objective=recorded)()
        found["correct"] = None if recorded is None else pack(recorded.right(self.group))
        return found

    @staticmethod
    def summary(run: dict[str, Any]) -> str:
        result, settings = run["result"], run["settings"]
        what = "predicted tokens" if settings["pretrain"] else "test accuracy"
        text = f"{what} {100 * result['accuracy']:.1f} %"
        if not settings["pretrain"]:  # baselines are of the classes
            baselines = run["task"]["baselines"]
            text += "".join(f", {name} {100 * x:.1f} %" for name, x in baselines.items())
        return f"{text}; {took(run)}" + (
            "" if settings["scale"] == "full" else f"; scale={settings['scale']}"
        )


def fingerprint(task: Task) -> str:
    """Return a digest of the task: all labels, and the tokens of 256 or more examples a split."""
    found = hashlib.sha256(f"{task.name} {task.source} {task.vocab} {task.length}".encode())
    for name in sorted(task.splits):
        split = task.splits[name]
        step = max(1, len(split.labels) // 256)
        found.update(f"{name} {split.tokens.shape} {split.tokens.dtype}".encode())
        found.update(np.ascontiguousarray(split.labels).tobytes())
        found.update(np.ascontiguousarray(split.tokens[::step]).tobytes())
    return found.hexdigest()[:12]


# ---- objectives: the class of an example, or the tokens of self-pretraining


def objective_of(settings: Settings, context: Any = None) -> Objective:
    """Return the objective that a run minimises; context: the processes that share a sequence."""
    if settings.pretrain is None:
        return classify
    return Predict(settings.mask_share, context)


def classify(model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
    """Return the class of an example."""
    return _sums(*_answers(model, batch), weights)


def _answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(n,) the loss of each example, and 1 where its class is right."""
    tokens, lengths, labels = batch
    logits = model(tokens, lengths).float()
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss, (logits.argmax(-1) == labels).float()


class Recorded:
    """`classify`, which also keeps the examples that it answered rightly, for one evaluation."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
        loss, right = _answers(model, batch)
        self._kept.append(right if weights is None else right[weights > 0])
        return _sums(loss, right, weights)

    def right(self, group: Group) -> np.ndarray:
        """bool (n,): for every example of the split, in its order; only in the first process."""
        own = torch.cat(self._kept).bool().cpu().numpy()
        parts = [np.asarray(part) for part in group.gather(own)]
        found = np.zeros(sum(map(len, parts)) // group.ways, bool)
        for rank, part in enumerate(parts):
            found[rank // group.ways :: group.replicas] = part
        return found


class Predict:
    """Self-pretraining (Amos et al., arXiv 2310.02980): the loss of predicted tokens, no padding.

    share: of the tokens of each sequence, drawn at random, which are hidden from the model and
        predicted.
    context: the processes that share each sequence, which hide the same tokens of it.
    """

    def __init__(self, share: float, context: Any = None):
        self.share, self.context = share, context

    def __call__(self, model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
        tokens, lengths, _ = batch
        sequences = tokens.flatten(0, -2)  # of pairs, both
        places, real = self._places(sequences, None if lengths is None else lengths.flatten())
        target = sequences.gather(1, places).flatten().long()
        logits = model(tokens, lengths, places).float().flatten(0, 1)
        loss = F.cross_entropy(logits, target, reduction="none")
        right = (logits.argmax(-1) == target).float()
        if weights is not None:
            weights = weights.repeat_interleave(len(places) // len(weights))[:, None]
            real = weights.expand(places.shape) if real is None else weights * real
        return _sums(loss, right, None if real is None else real.flatten().float())

    def _places(self, tokens: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """int64 (B, M): the places that are predicted; bool (B, M): those that count, or None."""
        (size, n), device = tokens.shape, tokens.device
        order, count = torch.rand(size, n, device=device), max(1, round(self.share * n))
        if self.context is not None:
            dist.broadcast(order, group_src=0, group=self.context)
        if lengths is None:
            return order.topk(count, sorted=False).indices, None
        places = order.masked_fill(~real_tokens(lengths, n), -1.0).topk(count).indices
        own = (self.share * lengths).round().clamp(min=1)
        real = torch.arange(count, device=device) < own[:, None]
        return torch.where(real, places, places[:, :1]), real


def _sums(loss: Tensor, right: Tensor, weights: Tensor | None) -> Sums:
    if weights is None:
        count = torch.full((), float(len(loss)), device=loss.device)
        return loss.sum(), right.sum(), count
    return (loss * weights).sum(), (right * weights).sum(), weights.sum()
