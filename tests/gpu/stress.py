"""Launch the kernels of a backend again and again, on random problems, and compare every result.

    python -m tests.gpu.stress --launches 10000 --seed 0

A problem is launched in bursts, without waiting between the calls, and memory that nobody has
written holds NaN. The first results are held against the float64 oracle; later ones must have the
same bits (output, LSE, gradients with deterministic=True) or differ by less than a rounding
(gradients by atomics). A process beside this one ends it, naming the case, where nothing was
finished for --patience seconds: a hang.

With few launches it is what to run under compute-sanitizer:
    compute-sanitizer --tool memcheck python -m tests.gpu.stress --launches 20 --jobs 0
`python -m tests.gpu.sanitizer` runs all its tools over calls of every kind.
"""

import argparse
import faulthandler
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor

import masks
import sparseflash
from sparseflash.dropout import keep_mask
from sparseflash.testing import oracle, relative_error
from tests.attention_cases import Case, build, draw, gradients, plain, random_array
from tests.gpu_calls import RESULTS
from tests.poison import poisoned_empty
from tests.processes import Watch

BURST = 8


@dataclass(frozen=True)
class Variant:
    """What other kernels are compiled for; all else of a problem is an argument of them."""

    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    block_size: tuple[int, int]
    kind: str  # of the mask
    dropout_p: float
    grouped: bool


KINDS = ("dense", "blocks", "structured", "array", "long")


def variants(rng: random.Random, count: int) -> list[Variant]:
    """Random ones, each kind of mask and the usual head dims among the first."""
    found = []
    for i in range(count):
        head_dim = (128, 64, 128, 64, 32)[i] if i < 5 else rng.choice([32, 64, 80, 128, 192, 256])
        found.append(
            Variant(
                head_dim=head_dim,
                v_head_dim=head_dim if i < 5 else rng.choice([head_dim, head_dim, 64]),
                dtype=rng.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
                block_size=(128, 128)
                if i < 3
                else (rng.choice([16, 64, 96, 128, 256]), rng.choice([16, 32, 64, 128])),
                kind=("blocks", "structured", "dense", "array", "long")[i % 5],
                dropout_p=0.2 if i % 6 == 5 else 0.0,
                grouped=rng.random() < 0.4,
            )
        )
    return found


def problem(variant: Variant, rng: random.Random, seed: int) -> Case:
    """A random problem that runs the kernels of a variant."""
    n_q = rng.choice([rng.randrange(1, 300), rng.randrange(300, 1500), 128 * rng.randrange(1, 12)])
    kv_heads = rng.choice([1, 2, 3])
    group = rng.choice([2, 4]) if variant.grouped else 1
    case = Case(
        n_q=n_q,
        n_k=rng.choice([n_q, n_q, rng.randrange(1, 1500)]),
        head_dim=variant.head_dim,
        v_head_dim=variant.v_head_dim,
        dtype=variant.dtype,
        batch=rng.choice([1, 2]),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        block_size=variant.block_size,
        dropout_p=variant.dropout_p,
        lse_gradient=rng.random() < 0.3,
        token_major=rng.random() < 0.5,
        seed=seed,
    )
    if variant.kind == "long":
        case = replace(case, n_q=rng.randrange(2500, 3500), n_k=rng.randrange(2500, 3500), batch=1,
                       heads=group, kv_heads=1)  # fmt: skip
    return replace(case, mask=random_mask(variant.kind, rng, case))


def random_mask(kind: str, rng: random.Random, case: Case) -> masks.Mask | None:
    if kind == "dense":
        return None
    if kind == "long":
        return masks.local(rng.randrange(30)) | masks.global_tokens(rng.randrange(1, 100))
    if kind == "blocks":  # full ones, but for those that stick out of the end
        block, density = max(case.block_size), rng.choice([0.05, 0.3, 0.9])
        return masks.random_blocks(density, block=block, seed=rng.randrange(99), per_head=True)
    if kind == "structured":
        mask = masks.local(rng.randrange(90)) | masks.butterfly(32) | masks.strided(64)
        return mask & masks.causal() if rng.random() < 0.5 else mask
    outer = rng.choice([(), (case.heads,), (case.batch, 1)])
    return masks.mask_from(random_array(rng, (*outer, case.n_q, case.n_k), case.block_size))


