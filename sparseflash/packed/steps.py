"""The steps by which a mask of packed sequences is made, on any device.

On NVIDIA GPUs they are Triton kernels, elsewhere plain torch. In a compiled function each is one
operator, so that it has the same kernels.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from sparseflash.dynamic.selection import Selection
from sparseflash.kernels.common.device import kernels_of, on_nvidia
from sparseflash.packed import blocks, spans

P = ParamSpec("P")
R = TypeVar("R")


def _step(plain: Callable[P, R], schema: str, shapes: Callable[..., object]) -> Callable[P, R]:
    """`plain`, or the kernels of its name where its first tensor is on an NVIDIA GPU.

    shapes: makes results of the right shapes and types, for the compiler.
    """
    name = plain.__name__

    def run(*given):
        if not on_nvidia(given[0]):
            return plain(*given)  # pyright: ignore[reportCallIssue]
        return getattr(kernels_of("packed"), name)(*given)

    torch.library.define(f"sparseflash::{name}", schema)
    torch.library.impl(f"sparseflash::{name}", ("CPU", "CUDA"))(run)
    torch.library.register_fake(f"sparseflash::{name}")(shapes)
    operator = getattr(torch.ops.sparseflash, name)

    @wraps(plain)
    def step(*given: P.args, **_: P.kwargs) -> R:
        return operator(*given) if torch.compiler.is_compiling() else run(*given)

    return step


def _spans(like: Tensor, count: int, n: int) -> Tensor:
    return like.new_empty((count, 2, len(like), n), dtype=torch.int32)


def _document_shapes(offsets, offsets_k, n, n_k, left, right, shared, length, lengths):
    return _spans(offsets, 1 + shared + (length is not None or lengths is not None), n)


def _block_shapes(spans, n_other, block_q, block_k, room, columns):
    batch, n = spans.shape[2:]
    n_q, n_k = (n_other, n) if columns else (n, n_other)
    codes = spans.new_empty((batch, 1, -(-n_q // block_q), -(-n_k // block_k)))
    bits = spans.new_empty((room, block_q, -(-block_k // 32)))
    return codes, bits, spans.new_empty((), dtype=torch.bool)


document_spans = _step(
    spans.document_spans,
    "(Tensor offsets, Tensor? offsets_k, SymInt n, SymInt n_k, SymInt left, SymInt right,"
    " bool shared, SymInt? length, Tensor? lengths) -> Tensor",
    _document_shapes,
)
diffusion_spans = _step(
    spans.diffusion_spans,
    "(Tensor offsets, SymInt n, SymInt size, bool interleaved) -> Tensor",
    lambda offsets, n, *_: _spans(offsets, 2, n),
)
tree_spans = _step(
    spans.tree_spans,
    "(Tensor enter, Tensor leave, SymInt n) -> Tensor",
    lambda enter, leave, n: _spans(enter, 1, n),
)
_span_blocks = _step(
    blocks.span_blocks,
    "(Tensor spans, SymInt n_other, SymInt block_q, SymInt block_k, SymInt room, bool columns)"
    " -> (Tensor, Tensor, Tensor)",
    _block_shapes,
)


def from_spans(
    spans: Tensor, block_size: tuple[int, int], room: int, max_blocks: int, *,
    n_k: int | None = None, columns: bool = False,
) -> Selection:  # fmt: skip
    """Return the mask of n x n_k tokens in which queries see these spans of keys; n_k is n by
    default.

    Args:
        spans: int32 (spans, 2, batch, n), see spans.py. By columns they are of the keys: the
            queries that see them. Blocks below one another then share tiles.
        block_size: (block_q, block_k).
        room: a bound on the tiles of all batch entries. More of them fail an assertion on the
            device: a wrong mask would be worse.
        max_blocks: a bound on the non-empty blocks of all batch entries.
    """
    n = spans.shape[3]
    n_k = n if n_k is None else n_k
    codes, bits, fits = _span_blocks(spans, n if columns else n_k, *block_size, room, columns)
    if room < codes.numel():
        message = f"more than {room} partial blocks: the offsets are not those of a packing"
        torch._assert_async(fits, message)  # pyright: ignore
    owned = 0 if columns else room
    return Selection(codes, bits, n, n_k, block_size, max_blocks, owned)


def touching(n: int, block_size: tuple[int, int]) -> int:
    """Blocks on the diagonal of n x n tokens and below it."""
    block_q, block_k = block_size
    return sum(-(-min(end, n) // block_k) for end in range(block_q, n + block_q, block_q))
