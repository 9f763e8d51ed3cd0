"""Models of other libraries, and masks that they pass as tensors: padding, pairs of tokens, scores.

Import the module of the library: each needs that library only.
"""

from contextlib import AbstractContextManager
from functools import reduce
from operator import and_

import numpy as np
import torch
from torch import Tensor

import masks
from masks import Mask, mask_from
from masks.checks import installed

FORBIDS = -9_000.0  # models write -10,000 for it, which bfloat16 rounds


def integration(package: str, version: str) -> AbstractContextManager[None]:
    """Context of the imports of a package, which the extra 'models' installs."""
    name = f"sparseflash.integrations.{package} needs {package} {version} or newer"
    return installed(name, f"{package}>={version}", "models")


def join(*parts: Mask | None) -> Mask | None:
    """Return what all parts allow; None allows everything."""
    given = [part for part in parts if part is not None]
    return reduce(and_, given) if given else None


def is_bias(given: Tensor) -> bool:
    """Return whether scores to add do more than allow and forbid, or may learn to."""
    if given.dtype == torch.bool:
        return False
    return given.requires_grad or not ((given == 0) | (given <= FORBIDS)).all()


def check_extents(name: str, given: Tensor, *wanted: int) -> None:
    """Raise ValueError unless a tensor has these extents, or 1 in place of some."""
    pairs = zip(given.shape, wanted, strict=False)
    if given.ndim != 4 or any(extent not in (1, most) for extent, most in pairs):
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}; pass (batch, heads, {wanted[-2]},"
            f" {wanted[-1]}), where each may be 1"
        )


def mask_of_tensor(given: Tensor, queries: int, keys: int) -> Mask | None:
    """Return the mask of (B, N_k), or of (B, H, N_q, N_k) with extents of 1; None where all is
    allowed.

    Args:
        given: booleans, True where allowed, or scores to add: 0, or so low as to forbid.

    Raises:
        ValueError: scores that do more than allow and forbid, or another shape.
    """
    given = given[:, None, None] if given.ndim == 2 else given
    check_extents("attention_mask", given, *given.shape[:2], queries, keys)
    if is_bias(given):
        raise ValueError(
            f"attention_mask is a bias of {given.dtype}, {tuple(given.shape)}, with values other"
            f" than 0 and below {FORBIDS}: pass booleans, or take the model's own attention"
        )
    allowed = given if given.dtype == torch.bool else given == 0
    pairs = allowed.cpu().numpy()
    if pairs.all():
        return None
    if pairs.shape[1:3] == (1, 1):
        return to_real(np.broadcast_to(pairs[:, 0, 0], (len(pairs), keys)), queries)
    return mask_from(np.broadcast_to(pairs, (*pairs.shape[:2], queries, keys)))


def to_real(real: np.ndarray, queries: int) -> Mask:
    """Every query, which may be of another sequence, sees the real keys; real: bool (B, N_k)."""
    keys = np.stack(_stretches(real), axis=1)
    return _hide_holes(masks.documents([[0, queries, 0]] * len(keys), keys), real, queries)


def between_real(mask: Mask, real: np.ndarray) -> Mask:
    """Return the mask from the first real token to the last one, and nothing for padding."""
    first, middle, after = _stretches(real)
    nothing = np.zeros_like(first)
    # Documents of padding have queries only or keys only.
    queries = np.stack([first, nothing, middle, after, nothing], axis=1)
    keys = np.stack([nothing, first, middle, nothing, after], axis=1)
    return _hide_holes(mask >> masks.packed(queries, keys), real, real.shape[1])


def _stretches(real: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens before the first real one of every row, from there to the last one, and after it."""
    n = real.shape[1]
    first = np.where(real.any(1), real.argmax(1), n)
    after = np.where(real.any(1), real[:, ::-1].argmax(1), 0)
    return first, n - first - after, after


def _hide_holes(mask: Mask, real: np.ndarray, queries: int) -> Mask:
    """Return the mask without the keys of padding between real tokens."""
    if (real.sum(1) == _stretches(real)[1]).all():
        return mask
    return mask & masks.documents_from_ids(
        np.zeros((len(real), queries), int), 1 - real.astype(int)
    )