class Runner:
    """One problem, ready to be launched."""

    def __init__(self, case: Case, backend: str):
        self.case, self.backend = case, backend
        device = "cpu" if backend == "cpu" else "cuda"
        self.qkv, self.dout, self.dlse = draw(case, device)
        self.blocks, self.dense = build(case, device)
        self.seed = torch.tensor([case.seed + 2**40], device=device)
        self.scale = case.head_dim**-0.5

    def launch(self, *, deterministic: bool) -> list[Tensor]:
        # above head dim 128 hopper has no deterministic backward: "auto" takes its forward
        wide = self.backend == "hopper" and max(self.case.head_dim, self.case.width) > 128
        backend = "auto" if wide and deterministic else self.backend
        q, k, v = inputs = [t.detach().requires_grad_() for t in self.qkv]
        out, lse = sparseflash.attention(
            q, k, v, self.blocks, dropout_p=self.case.dropout_p, seed=self.seed,
            return_lse=True, deterministic=deterministic, backend=backend,
        )  # fmt: skip
        grads = gradients(out, lse, self.dout, self.dlse, inputs)
        return [out.detach(), lse.detach(), *grads]

    def check(self, results: list[Tensor]) -> None:
        """Against the oracle, with the error of plain torch in the same precision as a measure."""
        case, keep = self.case, None
        if case.dropout_p:
            shape = (case.batch, case.heads, case.n_q, case.n_k)
            keep = keep_mask(self.seed, *shape, case.dropout_p)

        def run(function, inputs):
            inputs = [t.detach().requires_grad_() for t in inputs]
            terms = sparseflash.Terms()
            out, lse = function(*inputs, self.dense, self.scale, keep, case.dropout_p, terms)
            return out, lse, *gradients(out, lse, self.dout, self.dlse, inputs)

        expected = run(oracle, [t.double() for t in self.qkv])
        same = run(plain, self.qkv)
        for name, got, want, near in zip(RESULTS, results, expected, same, strict=True):
            error = relative_error(got, want)
            # twice, and a rounding: of a few numbers one error can be the larger by chance
            limit = 2 * relative_error(near, want) + torch.finfo(got.dtype).eps
            if name in ("dq", "dk") and case.n_k <= 4:
                assert got.isfinite().all(), name  # differences of nearly equal terms
            else:
                assert error <= limit, f"{name}: relative error {error:.3g} above {limit:.3g}"


def compare(results: list[Tensor], first: list[Tensor], *, deterministic: bool) -> None:
    exact = len(RESULTS) if deterministic else 2  # out and LSE always have the same bits
    for i, (name, got, want) in enumerate(zip(RESULTS, results, first, strict=True)):
        if i < exact:
            assert torch.equal(got, want), f"{name} differs by {relative_error(got, want):.3g}"
        else:
            error, limit = relative_error(got, want), torch.finfo(got.dtype).eps
            small = (got - want).abs().max() < 1e-2  # what cancels to almost nothing
            assert error < limit or small, f"{name} differs by {error:.3g}"


def bursts(variant_list: list[Variant], seed: int, backend: str) -> Iterator[tuple[str, int]]:
    """Problems without end, variant by variant; yields what is about to run, and its launches."""
    number = 0
    while True:
        for variant in variant_list:
            rng = random.Random(f"{seed} {number}")
            case = problem(variant, rng, number)
            number += 1
            yield f"{number}: {case}", 0
            runner = Runner(case, backend)
            first = {d: runner.launch(deterministic=d) for d in (False, True)}
            for results in first.values():
                runner.check(results)
            yield f"{number}: {case}", 4  # two forward, two backward
            for deterministic, expected in first.items():
                again = [runner.launch(deterministic=deterministic) for _ in range(BURST)]
                for results in again:
                    compare(results, expected, deterministic=deterministic)
                yield f"{number}: {case} deterministic={deterministic}", 2 * BURST


def warm(variant: Variant, backend: str, patience: float) -> None:
    """Put the kernels of a variant into the cache on disk; ends its process where it hangs."""
    faulthandler.dump_traceback_later(patience, exit=True)
    for seed in range(2):  # with parts and without, ragged and not
        runner = Runner(problem(variant, random.Random(seed), seed), backend)
        for deterministic in (False, True):
            runner.launch(deterministic=deterministic)[0].sum().item()
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--launches", type=int, default=10_000, help="forward or backward calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--variants", type=int, default=8, help="sets of compiled kernels")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile; 0: none")
    parser.add_argument("--patience", type=float, default=180, help="seconds until it is a hang")
    options = parser.parse_args()

    chosen = variants(random.Random(options.seed), options.variants)
    watch = Watch(options.patience)
    start = time.monotonic()
    if options.jobs:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            arguments = options.backend, options.patience
            for done in as_completed([pool.submit(warm, v, *arguments) for v in chosen]):
                done.result()
                watch.now("compilation")
        print(f"compiled {len(chosen)} variants in {time.monotonic() - start:.0f} s", flush=True)
    start = shown = time.monotonic()
    launches = 0
    with poisoned_empty():
        for text, count in bursts(chosen, options.seed, options.backend):
            launches += count
            watch.now(f"after {launches} launches, problem {text}")
            if time.monotonic() - shown > 5 or launches >= options.launches:
                shown = time.monotonic()
                print(f"{launches} launches, {shown - start:.0f} s, problem {text}", flush=True)
            if launches >= options.launches:
                break
    watch.end()
    print(f"OK: {launches} launches in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
