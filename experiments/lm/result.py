"""What a complete run measures, and its result in result.json and in a line."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from experiments.common.devices import device_name
from experiments.common.provenance import code_version, now
from experiments.lm.attention import resolve
from experiments.lm.measure import by_position, saved_mib
from experiments.lm.rows import SOURCES
from experiments.lm.settings import Settings
from experiments.lm.tokens import Corpus
from experiments.lm.windows import NEXT
from experiments.training.device import peak_mib
from experiments.training.evaluate import Evaluator
from experiments.training.journal import duration
from experiments.training.settings import PRECISIONS
from experiments.training.step import Trainer

LAST = 100  # steps whose mean loss is the training loss of a result
MANIFEST = "manifest.json"


def make_result(
    settings: Settings,
    corpus: Corpus,
    trainer: Trainer,
    validation: Evaluator,
    losses: Sequence[tuple[int, float]],
    **measured: Any,
) -> dict[str, Any]:
    """The content of result.json: what the model learned, `measured`, and where they come from.

    losses: (step, mean training loss since the one before).
    """
    group, windows, step = trainer.group, validation.split, trainer.step
    peak = peak_mib(group.device) if group.device.type == "cuda" else None
    found: list[float] = []
    if settings.objective == NEXT:
        dtype, size = PRECISIONS[settings.precision], settings.micro_batch or settings.batch
        found = by_position(trainer.model, windows, size, dtype)  # type: ignore[arg-type]
    return {
        "complete": True,
        "steps": step,
        "data": corpus.name,
        "data_digest": corpus.digest,
        "manifest": corpus.manifest[:1] if len(corpus.manifest) == 1 else MANIFEST,
        "tokenizer": corpus.tokenizer,
        "train_tokens": len(corpus.train),
        "val_tokens": validation.examples * settings.context,
        "bytes_per_token": corpus.bytes_per_token,
        "params": sum(p.numel() for p in trainer.model.parameters()),
        "mask": str(resolve(settings.mask, causal=settings.objective == NEXT)),
        "train_loss": tail(losses, step),
        "val_loss": fmean(found) if found else validation()["loss"],
        "curve": losses,
        "positions": found,
        "peak_mib": peak,
        "saved_mib": saved_mib(trainer, settings),
        "compiled": settings.compile if trainer.compiled else False,
        "captured": trainer.captured,
        "processes": group.world,
        "device": device_name(str(group.device)),
        "versions": code_version(SOURCES),
        "date": now(),
        **measured,
    }


def tail(losses: Sequence[tuple[int, float]], last: int) -> float:
    """The mean training loss of the last `LAST` steps, as far as the means logged tell."""
    before, total, steps = 0, 0.0, 0
    for step, loss in losses:
        if before >= max(0, last - LAST) or step == last:
            total, steps = total + loss * (step - before), steps + step - before
        before = step
    return total / steps


def summary(result: dict[str, Any]) -> str:
    """A result in a line."""
    loss = result["val_loss"]
    return (
        f"validation loss {loss:.4f} (perplexity {math.exp(loss):.2f}), training "
        f"{result['train_loss']:.4f}; {result['steps']} steps in {duration(result['seconds'])}, "
        f"{result['ms_per_step']:.3g} ms a step"
    )
