"""Tests the weights of a finished run of experiments.train on its task.

    python -m experiments.evaluate run=runs/train/listops/sparse/seed0
    python -m experiments.evaluate run=docs/results/lra/path_x examples=50 device=cpu

Prints the accuracy with its standard error. Writes a row only where csv= asks for it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.checks import whole_number
from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.common.records import Records, Row
from experiments.lra.training.finished import evaluate_run, run_settings, with_data
from experiments.lra.training.result import SOURCES as CODE


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Row):
    """The accuracy of one run on one split."""

    run: str
    task: str
    data: str  # official, generated, ...
    attention: str
    split: str
    examples: int
    step: int  # of the weights
    accuracy: float
    standard_error: float
    loss: float

    WHAT = ("run", "data", "split", "examples", "step")
    SOURCES = CODE
    COMMAND = "python -m experiments.evaluate run=FOLDER csv=FILE"


@program("evaluate")
def main(options: dict[str, Any], command: str) -> None:
    if options["run"] is None:
        raise ValueError("run=FOLDER is missing: give the folder of a finished run")
    for name in ("examples", "batch"):
        if options[name] is not None:
            whole_number(name, options[name])
    begun, folder = time.monotonic(), Path(options["run"])
    device = find_device(options["device"])
    settings = run_settings(folder)
    data = {name: options[name] for name in ("generate", "data_dir", "cache_dir")}
    found = evaluate_run(
        folder,
        with_data(settings, **data),
        device,
        split=options["split"],
        examples=options["examples"],
        batch=options["batch"],
    )
    what = "accuracy of hidden pixels" if settings.pretrain else "accuracy"
    print(
        f"{folder}: {found.task.name} ({found.task.source}), {settings.attention['name']} "
        f"attention, weights of step {found.step}\n"
        f"{options['split']} {what} {100 * found.accuracy:.2f} ± {100 * found.standard_error:.2f} %"
        f" ({found.examples:,} examples), loss {found.loss:.4f}, "
        f"in {time.monotonic() - begun:.0f} s on {device_name(device)}"
    )
    if options["csv"] is not None:
        records = Records(options["csv"], AccuracyRow, allow_changes=options["allow_changes"])
        records.append(
            AccuracyRow(
                run=str(folder),
                task=found.task.name,
                data=found.task.source,
                attention=settings.attention["name"],
                split=options["split"],
                examples=found.examples,
                step=found.step,
                accuracy=found.accuracy,
                standard_error=found.standard_error,
                loss=found.loss,
                mask=found.mask or "",
                density=found.density,
                **AccuracyRow.origin(str(device), command),
            )
        )


if __name__ == "__main__":
    main()
