"""Test the weights of a finished run of experiments.train on its task.

    python -m experiments.evaluate run=runs/train/listops/sparse/seed0
    python -m experiments.evaluate run=docs/results/lra/path_x examples=50 device=cpu

Prints the accuracy with its standard error. Writes a row only where rows= asks for it.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from experiments.common.config import check, option
from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.common.rows import Rows, origin
from experiments.lra.finished import evaluate_run, with_data
from experiments.lra.settings import Settings
from experiments.training.run_file import SOURCES, read_settings


@dataclass
class Options:
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


@program("evaluate", Options)
def main(options: Options, command: str) -> None:
    begun, folder = time.monotonic(), Path(str(options.run))
    device, own = find_device(options.device), read_settings(folder, Settings)
    data = {name: getattr(options, name) for name in ("generate", "data_dir", "cache_dir")}
    chosen = {name: getattr(options, name) for name in ("split", "examples", "batch")}
    row = evaluate_run(folder, with_data(own, **data), device, **chosen)
    what = "accuracy of predicted tokens" if own.pretrain else "accuracy"
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
