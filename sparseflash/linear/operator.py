"""Products with block-sparse weights: the public `linear`, the operators sparseflash::linear and
sparseflash::linear_backward, the block lists, and the products in plain torch.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from masks import BlockMask
from masks.spec import find
from sparseflash.cache import cached, persistent
from sparseflash.dynamic.selection import to_device
from sparseflash.kernels.common.device import kernels_of, nvidia_capability
from sparseflash.operators.attention import refuse_second_derivative
from sparseflash.request import autocast

BLOCKS = (16, 32, 64, 128)
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear(x: Tensor, weight: Tensor, mask: BlockMask, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, where W has the blocks that a mask allows: (.., mask.n_q) from
    (.., mask.n_k).

    The time and the memory of the forward, and of both gradients, are in proportion to the blocks.

    Args:
        x: (.., mask.n_k).
        weight: (blocks, b, b), each block output x input features as in `torch.nn.Linear`; row by
            row of blocks and, in a row, by columns.
        mask: a `masks.BlockMask` of output x input features; its blocks are b x b features, b = 16,
            32, 64 or 128. A block that allows any pair is there whole.
            `sparseflash.BlockSparseLinear` makes one of a rule.
        bias: (mask.n_q,).

    On NVIDIA GPUs Triton kernels compute bfloat16, float16 and float32, which accumulate in
    float32; torch's functions compute float64, and on other devices. Raises ValueError for
    arguments that do not fit together.
    """
    if not torch.compiler.is_compiling():
        check_mask(mask)
    return mlp(x, (weight, mask, bias), (None, mask, None), "", False)


Layer = tuple[Tensor | None, BlockMask, Tensor | None]  # weight, mask, bias


def mlp(x: Tensor, up: Layer, down: Layer, act: str, gate: bool) -> Tensor:
    """Return `linear` twice with an activation between, which the products compute; once where
    `down` has no weight.

    gate: the first half of the features of `up` are activated and multiply the second half; both
    halves of its mask are the same.
    """
    (w1, mask1, b1), (w2, mask2, b2) = up, down
    tensors = x, w1, b1, w2, b2 = autocast(x, w1, b1, w2, b2)
    if not torch.compiler.is_compiling():
        _check(w1, mask1, b1, x=x)
        if w2 is not None:
            _check(w2, mask2, b2)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    flat, *rest = x.reshape(-1, mask1.n_k), mask1.key, mask2.key, act, gate, keep
    out: Any = _Linear.apply(flat, w1, b1, w2, b2, *rest)
    if keep and not torch.compiler.is_compiling():
        out.grad_fn.metadata["masks"] = mask1, mask2  # which the backward finds by their keys
    return out.view(*x.shape[:-1], out.shape[1])


def check_mask(mask: Any) -> None:
    """Raise ValueError for what is not the mask of a weight."""
    if not isinstance(mask, BlockMask):
        raise ValueError(
            f"mask is a {type(mask).__name__}; pass a masks.BlockMask: mask.build(out_features,"
            " in_features, block_size=64), or BlockMask.from_dense of an array"
        )
    if mask.batch * mask.heads > 1:
        raise ValueError(
            f"mask has {mask.batch} batch entries and {mask.heads} heads; give one that is the same"
            " for all, because a weight has neither"
        )
    block, sizes = mask.block_size[0], (mask.n_q, mask.n_k)
    if mask.block_size != (block, block) or block not in BLOCKS or any(n % block for n in sizes):
        raise ValueError(
            f"mask has block_size {mask.block_size}; build it with one of {BLOCKS} that divides its"
            f" {sizes} features"
        )


