"""Check random calls against the float64 oracle: output, LSE and gradients.

    python -m tests.gpu.fuzz --cases 1500 --jobs 12

Masks are composed at random, heads share keys or not, values have a width of their own, and memory
that nobody has written holds NaN. Some calls have sinks, soft-capping or slopes. What the kernels
for Hopper take runs there, all else on the portable ones. One call in four runs on a stream of its
own, and one in four runs again from a CUDA graph, with the same bits.
"""

import argparse
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

import masks
from tests.attention_cases import DTYPES, LOW, Case, check, random_mask
from tests.gpu.stress import Runner
from tests.gpu_calls import IS_HOPPER, captured
from tests.poison import poisoned_empty

HEAD_DIMS = (4, 8, 16, 20, 32, 40, 64, 64, 72, 80, 96, 104, 128, 128, 160, 192, 256)
TERMS = ((), (), (), ("sink",), ("sink",), ("softcap",), ("slopes",), ("slopes", "softcap"))
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
    return replace(case, terms=rng.choice(TERMS))


def _composed(rng: random.Random, case: Case) -> masks.Mask | None:
    mask, other = random_mask(rng, case), random_mask(rng, case)
    if mask is None or other is None:
        return mask
    return rng.choice((mask, mask | other, mask & other, mask & ~other))


def check_call(seed: int, longest: int, device: str) -> None:
    case = random_call(seed, longest)
    on_gpu = device == "cuda"
    backend = "triton" if on_gpu else "cpu"
    copied = case.dtype in LOW and not (case.head_dim % 8 or case.width % 8)
    if on_gpu and IS_HOPPER and copied and not {*case.terms} - {"sink"}:
        backend = "hopper"
    aside = on_gpu and seed % 4 == 1
    with torch.cuda.stream(torch.cuda.Stream()) if aside else nullcontext():
        check(case, backend, device, slack=2.0)
    if on_gpu and seed % 4 == 2:
        runner = Runner(case, backend)
        wanted = runner.launch(deterministic=True)
        graph, results = captured(lambda: runner.launch(deterministic=True))
        graph.replay()
        assert all(map(torch.equal, results, wanted)), "a CUDA graph gives other bits"


def check_calls(seeds: Sequence[int], longest: int, device: str) -> tuple[int, list[str]]:
    """How many ran, and what went wrong."""
    ran, wrong = 0, []
    with poisoned_empty():
        for seed in seeds:
            try:
                check_call(seed, longest, device)
                ran += 1
            except pytest.skip.Exception:
                pass
            except Exception as error:  # all of them are told
                case, kind = random_call(seed, longest), type(error).__name__
                wrong.append(f"{case}: {kind}: {str(_cause(error))[-300:]}")
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
    parser.add_argument("--jobs", type=int, default=4, help="processes")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.cases)
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    ran, done, wrong = 0, 0, []
    start = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        arguments = options.longest, options.device
        waiting = {pool.submit(check_calls, chunk, *arguments): chunk for chunk in chunks}
        for future in as_completed(waiting):
            ran_here, wrong_here = future.result()
            ran, done, wrong = ran + ran_here, done + len(waiting[future]), wrong + wrong_here
            for text in wrong_here:
                print(text, flush=True)
            print(f"{done} cases, {time.monotonic() - start:.0f} s", flush=True)
    refused = len(seeds) - ran - len(wrong)
    print(f"{ran} right, {len(wrong)} wrong, {refused} refused", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
