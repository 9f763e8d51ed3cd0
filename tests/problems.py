"""Problems of given inputs and which backends take them, families of masks, and calls whose
inputs several ranks share.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import masks
import sparseflash
from masks import BlockMask, Mask
from sparseflash.backends.protocol import Backend, Saved, Walk
from sparseflash.backends.registry import BACKENDS
from sparseflash.problem import Options, Problem, describe
from sparseflash.schedule.blocks import Schedule
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.schedule.tile_spec import TileSpec
from sparseflash.select.base import Selector


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

BATCH, SIZE, DIM, DIM_V = 2, 16, 16, 24


def far_and_near(s, b, h, q, k, n_q, n_k, factor, row, column, distance, pair):
    """A score of every number of a pair, with tables for each kind of index."""
    bias = row[b, q] * column[k // 3] + distance[h, k - q + n_q - n_k + 5]
    return np.tanh(s * factor[h]) + bias + np.where(q < n_k // 2, pair[b, h, q, k % 9], 0.5)


SCORE = sparseflash.score(far_and_near)
DROPOUT = {"dropout_p": 0.3, "seed": 2**40 + 9}


class Call:
    """The same inputs on every rank, and what one process gives."""

    def __init__(
        self, n: int, heads: int, kv_heads: int, mask: Any, dtype: Any, sink: Any = None,
        **options: Any,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(n)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=dtype)

        self.qkv = [
            normal(BATCH, h, n, d) for h, d in ((heads, DIM), (kv_heads, DIM), (kv_heads, DIM_V))
        ]
        self.dout, self.dlse = normal(BATCH, heads, n, DIM_V), normal(BATCH, heads, n)
        self.sink, self.options = sink, options
        self.tables = {}
        if options.pop("scored", False):
            sizes = (heads,), (BATCH, n), (n,), (heads, 11), (BATCH, heads, n, 9)
            self.tables = {
                name: normal(*size) for name, size in zip(SCORE.names, sizes, strict=True)
            }
        self.want = self.run(mask, *self.qkv, self.dout, self.dlse)

    def run(self, mask: Any, *given: Tensor, **options: Any):
        """Return out, LSE and the gradients of q, k, v, the sink and the tables."""
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        dout, dlse = given[3:]
        mask = mask(q, k) if isinstance(mask, Selector) else mask
        learnt = {} if self.sink is None else {"sink": self.sink.clone().requires_grad_()}
        options = {"return_lse": True, **learnt, **self.options, **options}
        if self.tables:
            tables = {name: x.clone().requires_grad_() for name, x in self.tables.items()}
            learnt |= tables
            options["score"] = SCORE(**tables)
        out, lse, *_ = cast(Any, sparseflash.attention)(q, k, v, mask, **options)
        seen = torch.where(lse == -torch.inf, 0.0, lse * dlse.to(lse.dtype))
        ((out * dout).sum() + seen.sum()).backward()
        return out.detach(), lse.detach(), *(x.grad for x in (q, k, v, *learnt.values()))

    def on(self, cp: Any, **options: Any) -> Any:
        return self.run(cp, *(cp.shard(x, 2) for x in (*self.qkv, self.dout, self.dlse)), **options)
