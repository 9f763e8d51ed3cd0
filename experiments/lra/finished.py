"""A finished run: its best weights, and their accuracy on a split of its task."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.lra.models.classifier import Classifier
from experiments.lra.objectives import objective_of
from experiments.lra.settings import Settings
from experiments.lra.tasks.load import load_task
from experiments.lra.tasks.task import PATHFINDER, SPLITS, Task
from experiments.lra.weights import make_model, mask_of, refuse_other_pairs
from experiments.training.data import DeviceSplit
from experiments.training.device import DTYPES, lacks_memory
from experiments.training.distributed import Group
from experiments.training.evaluate import Evaluator
from experiments.training.state import WEIGHTS, load_weights, refuse_shapes, weights_file

TOKENS = 2**16  # of a batch on a CPU, if none is given
REMEDY = "give the folder of a finished run"


def load_model(folder: Path, settings: Settings, task: Task) -> tuple[Classifier, int]:
    """Return the model of a run with its best weights, on the CPU, and their step.

    Raises:
        ValueError: there are no weights, the file is damaged, its shapes do not fit the model, or
            the mask allows other pairs now.
    """
    found = weights_file(folder)
    if found is None:
        raise ValueError(f"run={folder}: no {WEIGHTS} there; {REMEDY}")
    weights, step, about = load_weights(found, REMEDY)
    model = make_model(settings, task)
    refuse_shapes(found, weights, model.state_dict(), f"run.json is of another model; {REMEDY}")
    refuse_other_pairs(found, about, model)
    model.load_state_dict(weights)
    return model, step


def evaluate_run(
    folder: Path,
    settings: Settings,
    device: torch.device,
    *,
    split: str = "test",
    examples: int | None = None,
    batch: int | None = None,
) -> dict[str, Any]:
    """Return the accuracy of the best weights of a run, as the fields of a row.

    Args:
        settings: of the run, or with another task or other folders of data.
        examples: how many are drawn from the split; None: all of them.
        batch: examples at a time; None: as in the run, and fewer on a CPU.

    Raises:
        ValueError: data or weights are missing or broken, or a batch needs too much memory.
    """
    task = load_task(**_data(settings, split, examples))
    model, step = load_model(folder, settings, task)
    mask, density = mask_of(model, settings)
    on_gpu = device.type == "cuda"
    if batch is None:
        batch = settings.eval_batch or settings.micro_batch or settings.batch
        batch = batch if on_gpu else max(1, min(batch, TOKENS // task.length))
    evaluator = Evaluator(
        model.to(device),
        DeviceSplit(task.splits[split], device),
        objective_of(settings),
        Group(0, 1, device),
        batch=batch,
        dtype=DTYPES[settings.precision or "fp32"] if on_gpu else torch.float32,
        examples=examples,
    )
    try:
        means = evaluator(f"{task.name}, {evaluator.batches} batches")
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise ValueError(f"batch={batch} needs too much memory: give a smaller one") from error
    accuracy, count = means["accuracy"], evaluator.examples
    return {
        "run": str(folder),
        "task": task.name,
        "data": task.source,
        "attention": settings.attention["name"],
        "mask": mask,
        "density": density,
        "split": split,
        "examples": count,
        "step": step,
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / count),
        "loss": means["loss"],
    }


def with_data(settings: Settings, *, generate: bool | None = None, **places: Any) -> Settings:
    """Return settings with other data: `data_dir`, `cache_dir`, or `generate` of the task."""
    task = settings.task | ({} if generate is None else {"generate": generate})
    return replace(settings, task=task, **{k: v for k, v in places.items() if v is not None})


def _data(settings: Settings, split: str, examples: int | None) -> dict[str, Any]:
    """Return the arguments of `load_task`. Of generated images only those of one split are made."""
    data = settings.data()
    if data["name"] in PATHFINDER and data.get("generate"):
        sizes: dict[str, int] = dict(zip(SPLITS, data["examples"], strict=True))
        count = min(sizes[split], examples or sizes[split])
        data["examples"] = [count if name == split else 1 for name in SPLITS]
    return data
