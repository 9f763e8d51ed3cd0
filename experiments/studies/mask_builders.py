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

import experiments.lra.masks  # noqa: F401  registers some of the names
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

    from sparseflash.schedule.blocks import to_device

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
    """Return the mask of a name for n tokens: those of `SIZED`, or a text of `masks.parse`.

    A text may have SQUARE and VIDEO, which are canvases of n tokens, a power of two.
    """
    if name in SIZED:
        return SIZED[name](n)
    for word, axes in (("SQUARE", 2), ("VIDEO", 3)):
        if word in name:
            name = name.replace(word, str(canvas(n, axes)))
    return masks.parse(name)


def canvas(n: int, axes: int) -> tuple[int, ...]:
    """Return n = 2**m tokens as an image or a video, whose first axis is the shortest."""
    bits = n.bit_length() - 1
    if n != 1 << bits:
        raise ValueError(f"{n} tokens are no canvas: give a power of two")
    return tuple(1 << (bits + axis) // axes for axis in range(axes))


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


def rollouts(n: int) -> Any:
    """Return a tree of prompts, each with eight answers."""
    lengths = documents(n)
    ends = np.cumsum(lengths)
    last = np.minimum(np.arange(len(ends)) // 9 * 9 + 8, len(ends) - 1)
    leave = np.where(np.arange(len(ends)) % 9, ends, ends[last])
    return masks.prefix_tree(ends - lengths, leave)


def mesh(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cell of every token, and whether cells meet: 48 x 64 cells on a cylinder."""
    across, down = 64, 48
    cell = np.sort(np.random.default_rng(0).integers(0, across * down, n))
    y, x = np.divmod(np.arange(across * down), across)
    far = np.abs(x[:, None] - x)
    return cell, (np.abs(y[:, None] - y) <= 1) & (np.minimum(far, across - far) <= 1)


def cells(n: int) -> Any:
    """Return the mesh by the sizes of its cells and lists of neighbours."""
    cell, meets = mesh(n)
    neighbours = [np.flatnonzero(row).tolist() for row in meets]
    return masks.cells(np.bincount(cell, minlength=len(meets)), neighbours)


def mesh_by_formula(n: int) -> Any:
    """Return the mesh as a rule."""
    cell, meets = mesh(n)
    of, table = masks.table(cell), masks.table(meets.ravel())
    return masks.where(lambda q, k: table[of[q] * len(meets) + of[k]])


def offsets(n: int) -> np.ndarray:
    return np.append(0, np.cumsum(documents(n)))


SIZED: dict[str, Callable[[int], Any]] = {
    "documents & causal": lambda n: masks.documents(documents(n)) & masks.causal(),
    "neighborhood": neighborhood,
    "documents": lambda n: masks.documents(documents(n)),
    "documents_from_offsets": lambda n: masks.documents_from_offsets(offsets(n)),
    "documents_from_ids": lambda n: masks.documents_from_ids(
        np.repeat(np.arange(len(documents(n))) % 100, documents(n))
    ),
    "shared_prefix": lambda n: masks.shared_prefix(1000, documents(n)),
    "prefix_tree": rollouts,
    "hstu": lambda n: masks.hstu(documents(n), context=1),
    "strided(64) >> packed": lambda n: masks.strided(64) >> masks.packed(documents(n)),
    "local(256) >> permuted": lambda n: masks.local(256) >> masks.permuted(np.arange(n)[::-1]),
    "where: every sixth": lambda n: masks.where(lambda q, k: (q - k) % 24 < 6),
    "cells": cells,
    "where: mesh": mesh_by_formula,
}
# every name of the gallery at sizes of use; `SIZED` has the others
GALLERY = [
    name.strip()
    for name in """
dense(); causal(); local(256); sliding(4096); dilated(2048, 4); diagonals((0, 1024, 65536));
power_of_two(); power_of_two(64); log_sparse(); log_sparse(64); log_sparse(4096); strided(128);
strided(1024); strided(1024) | global_tokens(64); fixed(128, 8); fixed(128, 32, 4); sinks(64);
keys_at((0, 10000)); prefix_lm(1000); global_tokens(64); global_at((0, 10000)); global_rows(64);
last_rows(64); streaming(4, 4096); tri_shape(4, 4096, 64);
vertical_slash((0, 40, 1000), (0, 1, 64, 4096)); butterfly(128); butterfly(64);
butterfly(128, levels=4); pixelfly(128); random_blocks(0.01); random_blocks(0.01, block=64);
hubs(); hubs(block=64); random_regular(8); random_regular(8, 64); expander(8); bigbird(64, 3);
bigbird(128, 3); bigbird_compat(64, 3); longformer(512); etc_(256, 512); block_diagonal(1000);
block_causal(1000); block_diffusion(16); longnet(2048, 4); longnet(2048, 4, per_head=True);
local_2d(SQUARE, 8); local_2d(SQUARE, 8, norm='euclidean'); axial(SQUARE); axial(VIDEO);
neighborhood(SQUARE, 17); neighborhood(VIDEO, (5, 9, 9));
neighborhood(SQUARE, 7) | neighborhood(SQUARE, 7, dilation=4); sliding_tiles(SQUARE, 16, 3);
sliding_tiles(VIDEO, (4, 8, 8), 3); frame_causal(1560, 21, sinks=3); radial(256); radial(1560);
heads(local(256), butterfly(128)); lra_local(50); lra_local(50, interleaved=True);
lra_fixed(50, 10); lra_strided(50); lra_longformer(512); lra_bigbird(64, 3);
neighborhood(SQUARE, 17) >> tiled(SQUARE, 16); neighborhood(SQUARE, 17) >> morton(SQUARE);
neighborhood(SQUARE, 17) >> hilbert(SQUARE); sliding(4096) >> shift(1000);
local(1000) >> snap(128)
""".split(";")
]


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except ValueError as refusal:
        print(json.dumps({"status": f"unsupported: {refusal}"}))
    except MemoryError:
        print(json.dumps({"status": "out of memory"}))
