"""Trains a language model: docs/guide/language_models.md.

    python -m experiments.lm                            4 x 256 on a CPU, GPT-2 on a GPU
    python -m experiments.lm mask=butterfly+sliding:64 context=512
    torchrun --nproc-per-node 2 -m experiments.lm
    python -m experiments.sweep sweep=lm_masks          a comparison: lm_same, lm_contexts, ...
    python -m experiments.lm.report runs=runs/lm        its tables and figures

The same command continues where it was stopped or killed.
"""

from typing import Any

from experiments.common.program import HydraConfig, program
from experiments.lm.run import train
from experiments.lm.settings import Settings, make_settings
from experiments.training.distributed import leave


@program("lm", Settings, "experiments.lm", made=False)
def main(options: dict[str, Any], command: str) -> None:
    try:
        train(make_settings(options, list(HydraConfig.get().overrides.task)), command)
    finally:
        leave()


if __name__ == "__main__":
    main()
