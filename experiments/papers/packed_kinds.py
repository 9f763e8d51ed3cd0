"""The packed masks that are timed: ours, and what FlexAttention's create_block_mask is given."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparseflash import packed
from sparseflash.select.selection import Selection

WINDOW, SIZE = 1024, 32  # tokens that a query sees, and of a block of diffusion
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """One kind of mask; the tensor that both ways are made from lies on the device."""

    text: str  # as rows have it
    given: Callable[[int, int, np.random.Generator], np.ndarray]  # of n tokens and documents
    ours: Callable[[Tensor, int], Selection]
    theirs: Callable[[Tensor, int], Seen]  # a mask_mod


def _offsets(n: int, documents: int, rng: np.random.Generator) -> np.ndarray:
    return np.array([0, *np.sort(rng.integers(0, n + 1, documents - 1)), n])


def _half_offsets(n: int, documents: int, rng: np.random.Generator) -> np.ndarray:
    return _offsets(n // 2, documents, rng)


def _walk(n: int, documents: int, rng: np.random.Generator) -> np.ndarray:
    """enter and leave of a random tree with that many nodes."""
    enter = _offsets(n, documents, rng)[:-1]
    leave, path = np.full(len(enter), n), [0]
    for node in range(1, len(enter)):
        depth = int(rng.integers(1, len(path) + 1))
        leave[path[depth:]] = enter[node]
        path = [*path[:depth], node]
    return np.stack([enter, leave])


def _numbers(offsets: Tensor, n: int) -> Tensor:
    """The document of every token."""
    token = torch.arange(n, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), token, right=True)


def _causal(offsets: Tensor, n: int) -> Seen:
    document = _numbers(offsets, n)
    return lambda b, h, q, k: (document[q] == document[k]) & (q >= k)


def _sliding(offsets: Tensor, n: int) -> Seen:
    document = _numbers(offsets, n)
    return lambda b, h, q, k: (document[q] == document[k]) & (q >= k) & (q - k < WINDOW)


def _shared(offsets: Tensor, n: int) -> Seen:
    document = _numbers(offsets, n)
    return lambda b, h, q, k: ((document[q] == document[k]) | (document[k] == 0)) & (q >= k)


def _tree(walk: Tensor, n: int) -> Seen:
    token = torch.arange(n, dtype=walk.dtype, device=walk.device)
    last = walk[1][torch.searchsorted(walk[0].contiguous(), token, right=True) - 1]
    return lambda b, h, q, k: (q >= k) & (q < last[k])


def _diffusion(offsets: Tensor, n: int) -> Seen:
    document = _numbers(offsets, n // 2)
    token = torch.arange(n // 2, device=offsets.device)
    block = (token - offsets[document]) // SIZE
    document, block = document.repeat(2), block.repeat(2)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = ((q < n // 2) == (k < n // 2)) & (block[q] == block[k])
        return (document[q] == document[k]) & (own | ((k >= n // 2) & (block[k] < block[q])))

    return seen


KINDS = {
    "documents": Kind(
        "documents & causal",
        _offsets,
        lambda given, n: packed.documents(given, n, causal=True),
        _causal,
    ),
    "sliding": Kind(
        f"documents & sliding({WINDOW})",
        _offsets,
        lambda given, n: packed.documents(given, n, window=(WINDOW - 1, 0)),
        _sliding,
    ),
    "shared": Kind(
        "shared_prefix & causal",
        _offsets,
        lambda given, n: packed.documents(given, n, causal=True, shared=True),
        _shared,
    ),
    "tree": Kind(
        "prefix_tree", _walk, lambda given, n: packed.prefix_tree(given[0], given[1], n), _tree
    ),
    "diffusion": Kind(
        f"documents & block_diffusion({SIZE})",
        _half_offsets,
        lambda given, n: packed.block_diffusion(given, n, SIZE),
        _diffusion,
    ),
}
