"""Grids of cases: speed against density and length, and the named grids."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

import masks
from experiments.bench.cases import CAUSAL, DENSE, LAYOUTS, Case
from experiments.bench.providers import installed

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
    shape: batch, heads, kv_heads, head_dim, v_dim, dtype, layout; None leaves the default.
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
    usual = [DENSE, *_random_masks(shapes[0].block_k, *densities), structured]
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
    if block_size is not None:
        if len(block_size) > 2:
            raise ValueError(f"block_size={block_size}: give one size, or [block_q,block_k]")
        given |= {"block_q": block_size[0], "block_k": block_size[-1]}
    shapes = [replace(s, **given) for s in shapes]
    lengthened = [replace(s, n_q=n, n_k=n) for s in shapes for n in seq_len or [s.n_q]]
    for case in lengthened:
        case.check()
    found = [case for s in lengthened for case in _cases(s, usual if mask is None else mask)]
    if mask is None and seq_len is None:
        longer = [replace(shapes[0], n_q=n, n_k=n) for n in sweep]
        found += [case for s in longer for case in _cases(s, (DENSE, structured))]
    return list(dict.fromkeys(found))


class Part(NamedTuple):
    """Cases of a named grid, and the providers that are measured at each."""

    cases: tuple[Case, ...]
    providers: tuple[str, ...]


def page(device: torch.device) -> list[Part]:
    """Return what the page of speed shows: speed against density, every peer at its best, both
    layouts.

    Each peer runs its own kernel for a mask where it has one. Random masks stand beside structured
    ones where only a sparse mask is possible, below one percent of the blocks.
    """
    _on_a_gpu("page", device)
    peers = installed("fa4", "fa4_window", "fa4_varlen", "cudnn_blocks", "cudnn_flex")
    blocks, dense = ("hopper", "hopper_deterministic", *peers), "sdpa_cudnn"
    flex = ("flex", "flex_autotuned")  # the default is at times the faster one
    n = 16384
    first = Case(DENSE, 2, 16, 16, n, n, 128, "bfloat16", 128, 128)
    special = [f"sliding({n // 16 + 1})", f"local({n // 32})", *_packed(n)]
    parts = []
    for shape in (first, replace(first, heads=32, kv_heads=32, head_dim=64)):
        by_density = _cases(shape, [DENSE, *_random_masks(128, 1.0, *DENSITIES)])
        parts.append(Part(by_density, (*blocks, dense)))
        turned = replace(shape, layout=LAYOUTS[1])
        other_layout = _cases(turned, [DENSE, *_random_masks(128, 0.25)])
        parts.append(Part(other_layout, (*blocks, dense)))
        parts.append(Part(_cases(shape, [CAUSAL]), (*blocks, dense, *flex)))
        parts.append(Part(_cases(turned, special), (*blocks, *flex)))
        parts.append(Part(by_density[::3], flex))
    for n, heads, density in ((262144, 8, 0.005), (1048576, 2, 0.002)):
        long = replace(first, batch=1, heads=heads, kv_heads=heads, n_q=n, n_k=n)
        structured = "local(512) | butterfly(128) | global_tokens(64)"
        parts.append(Part(_cases(long, [*_random_masks(128, density), structured]), blocks))
    return parts


def _on_a_gpu(grid: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"grid={grid} needs a GPU, and the device is {device}: leave it out")


def published(device: torch.device) -> list[Part]:
    """Return shapes that others publish speeds for, which need a GPU.

    Two video models with a random tenth of the blocks for every head, in blocks of 64, 128 and 256,
    and 64 blocks a row (cuDNN Frontend). One long sequence with the masks of its flex attention. 64
    query heads that share 8 key heads (MagiAttention). The most memory, about 20 GiB, is that of 56
    heads backward in cuDNN, which takes 11 GiB beside the inputs.
    """
    _on_a_gpu("published", device)

    def shape(heads: int, n: int, kv_heads: int | None = None, layout: int = 0) -> Case:
        heads_k = kv_heads or heads
        return Case(
            DENSE, 1, heads, heads_k, n, n, 128, "bfloat16", 128, 128, layout=LAYOUTS[layout]
        )

    blocks = ("hopper", *installed("fa4", "cudnn_blocks"))
    spans = ("hopper", *installed("fa4", "fa4_window", "fa4_varlen", "cudnn_flex"), "flex")
    parts = []
    for heads, n in ((40, 92160), (56, 91392)):
        parts.append(Part(_cases(shape(heads, n), [DENSE]), ("hopper", "sdpa_cudnn")))
        for size in (64, 128, 256):
            random = f"random_blocks(0.1, block={size}, per_head=True)"
            parts.append(Part(_cases(shape(heads, n), [random], size), blocks))
    random = "random_blocks(count=64, block=64, per_head=True)"
    parts.append(Part(_cases(shape(40, 109632), [random], 64), blocks))
    parts.append(Part(_cases(shape(4, 131072, layout=1), _interval_masks()), spans))
    grouped = shape(64, 65536, 8, layout=1)
    masks = [CAUSAL, _packed(grouped.n_q)[1], "random_blocks(0.1, per_head=True)"]
    parts.append(Part(_cases(grouped, masks), tuple(dict.fromkeys((*blocks, *spans)))))
    return parts


def _interval_masks(n: int = 131072) -> list[str]:
    """Return the masks of cuDNN's benchmark of flex attention, with its lengths.

    Its tree has 127 nodes: the text of a mask holds 32. Its breadth-first tree is no mask of ours.
    """
    documents = (11858, 8270, 12765, 11038, 4578, 14018, 11721, 11988, 4942, 8393, 7541, 13495)
    users = (5008, 4300, 8192, 6102, 5924, 8192, 4935, 6635, 7552, 4356, 4340)
    far = tuple((2 * i + 1) * n // 16 for i in range(8))
    nodes = _subtrees(5)
    ends = [0, *accumulate(8 + i % 5 for i in range(len(nodes)))]
    ends = [round(end * n / ends[-1]) for end in ends]
    leave = tuple(ends[i + size] for i, size in enumerate(nodes))
    return [
        CAUSAL,
        f"documents({(*documents, 10465)}) & causal()",
        "sliding(513)",
        "(sinks(4) | sliding(513)) & causal()",
        f"prefix_tree({tuple(ends[:-1])}, {leave})",
        f"local(256) | global_at({far})",
        f"hstu({tuple(2 * m for m in users)}, targets={users})",  # as many targets as history
    ]


def _subtrees(levels: int) -> list[int]:
    """Nodes of every subtree of a full binary tree, depth first."""
    return [2**levels - 1, *_subtrees(levels - 1) * 2] if levels else []


def _packed(n: int) -> list[str]:
    """Documents of unequal lengths that fill n tokens, and the same with a causal mask."""
    lengths = [n // 4, n // 16, n // 5, n // 30, n // 7, n // 50, n // 11]
    text = f"documents({(*lengths, n - sum(lengths))})"
    return [text, f"{text} & causal()"]


GRIDS: dict[str, Callable[[torch.device], list[Part]]] = {"page": page, "published": published}


def _cases(shape: Case, texts: Iterable[str], block: int | None = None) -> tuple[Case, ...]:
    if block is not None:
        shape = replace(shape, block_q=block, block_k=block)
    return tuple(_with_mask(shape, text) for text in texts)


def _random_masks(block: int, *densities: float) -> list[str]:
    """Random masks of blocks of this size, equally many in every row."""
    return [f"random:{density}:block={block}" for density in densities]


def _with_mask(shape: Case, mask: str) -> Case:
    """Return the case with the mask's own text, so that one mask has one name in every row."""
    if mask == DENSE:  # which has no blocks
        return replace(shape, mask=mask, block_q=0, block_k=0)
    return replace(shape, mask=str(masks.parse(mask)))
