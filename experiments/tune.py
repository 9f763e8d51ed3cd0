"""Time candidate tiles of the Triton kernels on this GPU.

These are the measurements behind sparseflash/kernels/configs.py.

python -m experiments.tune [--kernels forward,backward_kv,backward_q] [--head-dims 32,64,128,256]
                           [--out tune.csv] [--workers 12]

A kernel's name with " partial" behind it is tuned for masks that have partial blocks, one with
" short" for masks of whole blocks with few keys to a query.
"""

import argparse
import csv
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

import masks
from experiments.bench import timing
from sparseflash.backends import triton as backend
from sparseflash.backends.protocol import Saved, Walk
from sparseflash.kernels import configs
from sparseflash.kernels.configs import Tiles
from sparseflash.problem import Options, describe
from sparseflash.schedule import schedule_for
from sparseflash.testing import relative_error

# head dim -> batch, heads, length
SHAPES = {32: (8, 16, 16384), 64: (2, 32, 16384), 128: (2, 16, 16384), 256: (2, 8, 16384)}
MASKS = {
    "": (None, masks.random_blocks(1.0), masks.random_blocks(0.25)),
    "short": tuple(masks.random_blocks(density) for density in (0.125, 0.0625, 0.03125)),
    "partial": (masks.sliding(256), masks.sliding(2048), masks.causal()),
}
PRODUCTS = {"forward": 2, "backward_kv": 4, "backward_q": 3}  # matrix products over a block


def candidates(kernel: str, head_dim: int) -> list[Tiles]:
    """Tiles worth a try: those whose accumulators and scores fit into the registers."""
    kind = kernel.split()[0]
    shapes: list[tuple] = []
    if kind == "forward":
        shapes = [
            (64, 128, 4, 1, 128), (64, 128, 4, 1, 168), (64, 128, 4, 2),
            (64, 64, 4, 1, 128), (64, 64, 4, 2), (128, 64, 8, 1, 128),
            (128, 64, 8, 2, 128), (128, 64, 8, 2),
            (128, 128, 8, 2, 128), (64, 64, 4, 1, 168),
        ]  # fmt: skip
    elif kind == "backward_kv":
        shapes = [
            (64, 64, 4, 1), (64, 64, 4, 1, 168), (64, 64, 4, 2), (64, 64, 4, 3),
            (64, 128, 8, 2), (32, 128, 8, 3), (128, 64, 4, 2), (32, 64, 4, 2),
            (32, 64, 4, 1, 168),
        ]  # fmt: skip
    elif kind == "backward_q":
        shapes = [
            (64, 64, 4, 1), (64, 64, 4, 1, 168), (64, 64, 4, 1, 128), (64, 64, 4, 2),
            (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 1),
            (64, 128, 4, 1, 168), (64, 32, 4, 2),
        ]  # fmt: skip
    if head_dim == 256:
        shapes = [
            (64, 64, 8, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 8, 1), (32, 32, 4, 1),
            (16, 64, 8, 2), (16, 64, 8, 1), (128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 1),
            (32, 32, 8, 1), (64, 32, 8, 2),
        ]  # fmt: skip
    return [Tiles(*shape) for shape in shapes]


def inputs(head_dim: int, length: int | None = None) -> list[torch.Tensor]:
    """q, k, v and dout of the measured shape, bfloat16."""
    batch, heads, n = SHAPES[head_dim]
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length or n, head_dim)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]


def runner(kernel: str, tensors: list[torch.Tensor], mask: masks.Mask | None):
    """A callable that launches one kernel with the tiles that the table holds at that moment."""
    q, k, v, dout = tensors
    batch, heads, n, head_dim = q.shape
    schedule = None if mask is None else schedule_for(mask, n, n, batch, heads, q.device)
    options = Options(head_dim**-0.5, 0.0, False, "triton")
    problem = describe(q, k, v, None if mask is None else mask.key, options, True)
    walk, forward = Walk(schedule, ()), backend.plan_forward(problem, schedule)
    if kernel.startswith("forward"):
        return lambda: forward(q, k, v, None, walk)
    saved = Saved(q, k, v, *forward(q, k, v, None, walk), None)
    backward = backend.plan_backward(problem, schedule)
    delta, lse2 = backward.rows(dout, None, saved)
    one_pass = backward.keys if kernel.startswith("backward_kv") else backward.queries
    return lambda: one_pass(dout, delta, lse2, saved, walk)


