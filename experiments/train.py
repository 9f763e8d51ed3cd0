"""Train a classifier of the Long Range Arena with one of nine attentions.

    python -m experiments.train task=listops
    python -m experiments.train task=listops attention=sparse mask=local:256+butterfly seed=0,1 -m
    python -m experiments.train --config-dir MINE task=mine attention=mine
    torchrun --nproc-per-node 2 -m experiments.train task=pathfinder128

The same command continues where it was stopped or killed. MINE/task/mine.yaml is a file such as
those of conf/task, and MINE/*.py register what it names. Recipe, task and scale=small set other
values than those listed here; a run records them in its run.json. See docs/guide/lra.md.
"""

import sys
from typing import Any

from experiments.common.program import HydraConfig, RunMode, program
from experiments.lra.settings import Settings, make_settings
from experiments.training.distributed import leave


@program("train", Settings, made=False)
def main(options: dict[str, Any], command: str) -> None:
    from experiments.lra.run import train  # imports torch._dynamo, which help does not need

    given = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        print(f"\n== {' '.join(given)}", file=sys.stderr, flush=True)
    try:
        train(make_settings(options, given), command)
    finally:
        leave()


if __name__ == "__main__":
    main()
