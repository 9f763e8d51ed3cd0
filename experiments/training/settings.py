"""What the settings of all training runs share."""

import math
from typing import Any

import torch

from experiments.common.checks import is_number, share

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check_training(values: dict[str, Any]) -> None:
    """Raises ValueError for settings out of range that all models have, once others are checked."""
    betas, micro, batch = (values[name] for name in ("betas", "micro_batch", "batch"))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: give two numbers, [0.9,0.999]")
    for beta in betas:
        share("betas", beta)
    decay = values["weight_decay"]
    if not is_number(decay) or not 0 <= decay < math.inf:
        raise ValueError(f"weight_decay={decay!r}: give a number, at least 0")
    if micro is not None and batch % micro:
        raise ValueError(f"micro_batch={micro} does not divide batch={batch}")
