"""Tests the weights of a finished run of experiments.train on its task.

    python -m experiments.evaluate run=runs/train/listops/sparse/seed0
    python -m experiments.evaluate run=docs/results/lra/path_x examples=50 device=cpu

Prints the accuracy with its standard error. Writes a row only where rows= asks for it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.config import check, make, option
from experiments.common.program import program


@dataclass
class Options:
    """The options of experiments.evaluate."""

    run: str | None = option(None, "its folder: run.json, and weights.pt or checkpoint.pt")
    split: str = option("test", "of the task", choices=("train", "val", "test"))
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
        check(self)
        if self.run is None:
            raise ValueError("run=FOLDER is missing: give the folder of a finished run")


@program("evaluate", options_type=Options)
def main(values: dict[str, Any], command: str) -> None:
    options = make(Options, values)
    from experiments.common.devices import device_name, find_device
    from experiments.common.rows import Rows, origin
    from experiments.lra.finished import evaluate_run, with_data
    from experiments.lra.settings import Settings
    from experiments.training.run_file import SOURCES, read_settings

    begun, folder = time.monotonic(), Path(str(options.run))
    device = find_device(options.device)
    settings = with_data(
        read_settings(folder, Settings),
        generate=options.generate,
        data_dir=options.data_dir,
        cache_dir=options.cache_dir,
    )
    row = evaluate_run(
        folder,
        settings,
        device,
        split=options.split,
        examples=options.examples,
        batch=options.batch,
    )
    what = "accuracy of predicted tokens" if settings.pretrain else "accuracy"
    print(
        f"{folder}: {row['task']} ({row['data']}), {row['attention']} attention, "
        f"weights of step {row['step']}\n"
        f"{row['split']} {what} {100 * row['accuracy']:.2f} ± {100 * row['standard_error']:.2f} %"
        f" ({row['examples']:,} examples), loss {row['loss']:.4f}, "
        f"in {time.monotonic() - begun:.0f} s on {device_name(device)}"
    )
    if options.rows is not None:
        rows = Rows(options.rows, ("run", "data", "split", "examples", "step"), SOURCES)
        rows.append(row | origin(device, command, SOURCES))


if __name__ == "__main__":
    main()
