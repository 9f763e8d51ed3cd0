"""Triton kernels of block-sparse linear layers, and their launches.

`_product` computes x W^T from the lists of the rows of blocks, and x W from those of the columns:
a program has a tile of tokens and one block of output features, and walks the blocks of its list,
whose features of x are multiplied as one long inner dimension. `_sampled` computes the products
dy^T x of the blocks that the weight has. Their counterparts in plain torch are in `operator`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseflash.cache import cache
from sparseflash.kernels.common.device import interpreted, multiprocessors, on
from sparseflash.kernels.common.launch import Launch
from sparseflash.kernels.portable.tma import has_tma
from sparseflash.linear.operator import groups_of, lines_of


class Tiles(NamedTuple):
    """How a kernel is cut.

    swap: the rows of a product of tensor cores are features of the output instead of tokens.
    group: blocks of a program of `_sampled`; flip: they share a column of blocks, not a row.
    """

    tokens: int  # of a program, or of a step of `_sampled`
    depth: int  # inner dimension of a step of `_product`
    warps: int
    stages: int
    swap: bool = False
    group: int = 1
    flip: bool = False


def product_tiles(block: int, tokens: int, lines: int, blocks: int, x: Tensor) -> Tiles:
    """Return the tiles of a product with `blocks` blocks for `lines` blocks of features.

    Measured on an H200: long lists take large tiles, one program to a multiprocessor; beside short
    ones the programs have to overlap.
    """
    if x.dtype == torch.float32 or not has_tma(x.device):
        return Tiles(64, 16 if x.dtype == torch.float32 else 32, 8, 3)
    long, many = blocks >= 16 * lines, tokens * lines >= 256 * _sms(x.device)
    if block == 128:
        return Tiles(256, 64, 8, 4) if long and many else Tiles(128, 64, 4, 3)
    if block == 64:
        small = Tiles(256, 64, 4, 2, swap=True) if many else Tiles(128, 64, 4, 4, swap=True)
        return Tiles(256, 64, 8, 4, swap=True) if long and many else small
    return Tiles(256 if many else 128, block, 4, 4)


def sampled_tiles(block: int, rows: int, cols: int, blocks: int, x: Tensor) -> Tiles:
    """Return the tiles of the products of a weight's blocks.

    Blocks that share what they have more of, rows or columns, make groups with fewer gaps.
    """
    flip, each = cols < rows, blocks / max(1, min(rows, cols))
    if x.dtype == torch.float32 or not has_tma(x.device):
        return Tiles(16 if x.dtype == torch.float32 else 32, 0, 8, 2, flip=flip)
    if block == 128:
        return Tiles(64, 0, 4, 3, flip=flip)
    group = 256 // block // 2 if each >= 4 else 1
    return Tiles(64, 0, 4, 4 if block == 64 else 3, group=group, flip=flip)


def product(
    x: Tensor, weight: Tensor, mask: str, transposed: bool, bias: Tensor | None = None,
    act: str = "", gate: bool = False, keep: bool = True, pre: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`operator.Torch.product`."""
    given = mask, transposed, act, gate, keep
    bias = None if bias is None else bias.contiguous()
    return _prepared(_product_of, given, x, weight, bias, pre)


def sampled(dy: Tensor, x: Tensor, mask: str, block: int) -> Tensor:
    """`operator.Torch.sampled`."""
    return _prepared(_sampled_of, (mask, block), dy, x)


def _prepared(make: Callable[..., Any], given: tuple[Any, ...], *tensors: Tensor | None) -> Any:
    """Return make(given, tensors)[0](tensors), made once for all tensors of these layouts.

    Descriptors and the choice of tiles take the host longer than the kernels take.
    """
    x = tensors[0]
    assert x is not None
    layouts = [None if t is None else (t.shape, t.stride()) for t in tensors]
    key = make, *given, *layouts, x.dtype, x.device, _precision(x)
    found = cache.get(key)
    if found is None:
        with on(x.device):
            found = make(*given, *tensors)
        cache.put(key, found, found[1])
    return found[0](*tensors)