def _check(weight: Any, mask: BlockMask, bias: Any, **x: Any) -> None:
    shapes = {"weight": (mask.nnz, *mask.block_size), "bias": (mask.n_q,)}
    for name, t in {**x, "weight": weight, "bias": bias}.items():
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} is a {type(t).__name__}; pass a torch tensor")
        if not t.is_floating_point() or t.dtype.itemsize < 2:
            raise ValueError(f"{name} is {t.dtype}; cast it to bfloat16, float16 or float32")
        if t.dtype != weight.dtype or t.device != weight.device:
            raise ValueError(
                f"{name} is {t.dtype} on {t.device}, weight {weight.dtype} on {weight.device};"
                " bring them to one dtype and device, or use torch.autocast"
            )
        wanted = shapes.get(name, (*t.shape[:-1], mask.n_k))
        if tuple(t.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; for this mask it is {wanted}")


@cached
def _lines(key: str, transposed: bool) -> tuple[Any, Any, Any]:
    """Return ptr, idx, num: row i of blocks (transposed: column i) has the entries ptr[i] ..
    ptr[i + 1], each with its column and the number of the block in the weight.
    """
    layout = find(key).layout()[0, 0] != 0
    number = layout.cumsum().reshape(layout.shape) - 1
    layout, number = (x.T if transposed else x for x in (layout, number))
    return np.append(0, layout.sum(1).cumsum()), layout.nonzero()[1], number[layout]


@cached
def lines_of(key: str, transposed: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Return `_lines` and the order of the lines, the longest first: int32 tensors."""
    ptr, idx, num = _lines(key, transposed)
    made = ptr, idx, num, np.argsort(-np.diff(ptr), kind="stable")
    return persistent(lambda: tuple(to_device(x.astype(np.int32), device) for x in made), device)


@cached
def groups_of(key: str, transposed: bool, group: int, device: torch.device) -> Tensor:
    """Return int32 (groups, 2 + 2 group): up to `group` entries of a line, see `_lines`.

    The line, how many there are, and, the last one repeated, their idx and their num.
    """
    ptr, idx, num = _lines(key, transposed)
    made = []
    for line, (begin, end) in enumerate(pairwise(ptr)):
        for first in range(begin, end, group):
            e = np.arange(first, first + group).clip(max=end - 1)
            made.append([line, min(group, end - first), *idx[e], *num[e]])
    return persistent(lambda: to_device(np.array(made, np.int32), device), device)


@cache
def _has_kernels(device: torch.device) -> bool:
    capability = nvidia_capability(device)
    return capability is not None and capability >= (8, 0) and find_spec("triton") is not None


def _by(x: Tensor, weight: Tensor) -> Any:
    """Return what has the functions that compute: `kernels`, or `Torch`."""
    kernels = x.dtype in _DTYPES and weight.shape[0] and x.shape[0] and _has_kernels(x.device)
    return kernels_of("linear") if kernels else Torch


class Torch:
    """The products in plain torch, a line of blocks at a time."""

    @staticmethod
    def product(
        x: Tensor, weight: Tensor, mask: str, transposed: bool, bias: Tensor | None = None,
        act: str = "", gate: bool = False, keep: bool = True, pre: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return x W^T + bias, or x W: (tokens, features).

        act: the activation of it instead, with the sum where `keep`. pre: what that was; then the
        product is the gradient of the activation, and the result that of `pre`.
        """
        ptr, idx, num = (t.tolist() for t in _lines(mask, transposed))
        block = weight.shape[1]
        x, weight = x.unflatten(1, (-1, block)), weight if transposed else weight.mT
        sums = x.new_zeros(len(x), len(ptr) - 1, block)
        for line, (begin, end) in enumerate(pairwise(ptr)):
            inner = x[:, idx[begin:end]].flatten(1)  # (tokens, blocks of the line * b)
            sums[:, line] = inner @ weight[num[begin:end]].flatten(0, 1)
        sums = sums.flatten(1)
        if bias is not None:
            sums += bias
        if not act:
            return sums, None
        if pre is None:
            return activated(sums, act, gate), sums if keep else None
        return activation_gradient(sums, pre, act, gate), None

    @staticmethod
    def sampled(dy: Tensor, x: Tensor, mask: str, block: int) -> Tensor:
        """Return the blocks of dy^T x that the weight has: (blocks, b, b)."""
        ptr, idx, num = (t.tolist() for t in _lines(mask, False))
        out = x.new_empty(len(num), block, block)
        dy, x = (t.unflatten(1, (-1, block)) for t in (dy, x))
        for line, (begin, end) in enumerate(pairwise(ptr)):
            inner = dy[:, line].mT @ x[:, idx[begin:end]].flatten(1)  # (b, blocks of the line * b)
            out[begin:end] = inner.unflatten(1, (-1, block)).transpose(0, 1)
        return out


def activated(x: Tensor, act: str, gate: bool) -> Tensor:
    if gate:
        x, other = x.chunk(2, dim=-1)
        return activated(x, act, False) * other
    if act == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def activation_gradient(dx: Tensor, x: Tensor, act: str, gate: bool) -> Tensor:
    if gate:
        x, other = x.chunk(2, dim=-1)
        further = dx * activated(x, act, False)
        return torch.cat([activation_gradient(dx * other, x, act, False), further], -1)
    if act == "silu":
        return torch.ops.aten.silu_backward(dx, x)
    kind = "tanh" if act == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(dx, x, approximate=kind)


def _aligned(t: Tensor) -> Tensor:
    """Return t as kernels read it: the last dimension side by side, rows at multiples of 16 bytes.

    A block of a weight is whole in memory.
    """
    apart = t.stride(-2) if t.ndim == 2 else t.is_contiguous() * t.shape[-1]
    rows = t.stride(-1) == 1 and apart >= t.shape[-1] and apart * t.element_size() % 16 == 0
    return t if rows and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _forward(x, w1, b1, w2, b2, mask1, mask2, act, gate, keep):
    x, w1 = _aligned(x), _aligned(w1)
    hidden, pre = _by(x, w1).product(x, w1, mask1, False, b1, act, gate, keep)
    if w2 is None:
        return hidden, None, None
    w2 = _aligned(w2)
    out, _ = _by(x, w2).product(hidden, w2, mask2, False, b2)
    return out, pre, hidden if keep else None


def _backward(dy, x, w1, w2, pre, hidden, mask1, mask2, act, gate, wanted):
    def gradients(dy, x, w, mask, wanted):
        by = _by(x, w)
        return (
            by.product(dy, w, mask, True)[0] if wanted[0] else None,
            by.sampled(dy, x, mask, w.shape[1]) if wanted[1] else None,
            dy.sum(0) if wanted[2] else None,
        )

    dy, x, w1 = _aligned(dy), _aligned(x), _aligned(w1)
    further = None, None
    if w2 is not None:
        w2 = _aligned(w2)
        further = gradients(dy, hidden, w2, mask2, [False, *wanted[3:]])[1:]
        if any(wanted[:3]):
            dy, _ = _by(x, w2).product(dy, w2, mask2, True, None, act, gate, pre=pre)
    return gradients(dy, x, w1, mask1, wanted[:3]) + further


def _as_operator(function: Callable[..., Any], x: Tensor, *rest: Any) -> list[Tensor]:
    """Return its results as those of an operator: empty tensors for None."""
    return [x.new_empty(0) if t is None else t for t in function(x, *rest)]


_OPTIONS = "str mask1, str mask2, str act, bool gate"
torch.library.define(
    "sparseflash::linear",
    "(Tensor x, Tensor w1, Tensor? b1, Tensor? w2, Tensor? b2,"
    f" {_OPTIONS}, bool keep) -> (Tensor out, Tensor pre, Tensor hidden)",
)
torch.library.define(
    "sparseflash::linear_backward",
    "(Tensor dy, Tensor x, Tensor w1, Tensor? w2, Tensor pre, Tensor hidden,"
    f" {_OPTIONS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
for _name, _function in (("linear", _forward), ("linear_backward", _backward)):
    torch.library.impl(f"sparseflash::{_name}", ("CPU", "CUDA"))(partial(_as_operator, _function))


@torch.library.register_fake("sparseflash::linear")
def _forward_fake(x, w1, b1, w2, b2, mask1, mask2, act, gate, keep):
    widths = find(mask1 if w2 is None else mask2).n_q, find(mask1).n_q, find(mask2).n_k
    there = True, *(keep and w2 is not None,) * 2
    return tuple(
        x.new_empty((x.shape[0], n) if kept else 0) for n, kept in zip(widths, there, strict=True)
    )


@torch.library.register_fake("sparseflash::linear_backward")
def _backward_fake(dy, x, w1, w2, pre, hidden, mask1, mask2, act, gate, wanted):
    bias = dy.shape[1] if w2 is None else pre.shape[1]
    shapes = x.shape, w1.shape, bias, w1.shape if w2 is None else w2.shape, dy.shape[1]
    return tuple(x.new_empty(s if w else 0) for s, w in zip(shapes, wanted, strict=True))


class _Linear(torch.autograd.Function):
    """`_forward` with gradients; a compiler sees the operators."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, *options):
        run = torch.ops.sparseflash.linear if torch.compiler.is_compiling() else _forward
        out, pre, hidden = run(x, w1, b1, w2, b2, *options)
        ctx.save_for_backward(x, w1, w2, pre, hidden)
        ctx.options = options[:-1]
        return out

    @staticmethod
    def backward(ctx, dy):
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:
            refuse_second_derivative(ctx)
        run: Any = torch.ops.sparseflash.linear_backward if compiling else _backward
        wanted = [*ctx.needs_input_grad[:5]]
        found = run(dy, *ctx.saved_tensors, *ctx.options, wanted)
        return *(g if w else None for g, w in zip(found, wanted, strict=True)), *(None,) * 5
