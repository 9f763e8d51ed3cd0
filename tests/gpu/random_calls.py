"""Check random calls against the float64 oracle: output, LSE and gradients.

    python -m tests.gpu.random_calls --cases 1500 --jobs 12
    python -m tests.gpu.random_calls --cases 100 --again 100

Masks are composed at random, heads share keys or not, values have a width of their own, and memory
that nobody has written holds NaN. Some calls have sinks or soft-capping. What the kernels
for Hopper take runs there, all else on the portable ones. One call in four runs on a stream of its
own, and one in four runs again from a CUDA graph, with the same bits. With --again, each call is
also launched that many times without waiting between the launches. These must give the same bits,
apart from gradients by atomics, which may differ by a rounding.

A process in which nothing ends for --patience seconds is killed, and its seeds are named. Under
compute-sanitizer, run a few cases in one process:
    compute-sanitizer --tool memcheck python -m tests.gpu.random_calls --cases 20 --jobs 0
"""

import argparse
import faulthandler
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

import masks
import sparseflash
from sparseflash.testing import relative_error
from tests.attention_cases import DTYPES, LOW, Case, build, check, draw, gradients, random_mask
from tests.gpu_calls import IS_HOPPER, RESULTS, captured
from tests.poison import poisoned_empty

HEAD_DIMS = (4, 8, 16, 20, 32, 40, 64, 64, 72, 80, 96, 104, 128, 128, 160, 192, 256)
TERMS = (*[(False, 0.0)] * 4, *[(True, 0.0)] * 2, (False, 1.5), (True, 30.0))  # sinks, caps
CHUNK = 10  # cases that a process checks at a time


def random_call(seed: int, longest: int) -> Case:
    rng = random.Random(seed)

    def length() -> int:
        return rng.randrange(1, rng.choice((300, 1500, longest)) + 1)

    n_q = length()
    n_k = rng.choice((n_q, n_q, length()))
    kv_heads = 1 if max(n_q, n_k) > 1500 else rng.choice((1, 2))
    case = Case(
        n_q=n_q,
        n_k=n_k,
        head_dim=rng.choice(HEAD_DIMS),
        v_head_dim=rng.choice((None, None, None, rng.choice(HEAD_DIMS))),
        dtype=rng.choice((*DTYPES, *LOW, torch.bfloat16)),
        batch=1 if max(n_q, n_k) > 1500 else rng.choice((1, 2)),
        heads=kv_heads * rng.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        block_size=(rng.choice((16, 32, 64, 128, 256)), rng.choice((16, 32, 64, 128, 256))),
        dropout_p=rng.choice((0.0, 0.0, 0.0, 0.2)),
        lse_gradient=rng.random() < 0.5,
        token_major=rng.random() < 0.5,
        scale=rng.choice((None, None, 0.3)),
        deterministic=rng.random() < 0.3,
        max_scores=rng.random() < 0.3,
        seed=seed,
    )
    case = replace(case, mask=_composed(rng, case))
    sink, softcap = rng.choice(TERMS)
    return replace(case, sink=sink, softcap=softcap)


def _composed(rng: random.Random, case: Case) -> masks.Mask | None:
    mask, other = random_mask(rng, case), random_mask(rng, case)
    if mask is None or other is None:
        return mask
    return rng.choice((mask, mask | other, mask & other, mask & ~other))


class Runner:
    """One call without sinks and caps, ready to be launched."""

    def __init__(self, case: Case, backend: str):
        self.case, self.backend = case, backend
        device = "cpu" if backend == "cpu" else "cuda"
        self.qkv, self.dout, self.dlse = draw(case, device)
        self.blocks, _ = build(case, device)
        self.seed = torch.tensor([case.seed + 2**40], device=device)

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

    def repeat(self, times: int) -> None:
        """Launch without waiting, and compare with the first results."""
        for deterministic in (False, True):
            first = self.launch(deterministic=deterministic)
            for results in [self.launch(deterministic=deterministic) for _ in range(times)]:
                compare(results, first, deterministic=deterministic)


def compare(results: list[Tensor], first: list[Tensor], *, deterministic: bool) -> None:
    exact = len(RESULTS) if deterministic else 2  # out and LSE always have the same bits
    for i, (name, got, want) in enumerate(zip(RESULTS, results, first, strict=True)):
        if i < exact:
            assert torch.equal(got, want), f"{name} differs by {relative_error(got, want):.3g}"
        else:
            error, limit = relative_error(got, want), torch.finfo(got.dtype).eps
            small = (got - want).abs().max() < 1e-2  # what cancels to almost nothing
            assert error < limit or small, f"{name} differs by {error:.3g}"


def check_call(seed: int, longest: int, device: str, again: int = 0) -> None:
    case = random_call(seed, longest)
    on_gpu = device == "cuda"
    backend = "triton" if on_gpu else "cpu"
    copied = case.dtype in LOW and not (case.head_dim % 8 or case.width % 8)
    if on_gpu and IS_HOPPER and copied and not case.softcap:
        backend = "hopper"
    aside = on_gpu and seed % 4 == 1
    with torch.cuda.stream(torch.cuda.Stream()) if aside else nullcontext():
        check(case, backend, device, slack=2.0)
    runner = Runner(case, backend)
    if on_gpu and seed % 4 == 2:
        wanted = runner.launch(deterministic=True)
        graph, results = captured(lambda: runner.launch(deterministic=True))
        graph.replay()
        assert all(map(torch.equal, results, wanted)), "a CUDA graph gives other bits"
    if again:
        runner.repeat(again)


def check_calls(
    seeds: Sequence[int], longest: int, device: str, again: int = 0, patience: float = 600
) -> tuple[int, list[str]]:
    """How many ran, and what went wrong."""
    ran, wrong = 0, []
    with poisoned_empty():
        for seed in seeds:
            faulthandler.dump_traceback_later(patience, exit=True)
            try:
                check_call(seed, longest, device, again)
                ran += 1
            except pytest.skip.Exception:
                pass
            except Exception as error:
                case, kind = random_call(seed, longest), type(error).__name__
                wrong.append(f"{case}: {kind}: {str(_cause(error))[-300:]}")
            faulthandler.cancel_dump_traceback_later()
    if device == "cuda":
        torch.cuda.empty_cache()
    return ran, wrong


def _cause(error: BaseException) -> BaseException:
    """The first of a chain: where Triton does not compile a function, callers' errors follow."""
    return _cause(error.__cause__) if error.__cause__ else error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--longest", type=int, default=5000, help="tokens")
    parser.add_argument("--again", type=int, default=0, help="launches of each case")
    parser.add_argument("--jobs", type=int, default=4, help="processes; 0: this one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--patience", type=float, default=600, help="seconds until it is a hang")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.cases)
    arguments = options.longest, options.device, options.again, options.patience
    ran, done, wrong = 0, 0, []
    start = time.monotonic()
    if not options.jobs:
        ran, wrong = check_calls(seeds, *arguments)
        print("\n".join(wrong), file=sys.stderr)
    else:
        chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(check_calls, chunk, *arguments): chunk for chunk in chunks}
            for future in as_completed(waiting):
                try:
                    found, told = future.result()
                except Exception as error:  # the process is gone
                    found, told = 0, [f"{waiting[future]}: {error}"]
                ran, done, wrong = ran + found, done + len(waiting[future]), wrong + told
                for text in told:
                    print(text, file=sys.stderr, flush=True)
                print(f"{done} cases, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{ran} right, {len(wrong)} wrong, {len(seeds)} in all", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
