"""What the sanitizers are run over: a program checks its own result, and tells it by its exit code.

python -m tests.gpu.sanitizer.programs "call causal"
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import masks
from tests.attention_cases import Case
from tests.gpu.sanitizer import named_barrier, record
from tests.gpu.stress import Runner

CAUSAL = Case(
    n_q=640, n_k=640, head_dim=64, dtype=torch.bfloat16, heads=2, mask=masks.causal(),
    lse_gradient=False,
)  # fmt: skip
CALLS = {
    "dense": replace(CAUSAL, mask=None),
    "causal": CAUSAL,
    "three consumers": replace(CAUSAL, n_q=1100, n_k=1100, heads=16, kv_heads=16, mask=None),
    "head dim 32": replace(CAUSAL, head_dim=32),
    "head dim 128": replace(CAUSAL, head_dim=128),
    "head dim 256": replace(CAUSAL, head_dim=256),  # its backward is the wide one
    "wider v": replace(CAUSAL, v_head_dim=128),
    "blocks of 64": replace(CAUSAL, block_size=(64, 64)),
    "blocks of 16": replace(CAUSAL, block_size=(16, 16)),
    "scattered blocks of 64": replace(
        CAUSAL, head_dim=128, block_size=(64, 64), mask=masks.random_blocks(0.5, block=64),
    ),  # its backward is that of `single.py`
    "grouped heads": replace(CAUSAL, kv_heads=1),
    "dropout": replace(CAUSAL, dropout_p=0.2),
    "dropout, head dim 256": replace(CAUSAL, head_dim=256, dropout_p=0.2),
    "deterministic": replace(CAUSAL, deterministic=True),  # columns without dQ, and rows
    "split rows": replace(
        CAUSAL, n_q=3000, n_k=3000, heads=1, kv_heads=1,
        mask=masks.local(16) | masks.global_tokens(64),
    ),
    "empty tiles": replace(CAUSAL, mask=masks.random_blocks(0.1, block=128)),
}  # fmt: skip


def attend(case: Case) -> bool:
    """Forward and backward, against the float64 oracle."""
    runner = Runner(case, "hopper")
    runner.check(runner.launch(deterministic=case.deterministic))
    return True


PROGRAMS: dict[str, Callable[[], bool]] = {
    **{f"record {variant}": partial(record.run, variant) for variant in record.VARIANTS},
    **{f"barrier {v}": partial(named_barrier.run, v) for v in named_barrier.VARIANTS},
    **{f"call {name}": partial(attend, case) for name, case in CALLS.items()},
}
# programs that are wrong, and the tool that must say so; their results may be right by luck
WRONG = {"record early": "racecheck", "barrier short": "racecheck"}


if __name__ == "__main__":
    name = sys.argv[1]
    right = PROGRAMS[name]()
    torch.cuda.synchronize()
    sys.exit(0 if right or name in WRONG else f"{name}: a wrong result")
