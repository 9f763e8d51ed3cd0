"""The self-check of the Hopper kernels: small problems against plain torch.

    python -m sparseflash.backends.hopper.self_check cuda:0

prints a line of JSON: {"reason": why it failed, or null}. It takes about a minute, most of it to
compile. `versions.py` runs it for versions of Triton that nobody has tried.
"""

import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import masks
from masks import Mask
from sparseflash.backends import hopper, reference
from sparseflash.backends.protocol import Backend, Saved, Walk
from sparseflash.problem import Options, describe
from sparseflash.schedule.blocks import Schedule, schedule_for
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.testing import make_qkv, relative_error

LIMIT = 1e-2  # relative error in bfloat16; a right kernel has about 3e-3
HEADS, KV_HEADS = 4, 2


class Check(NamedTuple):
    """A problem with partial blocks, an odd length and enough keys for either backward."""

    head_dim: int
    deterministic: bool  # the backward in two passes
    dropout_p: float = 0.0
    mask: Mask | None = None
    n: int = 1000
    heads: int = HEADS

    @property
    def name(self) -> str:
        words = ["head dim", str(self.head_dim)]
        words += ["tall tiles"] * (self.heads > HEADS)
        words += ["deterministic"] * self.deterministic + ["dropout"] * (self.dropout_p > 0)
        return " ".join([*words, "dense"] if self.mask is None else words)


_MASK = masks.causal() | masks.global_tokens(40)
CHECKS = (
    Check(64, False, mask=_MASK),
    Check(64, True, dropout_p=0.2, mask=_MASK),
    Check(96, False, mask=_MASK),
    Check(128, False, mask=_MASK),
    Check(128, True, mask=_MASK),
    Check(128, False),
    Check(64, False, n=1100, heads=16),  # a wave of tiles of 192 queries, or two of 128
    Check(256, False, mask=_MASK),
)


def failure(device: torch.device) -> str | None:
    """Return the first result that is wrong, or that could not be computed, or None."""
    for check in CHECKS:
        for name, error in _errors(check, device):
            if error > LIMIT:
                return f"{name} at {check.name} has the error {error:.2g}, above {LIMIT:g}"
    return None


def _errors(check: Check, device: torch.device) -> Iterator[tuple[str, float]]:
    """Name and relative error of every result."""
    shape = 1, check.heads, check.n, check.n, check.head_dim
    inputs = {"kv_heads": KV_HEADS, "device": device, "dtype": torch.bfloat16}
    qkv = make_qkv(*shape, **inputs)
    dout = make_qkv(*shape, **inputs, seed=1)[0]
    schedule = None
    if check.mask is not None:
        schedule = schedule_for(check.mask, check.n, check.n, 1, check.heads, device)
    got = _results(hopper, check, qkv, dout, schedule)
    wide = tuple(t.float() for t in qkv)
    expected = _results(reference, check, wide, dout.float(), schedule)
    for name, actual, wanted in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        yield name, relative_error(actual, wanted)


def _results(
    backend: Backend, check: Check, qkv: tuple[Tensor, ...], dout: Tensor, schedule: Schedule | None
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv by a backend, whatever `unsupported` says."""
    q, k, v = qkv
    options = Options(None, check.dropout_p, check.deterministic, backend.name)
    mask = None if check.mask is None else check.mask.key
    problem = describe(q, k, v, mask, options, True)
    seed = torch.tensor([7], device=q.device) if check.dropout_p else None

    def walk(specs) -> Walk:
        return Walk(schedule, tuple(tile_lists(schedule, spec, q.device) for spec in specs))

    forward = backend.plan_forward(problem, schedule)
    backward = backend.plan_backward(problem, schedule)
    out, lse, _ = forward(q, k, v, seed, walk(forward.specs))
    saved = Saved(q, k, v, out, lse, seed)
    return out, lse, *backward(dout, None, saved, walk(backward.specs))[:3]


def main() -> None:
    try:
        reason = failure(torch.device(sys.argv[1]))
    except Exception as error:  # whatever a compiler or a kernel fails with
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps({"reason": reason}))


if __name__ == "__main__":
    main()