def _product_of(mask, transposed, act, gate, keep, x, weight, bias, pre) -> Any:
    block, tokens = weight.shape[1], x.shape[0]
    lists = lines_of(mask, transposed, x.device)
    blocks, length = len(lists[2]), len(lists[3])
    twice = gate and pre is None
    lines = length // 2 if twice else length
    width = lines * block * (2 if gate and not twice else 1)
    tiles = product_tiles(block, tokens, lines, blocks, x)
    if act and tiles.tokens * block > 128 * 128:  # registers for more than the sums
        tiles = tiles._replace(tokens=128, warps=4, stages=3)
    rows, depth = tiles.tokens // (1 + gate), min(tiles.depth, block)
    box = (depth, block) if transposed else (block, depth)
    stages = _stages(tiles, (rows + block * (1 + twice)) * depth, x)
    options = {
        "BLOCK": block, "ROWS": rows, "DEPTH": depth, "TRANSPOSED": transposed, "SWAP": tiles.swap,
        "ACT": act, "GATE": gate, "PRECISION": _precision(x), "num_warps": tiles.warps,
        "num_stages": 2 * stages - 1,  # the loads of lists are stages, too
    }  # fmt: skip
    launch = Launch(_product, static=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor | None) -> Any:
        out = x.new_empty(tokens, width)
        kept = x.new_empty(tokens, length * block) if act and keep and pre is None else None

        def arguments():
            descs = [None if t is None else _desc(t, rows, block) for t in (out, kept, pre)]
            args = (
                x, weight, bias, out, kept, pre, _desc(x, rows, depth), _desc(weight, *box), *descs,
                *lists, lines, blocks // 2,
            )  # fmt: skip
            return (lines * -(-tokens // rows),), args, options

        launch((x, weight, bias, out, kept, pre), arguments, lists)
        return out, kept

    return run, lists


def _sampled_of(mask, block, dy, x) -> Any:
    tokens, count = x.shape[0], len(lines_of(mask, False, x.device)[1])
    tiles = sampled_tiles(block, dy.shape[1] // block, x.shape[1] // block, count, x)
    groups = groups_of(mask, tiles.flip, tiles.group, x.device)
    programs = len(groups)
    parts = split(programs, tokens, block, tiles, x.device)
    chunk = -(-tokens // (parts * tiles.tokens)) * tiles.tokens
    parts = -(-tokens // chunk)
    options = {
        "BLOCK": block, "GROUP": tiles.group, "ROWS": tiles.tokens, "FLIP": tiles.flip,
        "PRECISION": _precision(x), "num_warps": tiles.warps,
        "num_stages": _stages(tiles, tiles.tokens * block * (1 + tiles.group), x),
    }  # fmt: skip
    launch, launch_sum = Launch(_sampled, static=True), Launch(_sum, static=True)

    def run(dy: Tensor, x: Tensor) -> Tensor:
        out = x.new_empty(count, block, block)
        sums = out if parts == 1 else x.new_empty(parts, *out.shape, dtype=torch.float32)
        shared, varied = (x, dy) if tiles.flip else (dy, x)

        def arguments():
            args = (
                shared, varied, sums, *(_desc(t, tiles.tokens, block) for t in (shared, varied)),
                groups, programs, tokens, chunk, count, shared.stride(0), varied.stride(0),
            )  # fmt: skip
            return (programs * parts,), args, options

        launch((shared, varied, sums), arguments, (groups,))
        if parts > 1:
            n = out.numel()
            about = (-(-n // 1024),), (sums, out, parts, n), {"SIZE": 1024}
            launch_sum((sums, out), lambda: about)
        return out

    return run, (groups,)


@functools.cache
def split(groups: int, tokens: int, block: int, tiles: Tiles, device: torch.device) -> int:
    """Return in how many parts programs share the tokens, each of which has sums of its own."""
    slots = _sms(device) * 8 // tiles.warps

    def time(parts: int) -> float:
        steps = -(-groups * parts // slots) * -(-tokens // parts)
        sums = 2 * groups * parts * (parts > 1)
        return block * block * tiles.group * (steps / 1.1e12 + sums * 4 / 3.5e12)

    return min(range(1, max(1, min(32, tokens // 256)) + 1), key=time)


def _sms(device: torch.device) -> int:
    return multiprocessors(device) if device.type == "cuda" else 4


def _precision(x: Tensor) -> str:
    if x.dtype != torch.float32:
        return "tf32"
    exact = torch.get_float32_matmul_precision() == "highest" or interpreted()
    return "ieee" if exact else "tf32"


def _stages(tiles: Tiles, elements: int, x: Tensor) -> int:
    """Return how many stages of so many elements a program has room for, up to those of tiles."""
    return max(1, min(tiles.stages, _shared(x.device) // (elements * x.element_size())))


@functools.cache
def _shared(device: torch.device) -> int:
    if device.type == "cpu":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _desc(t: Tensor, *box: int) -> TensorDescriptor:
    """Return the descriptor of a matrix, or of the blocks of a weight one after another.

    GPUs without a tensor memory accelerator load by pointers that Triton makes of it.
    """
    shape = [t.numel() // t.shape[-1], t.shape[-1]]
    return TensorDescriptor(t, shape, [t.stride(-2), 1], [*box])


@triton.jit
def activation(x, ACT: tl.constexpr):
    """Return the activation of x and its derivative."""
    if ACT == "gelu":
        s = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        return x * s, s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282559414 * x * x))
        return x * s, s + x * s * (1 - s) * (1.5957691216057308 + 0.21406443847678242 * x * x)
    else:
        s = tl.sigmoid(x)
        return x * s, s + x * s * (1 - s)


@triton.jit(do_not_specialize=("lines", "second"))
def _product(
    X, W, Bias, Out, Kept, Pre, X_desc, W_desc, Out_desc, Kept_desc, Pre_desc,
    ptr, idx, num, order, lines, second,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    SWAP: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """X (tokens, .) by the blocks W[num[e]] of line `order[.]`, at the blocks idx[e] of X.

    ACT without Pre: the activation of the sum, and the sum itself in Kept unless that is None;
    GATE: the activation times another sum, whose blocks come `second` later. With Pre, which is
    what Kept was: the gradient of Pre, given that of the activation as the sum.
    """
    pid = tl.program_id(0)
    line = pid % lines
    TWICE: tl.constexpr = GATE and Pre is None
    if not TWICE:
        line = tl.load(order + line)
    t = (pid // lines) * ROWS
    begin = tl.load(ptr + line)
    steps = (tl.load(ptr + line + 1) - begin) * (BLOCK // DEPTH)
    acc = tl.zeros([BLOCK, ROWS] if SWAP else [ROWS, BLOCK], tl.float32)
    acc_2 = acc
    for s in range(steps):
        e, k = begin + s // (BLOCK // DEPTH), s % (BLOCK // DEPTH) * DEPTH
        x = X_desc.load([t, tl.load(idx + e) * BLOCK + k])  # [ROWS, DEPTH]
        row = tl.load(num + e) * BLOCK
        acc = _multiply(x, W_desc, row, k, acc, TRANSPOSED, SWAP, PRECISION)
        if TWICE:
            row += second * BLOCK
            acc_2 = _multiply(x, W_desc, row, k, acc_2, TRANSPOSED, SWAP, PRECISION)

    n = tl.arange(0, BLOCK)
    if SWAP:
        acc, acc_2 = acc.T, acc_2.T
    if Bias is not None:
        acc += tl.load(Bias + line * BLOCK + n).to(tl.float32)[None, :]
        if TWICE:
            acc_2 += tl.load(Bias + (lines + line) * BLOCK + n).to(tl.float32)[None, :]
    if ACT != "" and Pre is None:
        if Kept is not None:
            Kept_desc.store([t, line * BLOCK], acc.to(Out_desc.dtype))
            if GATE:
                Kept_desc.store([t, (lines + line) * BLOCK], acc_2.to(Out_desc.dtype))
        acc, _ = activation(acc, ACT)
        if GATE:
            acc *= acc_2
    elif ACT != "":
        value, slope = activation(Pre_desc.load([t, line * BLOCK]).to(tl.float32), ACT)
        if GATE:
            Out_desc.store([t, (lines + line) * BLOCK], (acc * value).to(Out_desc.dtype))
            acc *= Pre_desc.load([t, (lines + line) * BLOCK]).to(tl.float32)
        acc *= slope
    Out_desc.store([t, line * BLOCK], acc.to(Out_desc.dtype))


@triton.jit
def _multiply(
    x, W_desc, row, k, acc,
    TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add x times a part of a block of the weight."""
    w = W_desc.load([row + k, 0]) if TRANSPOSED else W_desc.load([row, k]).T  # [DEPTH, BLOCK]
    if SWAP:
        return tl.dot(w.T, x.T, acc, input_precision=PRECISION)
    else:
        return tl.dot(x, w, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=("n_groups", "tokens", "chunk", "count"))
def _sampled(
    A, B, Out, A_desc, B_desc, groups, n_groups, tokens, chunk, count, stride_a, stride_b,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FLIP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute A^T B of one block of A and up to GROUP blocks of B, over a part of the tokens.

    groups: (n_groups, 2 + 2 GROUP): the block of A, how many of B, these, and their places in Out
    (parts, count, BLOCK, BLOCK). What is missing is repeated. FLIP: Out has B^T A.
    """
    pid = tl.program_id(0)
    about = groups + (pid % n_groups) * (2 + 2 * GROUP)
    part = pid // n_groups
    a_col, members = tl.load(about) * BLOCK, tl.load(about + 1)
    first = part * chunk
    steps = tl.cdiv(tl.minimum(chunk, tokens - first), ROWS)
    m, n = tl.arange(0, BLOCK), tl.arange(0, GROUP * BLOCK)
    if GROUP <= 2:
        b_col, b_col_2 = tl.load(about + 2) * BLOCK, tl.load(about + 1 + GROUP) * BLOCK
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        acc_2 = acc
        for s in range(steps):
            a = A_desc.load([first + s * ROWS, a_col]).T  # [BLOCK, ROWS]
            b = B_desc.load([first + s * ROWS, b_col])  # [ROWS, BLOCK]
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if GROUP == 2:
                b = B_desc.load([first + s * ROWS, b_col_2])
                acc_2 = tl.dot(a, b, acc_2, input_precision=PRECISION)
        if GROUP == 2:
            acc = tl.join(acc, acc_2).permute(0, 2, 1).reshape(BLOCK, GROUP * BLOCK)
    else:  # small blocks beside each other make a tall product
        b_col = tl.load(about + 2 + n // BLOCK) * BLOCK + n % BLOCK
        b_col = tl.max_contiguous(tl.multiple_of(b_col, 16), 16)
        acc = tl.zeros([GROUP * BLOCK, BLOCK], tl.float32)
        for s in range(steps):
            rows = first + s * ROWS + tl.arange(0, ROWS)
            at, inside = rows.to(tl.int64)[:, None], (rows < tokens)[:, None]
            a = tl.load(A + at * stride_a + (a_col + m)[None, :], mask=inside, other=0.0)
            b = tl.load(B + at * stride_b + b_col[None, :], mask=inside, other=0.0)
            acc = tl.dot(b.T, a, acc, input_precision=PRECISION)
        acc = acc.T
    place = tl.load(about + 2 + GROUP + n // BLOCK).to(tl.int64) + part.to(tl.int64) * count
    inside = place * (BLOCK * BLOCK) + n % BLOCK * (BLOCK if FLIP else 1)
    at = inside[None, :] + m[:, None] * (1 if FLIP else BLOCK)
    tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=(n // BLOCK < members)[None, :])


@triton.jit(do_not_specialize=("parts", "n"))
def _sum(Sums, Out, parts, n, SIZE: tl.constexpr):
    """Add (parts, n), in order."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total, here = tl.zeros([SIZE], tl.float32), Sums + at
    for _ in range(parts):
        total += tl.load(here, mask=at < n, other=0.0)
        here += n
    tl.store(Out + at, total.to(Out.dtype.element_ty), mask=at < n)
