"""Trains a classifier of the Long Range Arena with one of nine attentions.

    python -m experiments.train task=listops
    python -m experiments.train task=listops attention=sparse mask=local:256+butterfly seed=0,1 -m
    torchrun --nproc-per-node 2 -m experiments.train task=pathfinder128

The same command goes on where it was stopped or killed. See docs/lra.md.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.lra.training.config import make_settings
from experiments.lra.training.distributed import leave
from experiments.lra.training.run import train
from experiments.lra.training.stop import Interrupted

failed: list[str] = []  # jobs of a sweep that could not run


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def entry(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    given = list(hydra_config.overrides.task)
    sweep = hydra_config.mode == RunMode.MULTIRUN
    if sweep:
        print(f"\n== {' '.join(given)}", file=sys.stderr, flush=True)
    try:
        train(make_settings(config, given))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if not sweep:
            sys.exit(1)
        failed.append(" ".join(given))  # the other jobs have their turn all the same
    except Interrupted as stop:
        sys.exit(stop.code)


def main() -> None:
    try:
        entry()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        leave()
    if failed:
        print(f"\nfailed: {'; '.join(failed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
