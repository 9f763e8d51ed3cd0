"""The builders of the study mask_build, each alone in a process that has done nothing before.

    python -m experiments.studies.mask_builders '{"builder": "masks", "mask": "local:256", ...}'

prints a JSON object. torch is imported only where the builder needs it, so that the memory is that
of the builder.
"""

import importlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import masks

MIB = 2**20
MEAN_DOCUMENT = 2000  # tokens
KERNEL = 17  # of the neighbourhood, on a square image


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Build the mask of the case, first once and then for `seconds`: times, memory and counts."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if case["device"] == "cpu":  # CUDA reserves more addresses than there is memory
        resource.setrlimit(resource.RLIMIT_AS, (case["bytes"], case["bytes"]))
    build, counts = BUILDERS[case["builder"]](case)
    # NumPy in one thread is not slower for what else the machine does
    clock = time.process_time if case["builder"] in ("masks", "where") else time.perf_counter
    before = peak_mib()
    start = clock()
    built = build()
    first = 1000 * (clock() - start)
    found = {"ms_first": first, "import_mib": before, "peak_mib": peak_mib()} | counts(built)
    del built
    times: list[float] = []
    while len(times) < 3 or sum(times) < 1000 * case["seconds"]:
        if times and times[0] > 10_000 * case["seconds"]:
            break  # once is enough of a slow one
        start = clock()
        build()
        times.append(1000 * (clock() - start))
    at = np.quantile(times, (0.5, 0.2, 0.8), method="nearest").tolist()
    return found | dict(zip(("ms_median", "ms_p20", "ms_p80"), at, strict=True))


def peak_mib() -> float:
    """Largest resident memory of this process so far.

    Not `ru_maxrss` where it can be helped: that is inherited from the process that started this.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def own(case: dict[str, Any]):
    """masks: expression -> BlockMask, without the cache."""
    return builder(case, make(case["mask"], case["seq_len"]))


def where(case: dict[str, Any]):
    """masks.where: the formula of the mask -> BlockMask, without the cache."""
    rule = formula(case["mask"], case["seq_len"], masks.table, np.clip)
    return builder(case, masks.where(rule))


def builder(case: dict[str, Any], mask: Any):
    """Return what builds a mask without the cache, and what is counted of the result."""
    n, block = case["seq_len"], case["block"]
    cache = importlib.import_module("masks.build").cache

    heads = 1 if mask.period == 0 else None  # a head of many, or as many as repeat

    def build():
        cache.clear()
        return mask.build(n, block_size=block, heads=heads)

    def counts(blocks):
        found = {"runs": len(blocks.starts), "tiles": len(blocks.bits), "nnz": blocks.nnz}
        return found | {"density": blocks.density}

    return build, counts


def schedule(case: dict[str, Any]):
    """sparseflash: BlockMask -> CSR and CSC on the device, without the cache."""
    import torch

    from sparseflash.schedule import to_device

    build_blocks, counts = own(case)
    blocks, device = build_blocks(), torch.device(case["device"])

    def build():
        result = to_device(blocks, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result

    return build, lambda _: counts(blocks) | device_memory(device)


def flex(case: dict[str, Any], *, compiled: bool = False):
    """FlexAttention's create_block_mask, as it is or compiled, given the formula of the mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    device, n = torch.device(case["device"]), case["seq_len"]

    def table(data: Any) -> Any:
        return torch.tensor(data, device=device)

    rule = formula(case["mask"], n, table, torch.clamp)
    create = torch.compile(create_block_mask) if compiled else create_block_mask

    def build():
        result = create(
            lambda b, h, q, k: rule(q, k), None, None, n, n, device=device, BLOCK_SIZE=case["block"]
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result

    def counts(result):
        nnz = int(result.kv_num_blocks.sum() + result.full_kv_num_blocks.sum())
        return {"nnz": nnz} | device_memory(device)

    return build, counts


def device_memory(device: Any) -> dict[str, float]:
    import torch

    if device.type != "cuda":
        return {}
    return {"device_mib": torch.cuda.max_memory_allocated(device) / MIB}


BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "masks": own,
    "where": where,
    "flex": flex,
    "flex_compiled": partial(flex, compiled=True),
    "schedule": schedule,
}

# ---- masks by name, and their formulas


def make(name: str, n: int) -> Any:
    """Return the mask of a name for n tokens: those of `SIZED`, or a text of `masks.parse`."""
    return SIZED[name](n) if name in SIZED else masks.parse(name)


def neighborhood(n: int) -> Any:
    """Return the neighbourhood on a square image."""
    side = math.isqrt(n)
    if side * side != n:
        raise ValueError(f"{n} tokens are no square image: give a square number, as 16384")
    return masks.neighborhood((side, side), KERNEL)


def documents(n: int) -> list[int]:
    """Lengths of documents, exponentially distributed, that n tokens are packed with."""
    drawn = np.random.default_rng(0).exponential(MEAN_DOCUMENT, n // 100 + 100)
    ends = np.minimum(np.cumsum(1 + drawn.astype(np.int64)), n)
    ends = ends[: np.searchsorted(ends, n) + 1]
    return np.diff(ends, prepend=0).tolist()


def structured(q: Any, k: Any) -> Any:
    """local:256+butterfly:128+global:64"""
    strides = (q // 128) ^ (k // 128)
    return (abs(q - k) <= 256) | (strides & (strides - 1) == 0) | (q < 64) | (k < 64)


FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "causal": lambda q, k: q >= k,
    "local:256": lambda q, k: abs(q - k) <= 256,
    "dilated:2048:4": lambda q, k: (abs(q - k) <= 2048) & ((q - k) % 4 == 0),
    "local:256+butterfly:128+global:64": structured,
    "(local:256+butterfly:128+global:64)*causal": lambda q, k: structured(q, k) & (q >= k),
}


def formula(
    name: str, n: int, table: Callable[[Any], Any], clip: Callable[[Any, int, int], Any]
) -> Callable[[Any, Any], Any]:
    """Whether query q sees key k, in operators that arrays, tensors and `masks.where` all have.

    `table` makes data that q and k can index. Raises ValueError for a mask without a formula.
    """
    if name in FORMULAS:
        return FORMULAS[name]
    if name == "documents & causal":
        lengths = documents(n)
        number = table(np.repeat(np.arange(len(lengths)), lengths))
        return lambda q, k: (number[q] == number[k]) & (q >= k)
    if name == "neighborhood":
        side = math.isqrt(n)

        def near(q: Any, k: Any) -> Any:
            start = clip(q - KERNEL // 2, 0, side - KERNEL)
            return (k >= start) & (k < start + KERNEL)

        return lambda q, k: near(q // side, k // side) & near(q % side, k % side)
    raise ValueError(f"no formula for {name}, only for {', '.join([*FORMULAS, *SIZED])}")


SIZED: dict[str, Callable[[int], Any]] = {
    "documents & causal": lambda n: masks.documents(documents(n)) & masks.causal(),
    "neighborhood": neighborhood,
}


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except ValueError as refusal:
        print(json.dumps({"status": f"unsupported: {refusal}"}))
    except MemoryError:
        print(json.dumps({"status": "out of memory"}))