def cases(kernel: str) -> tuple[masks.Mask | None, ...]:
    return MASKS[kernel.partition(" ")[2]]


def set_tiles(kernel: str, head_dim: int, tiles: Tiles) -> None:
    configs.HOPPER[kernel, head_dim] = tiles


def compile_one(kernel: str, head_dim: int, tiles: Tiles) -> str | None:
    """Fill the compile cache with a candidate, and report why it cannot run."""
    try:
        set_tiles(kernel, head_dim, tiles)
        for mask in cases(kernel)[:2]:
            runner(kernel, inputs(head_dim, 1024), mask)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def measure(kernel: str, head_dim: int, tiles: Tiles, mask: masks.Mask | None, tensors) -> dict:
    """One row: milliseconds and TFLOP/s over the non-empty blocks of the mask."""
    set_tiles(kernel, head_dim, tiles)
    times = timing.measure(runner(kernel, tensors, mask), tensors[0].device, seconds=0.08)
    batch, heads, n, _ = tensors[0].shape
    density = 1.0 if mask is None else mask.build(n).density
    products = PRODUCTS[kernel.split()[0]]
    flops = 2.0 * products * batch * heads * n * n * head_dim * density
    return {
        "kernel": kernel,
        "head_dim": head_dim,
        **tiles._asdict(),
        "mask": "" if mask is None else str(mask),
        "density": round(density, 5),
        "ms_median": round(times.median, 4),
        "ms_p20": round(times.p20, 4),
        "ms_p80": round(times.p80, 4),
        "tflops": round(flops / times.median / 1e9, 1),
    }


def wrong(kernel: str, head_dim: int, tiles: Tiles, expected) -> float:
    """Largest relative error of a candidate against what the table held before."""
    set_tiles(kernel, head_dim, tiles)
    got = runner(kernel, inputs(head_dim, 1024), cases(kernel)[1])()
    got, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, expected))
    return max(relative_error(a, b) for a, b in zip(got, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default="forward,backward_kv,backward_q")
    parser.add_argument("--head-dims", default="32,64,128,256")
    parser.add_argument("--out", default="tune.csv")
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    rows_of = [
        (kernel, int(d))
        for kernel in options.kernels.split(",")
        for d in options.head_dims.split(",")
    ]
    start = time.time()
    jobs = [(*row, tiles) for row in rows_of for tiles in candidates(*row)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        reasons = dict(zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True))
    print(f"compiled {len(jobs)} candidates in {time.time() - start:.0f} s", flush=True)
    rows = []
    for kernel, head_dim in rows_of:
        tensors = inputs(head_dim)
        expected = runner(kernel, inputs(head_dim, 1024), cases(kernel)[1])()
        for tiles in candidates(kernel, head_dim):
            reason = reasons[kernel, head_dim, tiles]
            error = float("inf") if reason else wrong(kernel, head_dim, tiles, expected)
            if reason or error > 1e-2:
                print(
                    f"{kernel} {head_dim} {tuple(tiles)}: {reason or f'wrong, error {error}'}",
                    flush=True,
                )
                continue
            measured = [measure(kernel, head_dim, tiles, mask, tensors) for mask in cases(kernel)]
            rows += measured
            rates = " ".join(f"{row['tflops']:6.0f}" for row in measured)
            print(f"{kernel:20s} {head_dim:4d} {tuple(tiles)!s:34s} {rates}", flush=True)
    if rows:
        with open(options.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    print(f"{len(rows)} rows in {options.out}, {time.time() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
