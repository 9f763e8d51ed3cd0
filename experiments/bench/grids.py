"""Grids of cases: speed against density and length, and the named grids."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

import masks
from experiments.bench.cases import DENSE, LAYOUTS, Case
from experiments.bench.providers import installed
from experiments.common.config import CONF
from experiments.common.files import read_yaml

DENSITIES = (0.5, 0.25, 0.125, 0.0625, 0.03125)


def make_grid(
    device: str,
    mask: Sequence[str] | None = None,
    seq_len: Sequence[int] | None = None,
    block_size: Sequence[int] | None = None,
    **shape: int | str | None,
) -> list[Case]:
    """Return cases of speed against density, and of time against length, which suit the device.

    Given values take the place of the defaults. A mask or a length takes the sweep over lengths.
    shape: batch, heads, kv_heads, n_q, head_dim, v_dim, dtype, layout; None leaves the default,
    and as many queries as keys.
    Raises ValueError for values that no case can have.
    """
    if torch.device(device).type == "cuda":
        first = Case(DENSE, 2, 16, 16, 16384, 16384, 128, "bfloat16", 128, 128)
        shapes = [first, replace(first, heads=32, kv_heads=32, head_dim=64)]
        structured, densities = "local:256+butterfly:128+global:128", (1, *DENSITIES)
        sweep = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    else:
        shapes = [Case(DENSE, 1, 4, 4, 4096, 4096, 64, "float32", 64, 64)]
        structured, densities = "local:256+butterfly:64+global:64", (1, *DENSITIES[:4])
        sweep = (512, 1024, 2048, 4096)
    usual = [DENSE, *(f"random:{d}:block={shapes[0].block_k}" for d in densities), structured]
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
    if block_size is not None:
        if len(block_size) > 2:
            raise ValueError(f"block_size={block_size}: give one size, or [block_q,block_k]")
        given |= {"block_q": block_size[0], "block_k": block_size[-1]}
    shapes = [replace(s, **given) for s in shapes]
    lengths = seq_len or [shapes[0].n_k]
    lengthened = [replace(s, n_q=given.get("n_q", n), n_k=n) for s in shapes for n in lengths]
    for case in lengthened:
        case.check()
    found = [case for s in lengthened for case in _cases(s, usual if mask is None else mask)]
    if mask is None and seq_len is None:
        longer = [replace(shapes[0], n_q=given.get("n_q", n), n_k=n) for n in sweep]
        found += [case for s in longer for case in _cases(s, (DENSE, structured))]
    return list(dict.fromkeys(found))


def read_grid(name: str, device: torch.device) -> list[tuple[Case, tuple[str, ...]]]:
    """Return the cases of conf/grids/NAME.yaml with their providers, as far as installed.

    What a part there does not say: batch 1, head dim 128, bfloat16, blocks of 128, (B, H, N, D).
    """
    if device.type != "cuda":
        raise ValueError(f"grid={name} needs a GPU, and the device is {device}: leave it out")
    found = []
    for part in read_yaml(CONF / "grids" / f"{name}.yaml", "a grid has parts")["parts"]:
        n, heads, block = part["n"], part["heads"], part.get("block", 128)
        sizes = part.get("batch", 1), heads, part.get("kv_heads", heads), n, n
        shape = Case(DENSE, *sizes, part.get("head_dim", 128), "bfloat16", block, block)
        shape = replace(shape, layout=part.get("layout", LAYOUTS[0]))
        providers = installed(*part["providers"])
        found += [(case, providers) for case in _cases(shape, part["masks"])]
    return found


GRIDS = sorted(path.stem for path in (CONF / "grids").glob("*.yaml"))


def _cases(shape: Case, texts: Iterable[str]) -> list[Case]:
    """Return a case for each mask, with its own text: one mask has one name in every row."""
    dense = replace(shape, mask=DENSE, block_q=0, block_k=0)  # which has no blocks
    return [
        dense if text == DENSE else replace(shape, mask=str(masks.parse(text))) for text in texts
    ]
