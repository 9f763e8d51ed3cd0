"""Problems of given inputs and which backends take them, and families of masks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import masks
from masks import BlockMask, Mask
from sparseflash.backends.protocol import Backend, Saved, Walk
from sparseflash.backends.registry import BACKENDS
from sparseflash.problem import Options, Problem, describe
from sparseflash.schedule.blocks import Schedule
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.schedule.tile_spec import TileSpec


class OnHopper(torch.Tensor):
    """A tensor in the memory of the CPU that says it is on a GPU."""

    device = torch.device("cuda", 0)  # pyright: ignore[reportAssignmentType]


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | BlockMask | Schedule | None = None, *,
    scale: float | None = None, dropout_p: float = 0.0, deterministic: bool = False,
    backend: str = "auto",
) -> Problem:  # fmt: skip
    """With gradients; the lists of a schedule are brought by the call."""
    options = Options(scale, dropout_p, deterministic, backend)
    identity = mask.facts if isinstance(mask, Schedule) else getattr(mask, "key", None)
    return describe(q, k, v, identity, options, True)


def refusal(backend: str, problem: Problem) -> str | None:
    """Why a backend cannot run a problem, forward or backward, or None."""
    forward = BACKENDS[backend].unsupported(problem, "forward")
    return forward or BACKENDS[backend].unsupported(problem, "backward")


def run_backend(
    backend: Backend, qkv: Sequence[Tensor], schedule: Schedule | None, dout: Tensor | None = None,
    dlse: Tensor | None = None, *, seed: Tensor | None = None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out and lse by a backend itself, and dq, dk, dv where there is a dout."""
    problem = problem_of(*qkv, schedule, **options)

    def walk(specs: Sequence[TileSpec]) -> Walk:
        return Walk(schedule, tuple(tile_lists(schedule, spec, problem.device) for spec in specs))

    forward = backend.plan_forward(problem, schedule)
    results = forward(*qkv, seed, walk(forward.specs))[:2]
    if dout is None:
        return results
    backward = backend.plan_backward(problem, schedule)
    saved = Saved(*qkv, *results, seed)
    return *results, *backward(dout, dlse, saved, walk(backward.specs))[:3]


def bits(n: int) -> Mask:
    """Few pairs, queries that see nothing, and a whole sequence of them."""
    rng = np.random.default_rng(0)
    return masks.mask_from((rng.random((n, n)) < 0.01) & (np.arange(n)[:, None] % 64 > 40))


def by_sequence(n: int) -> Mask:
    """Documents of other lengths in each sequence of the batch."""
    i = np.arange(n)
    ends = np.stack([i * 3 // n, i * 7 // n])
    return masks.mask_from(ends[:, None, :, None] == ends[:, None, None, :])


FAMILIES = {
    "causal": lambda n: masks.causal(),
    "sliding": lambda n: masks.sliding(50),
    "documents": lambda n: masks.documents((n // 2 - 7, 9, n - n // 2 - 2)) & masks.causal(),
    "bigbird": lambda n: masks.bigbird(16, 2, window=3, per_head=True),
    "longformer": lambda n: masks.longformer(32, 1, (0, 1, 2)),
    "butterfly": lambda n: masks.butterfly(16),
    "random by head": lambda n: masks.random_blocks(0.15, block=16, per_head=True),
    "strided": lambda n: masks.strided(64),
    "block diffusion": lambda n: masks.block_diffusion(32) if n % 64 == 0 else masks.local(20),
    "bits": bits,
    "by sequence": by_sequence,
    "dense": lambda n: None,
}
