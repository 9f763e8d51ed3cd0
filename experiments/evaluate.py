"""Test the weights of a finished run of experiments.train on its task.

    python -m experiments.evaluate run=runs/train/listops/sparse/seed0
    python -m experiments.evaluate run=docs/results/lra/path_x examples=50 device=cpu

Prints the accuracy of a class with its standard error. Writes a row only where rows= asks for it.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.common.config import Checked, option
from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.common.rows import Rows
from experiments.lra.run import objective_of
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import PATHFINDER, SPLITS, load_task
from experiments.lra.weights import load_model, mask_of
from experiments.training.device import DTYPES
from experiments.training.distributed import Group
from experiments.training.evaluate import DeviceSplit, Evaluator
from experiments.training.run_file import SOURCES, read_settings
from experiments.training.step import explained_memory

TOKENS = 2**16  # of a batch on a CPU, if none is given


@dataclass
class Options(Checked):
    run: str | None = option(None, "its folder: run.json, and weights.pt or checkpoint.pt")
    split: str = option("test", "of the task", choices=SPLITS)
    examples: int | None = option(None, "drawn from the split; null: all of them", least=1)
    batch: int | None = option(
        None, "examples at a time; null: as in the run, fewer on a CPU", least=1
    )
    device: str | None = option(None, "cuda | cpu; null: cuda if there is a GPU")
    generate: bool | None = option(
        None, "true: generated data, false: the official files; null: as in the run"
    )
    data_dir: str | None = option(None, "null: as in the run")
    cache_dir: str | None = option(None, "null: as in the run")
    rows: str | None = option(None, "a .jsonl file that gets the row")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is None:
            raise ValueError("run=FOLDER is missing: give the folder of a finished run")


@program("evaluate", Options)
def main(options: Options, command: str) -> None:
    begun, folder = time.monotonic(), Path(str(options.run))
    device, settings = find_device(options.device), read_settings(folder, Settings)
    if options.generate is not None:
        settings = replace(settings, task=settings.task | {"generate": options.generate})
    places = {"data_dir": options.data_dir, "cache_dir": options.cache_dir}
    settings = replace(settings, **{key: value for key, value in places.items() if value})
    key = ("run", "data", "split", "examples", "step")
    rows = None if options.rows is None else Rows(options.rows, key, SOURCES)
    row = evaluate_run(folder, settings, device, options.split, options.examples, options.batch)
    what = "accuracy of predicted tokens" if settings.pretrain else "accuracy"
    error = row["standard_error"]
    error = "" if error is None else f" ± {100 * error:.2f}"
    print(
        f"{folder}: {row['task']} ({row['data']}), {row['attention']} attention, "
        f"weights of step {row['step']}\n"
        f"{row['split']} {what} {100 * row['accuracy']:.2f}{error} %"
        f" ({row['examples']:,} examples), loss {row['loss']:.4f}, "
        f"in {time.monotonic() - begun:.0f} s on {device_name(device)}"
    )
    if rows is not None:
        rows.append(row | rows.origin(device, command))


def evaluate_run(
    folder: Path,
    settings: Settings,
    device: torch.device,
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
    data = settings.data()
    if data["name"] in PATHFINDER and data.get("generate"):  # make those of one split only
        sizes: dict[str, int] = dict(zip(SPLITS, data["examples"], strict=True))
        count = min(sizes[split], examples or sizes[split])
        data["examples"] = [count if name == split else 1 for name in SPLITS]
    task = load_task(**data)
    model, step = load_model(folder, settings, task)
    mask, density = mask_of(model, settings)
    on_gpu = device.type == "cuda"
    if batch is None:
        batch = settings.eval_batch or settings.micro_batch or settings.batch
        batch = batch if on_gpu else max(1, min(batch, TOKENS // task.length))
    evaluator = Evaluator(
        model.to(device),
        DeviceSplit(task.splits[split].arrays, device),
        objective_of(settings),
        Group(0, 1, device),
        batch=batch,
        dtype=DTYPES[settings.precision or "fp32"] if on_gpu else torch.float32,
        examples=examples,
    )
    with explained_memory(f"batch={batch}"):
        means = evaluator(f"{task.name}, {evaluator.batches} batches")
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
        # hidden tokens of a sequence are no independent trials
        "standard_error": None if settings.pretrain else (accuracy * (1 - accuracy) / count) ** 0.5,
        "loss": means["loss"],
    }


if __name__ == "__main__":
    main()
