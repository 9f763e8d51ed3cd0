"""Named grids: cases that are compared with one another, and who is measured at each."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from experiments.bench import fa4
from experiments.bench.cases import CAUSAL, DENSE, Case

DENSITIES = (0.5, 0.25, 0.125, 0.0625, 0.03125)


class Part(NamedTuple):
    cases: tuple[Case, ...]
    providers: tuple[str, ...]


def limits(device: torch.device) -> list[Part]:
    """What shows where a kernel stands: against the device, the peers and its own dense speed.

    Random masks against density, dense and causal; uneven masks beside even ones of the same
    density; small blocks; few heads of 32; very long sequences. On a CPU the same in small.
    """
    big = device.type == "cuda"
    own = ("hopper", "hopper_deterministic") if big else ("cpu",)
    block_sparse = (*own, *(("fa4",) if big and not fa4.missing() else ()))
    peers = (*block_sparse, *(("flex",) if big else ()))
    dense_peers = (*peers, "sdpa_cudnn" if big else "sdpa")
    if big:
        wide = Case(DENSE, 2, 16, 16, 16384, 16384, 128, "bfloat16", 128, 128)
        narrow = replace(wide, heads=32, kv_heads=32, head_dim=64)
        thin = replace(wide, batch=8, heads=2, kv_heads=2, head_dim=32)
    else:
        wide = Case(DENSE, 1, 2, 2, 2048, 2048, 32, "float32", 128, 128)
        narrow = replace(wide, head_dim=16)
        thin = replace(wide, heads=1, kv_heads=1)
    parts = []
    for shape in (wide, narrow):
        masks = (DENSE, CAUSAL, _random(1.0, 128), *(_random(d, 128) for d in DENSITIES))
        parts.append(Part(_cases(shape, masks), dense_peers))
    parts.append(Part(uneven(wide), block_sparse))
    parts += [
        Part(_cases(shape, [_random(d, block) for d in DENSITIES[:4]], block), own[:1])
        for shape in (wide, narrow)
        for block in (64, 32, 16)
    ]
    parts.append(Part(_cases(thin, (DENSE, _random(0.0625, 128))), dense_peers))
    return [*parts, *long(wide, own, block_sparse, big)]


def uneven(shape: Case) -> tuple[Case, ...]:
    """Masks with rows (and columns) of unequal length, each with an even one like it."""
    masks = (
        "bigbird(128, 3, per_head=False)",
        "butterfly(128) | global_tokens(64)",
        "local(1024) & causal()",
    )
    cases = []
    for case in _cases(shape, masks):
        even = _random(round(case.density, 4), shape.block_q)
        cases += [case, replace(case, mask=even)]
    return tuple(cases)


def long(shape: Case, own: tuple[str, ...], block_sparse: tuple[str, ...], big: bool) -> list[Part]:
    """Sequences that only a sparse mask makes possible, below one percent of the blocks."""
    structured = "local(512) | butterfly(128) | global_tokens(64)"
    lengths = {262144: (8, 0.005), 1048576: (2, 0.002)} if big else {8192: (1, 0.03)}
    parts = []
    for n, (heads, density) in lengths.items():
        base = replace(shape, batch=1, heads=heads, kv_heads=heads, n_q=n, n_k=n)
        parts.append(Part(_cases(base, [_random(density, 128)]), block_sparse))
        parts.append(Part(_cases(base, [structured]), own))
    return parts


def _cases(shape: Case, masks, block: int | None = None) -> tuple[Case, ...]:
    sizes = {} if block is None else {"block_q": block, "block_k": block}
    dense = {"block_q": 0, "block_k": 0}
    return tuple(replace(shape, mask=mask, **(dense if mask == DENSE else sizes)) for mask in masks)


def _random(density: float, block: int) -> str:
    """The canonical text of a random mask, equally many blocks in every row."""
    if block == 128:
        return f"random_blocks({density})"
    return f"random_blocks({density}, block={block})"


GRIDS: dict[str, Callable[[torch.device], list[Part]]] = {"limits": limits}
