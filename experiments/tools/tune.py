"""Time candidate tiles of the Triton kernels on this GPU: a row for each candidate and mask.

    python -m experiments.tools.tune runs/tune/tune.jsonl
    python -m experiments.tools.tune runs/tune/tune.jsonl "forward" "forward partial"

These are the measurements behind sparseflash/kernels/portable/configs.py. A kernel's name with
" partial" behind it is tuned for masks that have partial blocks, one with " short" for masks of
whole blocks with few keys to a query.
"""

import shlex
import sys
from collections.abc import Iterator

import torch

import masks
from experiments.bench import timing
from experiments.common.rows import OK, Row, Rows
from sparseflash.backends import triton as backend
from sparseflash.backends.protocol import Saved, Walk
from sparseflash.kernels.portable import configs
from sparseflash.kernels.portable.configs import Tiles
from sparseflash.problem import Options, describe
from sparseflash.schedule.blocks import schedule_for
from sparseflash.testing import relative_error

KEY = "kernel head_dim block_m block_n num_warps num_stages max_registers".split()
# head dim -> batch, heads, length
SHAPES = {32: (8, 16, 16384), 64: (2, 32, 16384), 128: (2, 16, 16384), 256: (2, 8, 16384)}
MASKS = {
    "": (None, masks.random_blocks(1.0), masks.random_blocks(0.25)),
    "short": tuple(masks.random_blocks(density) for density in (0.125, 0.0625, 0.03125)),
    "partial": (masks.sliding(256), masks.sliding(2048), masks.causal()),
}
LIMIT = 1e-2  # of the relative error
PRODUCTS = {"forward": 2, "backward_kv": 4, "backward_q": 3}  # matrix products over a block


CANDIDATES = {
    "forward": (
        (64, 128, 4, 1, 128), (64, 128, 4, 1, 168), (64, 128, 4, 2),
        (64, 64, 4, 1, 128), (64, 64, 4, 2), (128, 64, 8, 1, 128),
        (128, 64, 8, 2, 128), (128, 64, 8, 2),
        (128, 128, 8, 2, 128), (64, 64, 4, 1, 168),
    ),
    "backward_kv": (
        (64, 64, 4, 1), (64, 64, 4, 1, 168), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 128, 8, 2), (32, 128, 8, 3), (128, 64, 4, 2), (32, 64, 4, 2),
        (32, 64, 4, 1, 168),
    ),
    "backward_q": (
        (64, 64, 4, 1), (64, 64, 4, 1, 168), (64, 64, 4, 1, 128), (64, 64, 4, 2),
        (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 1),
        (64, 128, 4, 1, 168), (64, 32, 4, 2),
    ),
    "head dim 256": (
        (64, 64, 8, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 8, 1), (32, 32, 4, 1),
        (16, 64, 8, 2), (16, 64, 8, 1), (128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 1),
        (32, 32, 8, 1), (64, 32, 8, 2),
    ),
}  # fmt: skip


def inputs(head_dim: int, length: int | None = None) -> list[torch.Tensor]:
    """q, k, v and dout of the measured shape, bfloat16."""
    batch, heads, n = SHAPES[head_dim]
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length or n, head_dim)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(shape, **options) for _ in range(4)]


def runner(kernel: str, tensors: list[torch.Tensor], mask: masks.Mask | None):
    """Return a callable that launches one kernel with the tiles that the table holds at that
    moment.
    """
    q, k, v, dout = tensors
    batch, heads, n, head_dim = q.shape
    schedule = None if mask is None else schedule_for(mask, n, n, batch, heads, q.device)
    options = Options(head_dim**-0.5, 0.0, False, "triton")
    problem = describe(q, k, v, None if mask is None else mask.key, options, True)
    walk, forward = Walk(schedule, ()), backend.plan_forward(problem, schedule)
    if kernel.startswith("forward"):
        return lambda: forward(q, k, v, None, walk)[:2]
    saved = Saved(q, k, v, *forward(q, k, v, None, walk)[:2], None)
    backward = backend.plan_backward(problem, schedule)
    delta, lse2, _ = backward.rows(dout, None, saved)
    if kernel.startswith("backward_kv"):
        return lambda: backward.keys(dout, delta, lse2, saved, walk)
    return lambda: backward.queries(dout, delta, lse2, saved, walk)[0]


def tune(kernel: str, head_dim: int) -> Iterator[Row]:
    """Yield the rows of each candidate that runs and agrees with the table's tiles; print the
    others.
    """
    tensors, short, cases = (
        inputs(head_dim),
        inputs(head_dim, 1024),
        MASKS[kernel.partition(" ")[2]],
    )
    batch, heads, n, _ = tensors[0].shape
    work = 2e-9 * PRODUCTS[kernel.split()[0]] * batch * heads * n * n * head_dim

    def results() -> tuple[torch.Tensor, ...]:
        found = runner(kernel, short, cases[1])()
        return (found,) if isinstance(found, torch.Tensor) else tuple(found)

    expected = results()
    for shape in CANDIDATES["head dim 256" if head_dim == 256 else kernel.split()[0]]:
        configs.HOPPER[kernel, head_dim] = tiles = Tiles(*shape)
        try:
            error = max(relative_error(a, b) for a, b in zip(results(), expected, strict=True))
            reason = f"wrong, error {error}" if error > LIMIT else ""
        except Exception as failure:  # too many registers, or too much shared memory
            reason = f"{type(failure).__name__}: {str(failure)[:120]}"
        if reason:
            print(f"{kernel} {head_dim} {tuple(tiles)}: {reason}", flush=True)
            continue
        rates = []
        for mask in cases:
            call = runner(kernel, tensors, mask)
            times = timing.measure(call, tensors[0].device, seconds=0.08)
            density = 1.0 if mask is None else mask.build(n).density
            rates.append(work * density / times.ms_median)
            text = "dense" if mask is None else str(mask)
            row = {"kernel": kernel, "head_dim": head_dim, **tiles._asdict(), "mask": text}
            yield row | {"density": density, "status": OK, **times._asdict(), "tflops": rates[-1]}
        texts = " ".join(f"{rate:6.0f}" for rate in rates)
        print(f"{kernel:20s} {head_dim:4d} {tuple(tiles)!s:34s} {texts}", flush=True)


def main(path: str, *kernels: str) -> None:
    """Check and time the candidates, and add their rows to the file."""
    rows = Rows(path, KEY)
    command = shlex.join(["python", "-m", "experiments.tools.tune", *sys.argv[1:]])
    origin = rows.origin("cuda", command)
    for kernel in kernels or PRODUCTS:
        for head_dim in SHAPES:
            for row in tune(kernel, head_dim):
                rows.append(row | origin)


if __name__ == "__main__":
    main(*sys.argv[1:])
