"""Trains a language model, or compares several: docs/guide/language_models.md.

    python -m experiments.lm                            one run: 4 x 256 on a CPU, GPT-2 on a GPU
    python -m experiments.lm mask='butterfly+sliding:64' context=512
    python -m experiments.lm plan=same                  standard, SDPA, ours: the same loss curves
    python -m experiments.lm plan=contexts              longer contexts at equal tokens a step
    python -m experiments.lm plan=masks                 sparse masks at equal steps
    python -m experiments.lm plan=equal_time            and at equal time, after plan=masks
    torchrun --nproc-per-node 2 -m experiments.lm

The same command continues where it was stopped or killed.
"""

import sys
from typing import Any

from experiments.common.checks import choose
from experiments.common.program import program
from experiments.lm.plans import PLANS, run_plan
from experiments.lm.run import train
from experiments.lm.settings import make_settings
from experiments.training.clock import Interrupted
from experiments.training.distributed import leave


@program("lm", module="experiments.lm")
def main(options: dict[str, Any], command: str) -> None:
    """One run, or a plan."""
    try:
        if options["plan"] is None:
            _refuse_options_of_plans(options)
            train(make_settings(options), command)
        else:
            choose("plan", options["plan"], PLANS)
            run_plan(options["plan"], options, command)
    except Interrupted as stop:
        sys.exit(stop.code)


def _refuse_options_of_plans(options: dict[str, Any]) -> None:
    for name in ("seeds", "cases", "report", "pages"):
        if options[name]:
            seed = ", or seed= of one run" if name == "seeds" else ""
            raise ValueError(
                f"{name}={options[name]!r} needs a plan: give plan={'|'.join(PLANS)}{seed}"
            )


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
