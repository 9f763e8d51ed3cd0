"""Tests the weights of a finished run of experiments.train on its task.

    python -m experiments.evaluate run=runs/train/listops/sparse/seed0
    python -m experiments.evaluate run=docs/results/lra/path_x examples=50 device=cpu

Prints the accuracy with its standard error. Writes a row only where csv= asks for it.
"""

import time
from pathlib import Path
from typing import Any

from experiments.common.checks import check_options, flag_or_null
from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.common.records import Records
from experiments.lra.finished import AccuracyRow, evaluate_run, run_settings, with_data


@program("evaluate")
def main(options: dict[str, Any], command: str) -> None:
    if options["run"] is None:
        raise ValueError("run=FOLDER is missing: give the folder of a finished run")
    check_options(options, optional="examples batch", whole="examples batch")
    flag_or_null("generate", options["generate"])
    begun, folder = time.monotonic(), Path(options["run"])
    device = find_device(options["device"])
    settings = run_settings(folder)
    data = {name: options[name] for name in ("generate", "data_dir", "cache_dir")}
    wanted = {name: options[name] for name in ("split", "examples", "batch")}
    row = evaluate_run(folder, with_data(settings, **data), device, command, **wanted)
    what = "accuracy of predicted tokens" if settings.pretrain else "accuracy"
    print(
        f"{folder}: {row.task} ({row.data}), {row.attention} attention, "
        f"weights of step {row.step}\n"
        f"{row.split} {what} {100 * row.accuracy:.2f} ± {100 * row.standard_error:.2f} %"
        f" ({row.examples:,} examples), loss {row.loss:.4f}, "
        f"in {time.monotonic() - begun:.0f} s on {device_name(device)}"
    )
    if options["csv"] is not None:
        records = Records(options["csv"], AccuracyRow, allow_changes=options["allow_changes"])
        records.append(row)


if __name__ == "__main__":
    main()
