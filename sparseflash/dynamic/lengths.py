"""Sequences of several lengths in one batch: keys beyond a length are not attended to.

There are two ways, whose results agree up to rounding. `hide_padding` gives q and k further
features, whose product is a very low score for padding keys. `skip_padding` makes the block mask
of every sequence on the device, and leaves out the blocks of padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from masks import BlockMask, Mask
from masks.tiles import EMPTY, FULL, pack_bits
from sparseflash.backends.protocol import Results
from sparseflash.cache import cached
from sparseflash.checks import check_tensors, is_empty, readable
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.dynamic.selection import Selection, heads_of, to_device
from sparseflash.kernels.common.device import kernels_of, on_nvidia
from sparseflash.operators.attention import plain, plain_apply
from sparseflash.problem import scale_or_default
from sparseflash.schedule.blocks import Schedule

HIDDEN = -30_000.0  # the score of a padding key: exp of it is 0, and float16 holds it
BLOCK = 128  # tokens of the blocks that are skipped, unless a BlockMask has its own
SIZES = ((32, 32), (64, 64), (128, 128))  # blocks of a BlockMask whose padding is skipped
SHORTEST = 1024  # tokens from which skipping is faster than hiding
NOWHERE = -(2**30)
PADDINGS = ("auto", "hide", "skip")

Lengths = Tensor | Sequence[int]


def attend_within(
    attend: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    lengths: Lengths | None,
    padding: str = "auto",
    *,
    starts: Lengths | None = None,
    **call: Any,
) -> Any:
    """`attend`, which is `sparseflash.attention`, over the keys within the lengths (None: all), and
    from the starts on (None: 0).

    padding: as in `keep_within`; call: the further arguments of `attend`.
    """
    if lengths is None and starts is None:
        return attend(q, k, v, mask, **call)
    check_tensors(q, k, v)
    lengths, starts = check_bounds(lengths, starts, q.shape[0], k.shape[2], q.device)
    if is_empty(q, k):
        return attend(q, k, v, mask, **call)
    call["scale"] = scale_or_default(call.get("scale"), q.shape[-1])
    return_lse = call.pop("return_lse", False)
    n_q, n_k = q.shape[2], k.shape[2]
    given = lengths, starts, call["scale"], call.get("score"), padding
    q, k, v, mask, lowest = keep_within(q, k, v, mask, *given)
    out, lse, *scores = attend(q, k, v, mask, return_lse=True, **call)
    if _by_kernels(q, k, v):
        kinds = tuple((n_q == n_k, 0, 0.0, 0.0, fill) for fill in (0.0, -torch.inf))
        out, lse = _keep(kinds, lowest, lengths, starts, lse.detach().contiguous(), out, lse)
        nothing = lse == -torch.inf if scores else None
    else:
        nothing = lse <= lowest  # the query sees no key
        if n_q == n_k:
            nothing = nothing | ~real_tokens(lengths, n_k, starts)[:, None]
        out = out.masked_fill(nothing[..., None], 0.0)
        lse = lse.masked_fill(nothing, -torch.inf)
    # beside a sink the LSE does not tell
    scores = [x.masked_fill(nothing | (x <= lowest), -torch.inf) for x in scores]
    return Results(out, lse, *scores).asked(return_lse)


def keep_within(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths: Tensor, starts: Tensor | None,
    scale: float, score: Any, padding: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Any, float]:  # fmt: skip
    """q, k, v and mask for attention over the keys within the bounds, and the LSE that a query with
    no such key does not exceed.

    score: a score function changes the score of a hidden key, so that padding is skipped, or a mask
        or extents that cannot skip raise ValueError.
    padding: "skip" leaves out the blocks of padding, for a mask that is None, a `masks.Mask` or a
        `masks.BlockMask`, the same for every batch entry, and N_q = N_k, a multiple of the block
        size: 128, or that of the BlockMask, 32, 64 or 128. "hide" takes every mask.
        "auto" skips where that is possible and N is at least 1024, but hides inside torch.compile,
        which cannot trace the block lists.
    """
    if score is not None:
        how = "pad to that, or pass an array as mask that has the lengths"
        check_skippable(mask, q.shape[2], k.shape[2], f"beside a score it cannot be hidden: {how}")
        padding = "skip"
    elif padding == "auto":
        # a compiler must not meet the conditions on N: each would be a guard of its graph
        hide = torch.compiler.is_compiling() or k.shape[2] < SHORTEST
        padding = "hide" if hide or not skippable(mask, q.shape[2], k.shape[2]) else "skip"
    if padding == "skip":
        return q, k, v, _schedule(mask, lengths, q, starts), -torch.inf
    return *hide_padding(q, k, v, lengths, scale, starts), mask, HIDDEN / 2


def check_bounds(
    lengths: Lengths | None, starts: Lengths | None, batch: int, n: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """`check_lengths` of both: where the keys of each sequence end, n by default, and begin."""
    if starts is not None:
        starts = check_lengths(starts, batch, n, device, "starts")
    if lengths is None:
        return torch.full((batch,), n, dtype=torch.int32, device=device), starts
    return check_lengths(lengths, batch, n, device), starts


def check_lengths(
    lengths: Any, batch: int, n: int, device: torch.device, name: str = "lengths"
) -> Tensor:
    """int32 (batch,) on the device, side by side, of sequences with room for n keys.

    Raises ValueError for lengths of another shape or type, and for values outside [0, n] where they
    are on the host. Values on a GPU are not read.
    """
    if not isinstance(lengths, Tensor):
        values = list(lengths) if isinstance(lengths, Sequence | np.ndarray) else [lengths]
        if not all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in values):
            raise ValueError(f"{name} is {lengths!r}; pass a tensor or a list of integers")
        lengths = torch.tensor(values, dtype=torch.int64, device="cpu")
    if lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
        how = " (mask.sum(1) of a mask of tokens)" if lengths.dtype == torch.bool else ""
        raise ValueError(
            f"{name} is {lengths.dtype} of shape {tuple(lengths.shape)}; pass int32 or int64 of"
            f" shape ({batch},), one for each sequence of the batch{how}"
        )
    if lengths.numel() and readable(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > n:
            raise ValueError(
                f"{name} holds {low if low < 0 else high}; they must lie in 0..{n}, the keys"
            )
    return lengths.to(device, torch.int32, non_blocking=True).contiguous()


def real_tokens(lengths: Tensor, n: int, starts: Tensor | None = None) -> Tensor:
    """Bool (B, n): True for the tokens from the starts on, within the lengths."""
    token = torch.arange(n, device=lengths.device)
    real = token < lengths[:, None]
    return real if starts is None else real & (token >= starts[:, None])


def hide_padding(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with further features, up to the next multiple of 8, whose product is 0 for real keys
    and HIDDEN for padding keys; and v. Padding keys and their values become 0, and so do padding
    queries where N_q = N_k.

    One copy each, with the tokens outermost as a projection lays them out. Raises ValueError for a
    scale whose inverse the dtype does not hold.
    """
    batch, _, n, head_dim = k.shape
    held = torch.finfo(q.dtype)
    if not held.tiny <= 1 / scale <= held.max:
        raise ValueError(
            f"scale is {scale}; where padding is hidden in {q.dtype} it must lie between"
            f" {1 / held.max:.2g} and {1 / held.tiny:.2g}: cast q, k and v to bfloat16 or float32"
        )
    extra = 8 - head_dim % 8
    if _by_kernels(q, k, v):
        of_q = q.shape[2] == n, extra, 1 / scale, 1 / scale, 0.0
        kinds = of_q, (True, extra, 0.0, HIDDEN / extra, 0.0), (True, 0, 0.0, 0.0, 0.0)
        return _keep(kinds, 0.0, lengths, starts, None, q, k, v)
    padding = ~real_tokens(lengths, n, starts)[:, :, None, None]
    ones = torch.full((1, 1, 1, 1), 1 / scale, dtype=q.dtype, device=q.device)
    hide = (padding * (HIDDEN / extra)).to(k.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # they may be NaN, which times 0 is NaN
    k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    if q.shape[1] == n:
        q = q.masked_fill(padding, 0.0)
    q = torch.cat([q, ones.expand(batch, *q.shape[1:3], extra)], dim=3)
    k = torch.cat([k, hide.expand(-1, -1, k.shape[2], extra)], dim=3)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _by_kernels(*tensors: Tensor) -> bool:
    """Return whether one kernel replaces the rows of padding."""
    return on_nvidia(tensors[0]) and plain(*tensors)


class _Kept(torch.autograd.Function):
    """Copies of tensors (B, H, N, D) or (B, H, N) with constants in rows of padding, whose
    gradients are 0.

    kinds: for each tensor whether lengths and starts count for it, how many columns it is given,
    what these hold in the rows that are kept and in others, and what the other columns hold there.
    lse: (B, H, N) that exceeds `lowest` in the rows that are kept; None: all do.
    """

    @staticmethod
    def forward(ctx, kinds, lowest, lengths, starts, lse, *tensors):  # type: ignore[override]
        ctx.save_for_backward(lengths, starts, lse)
        ctx.set_materialize_grads(False)
        ctx.kinds, ctx.lowest = kinds, lowest
        return (*kernels_of("dynamic").keep_rows(tensors, kinds, lengths, starts, lse, lowest),)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):  # type: ignore[override]
        given = [i for i, x in enumerate(gradients) if x is not None]
        kinds = tuple((ctx.kinds[i][0], -ctx.kinds[i][1], 0.0, 0.0, 0.0) for i in given)
        of = [gradients[i] for i in given]
        made = kernels_of("dynamic").keep_rows(of, kinds, *ctx.saved_tensors, ctx.lowest)
        found = dict(zip(given, made, strict=True))
        return *(None,) * 5, *map(found.get, range(len(gradients)))


_keep = plain_apply(_Kept)


def skippable(mask: Any, n_q: int, n_k: int) -> bool:
    """Return whether `skip_padding` takes this mask and these extents."""
    if isinstance(mask, BlockMask):
        fits = mask.block_size in SIZES and mask.batch == 1 and mask.n_q == mask.n_k == n_k
        return n_q == n_k and fits and n_k % mask.block_size[0] == 0
    alike = mask is None or (isinstance(mask, Mask) and mask.batch in (None, 1))
    return n_q == n_k and n_k % BLOCK == 0 and alike


def check_skippable(mask: Any, n_q: int, n_k: int, remedy: str) -> None:
    """Raise ValueError for a mask and extents that `skip_padding` does not take."""
    if not skippable(mask, n_q, n_k):
        shown = mask if isinstance(mask, Mask | BlockMask | None) else f"a {type(mask).__name__}"
        raise ValueError(
            "padding is skipped under None, a Mask or a BlockMask, the same for every batch entry,"
            f" with as many queries as keys, a multiple of {BLOCK} or of the block size of the"
            f" BlockMask, 32, 64 or 128; the mask is {shown}, with {n_q} queries and {n_k} keys:"
            f" {remedy}"
        )


def _schedule(
    mask: Mask | BlockMask | None, lengths: Tensor, q: Tensor, starts: Tensor | None
) -> Schedule:
    batch, heads, n, _ = q.shape
    check_skippable(mask, n, n, "take padding=hide")
    if torch.compiler.is_compiling():
        raise ValueError(
            "padding is skip inside torch.compile, which cannot trace the block lists: pass"
            " BlockSparseAttention.plan(lengths, n), made outside, for the lengths"
        )
    selection = skip_padding(blocks_of(mask, n, heads, q.device), lengths, starts)
    return schedule_from_selection(selection, n, n, batch, heads, q.device)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Cuttable(Selection):
    """A mask in blocks of b x b tokens with what cuts it at the end of a sequence.

    Attributes:
        bits: int32 (T + 1, b, words), the tiles of the mask, then one of all pairs.
        column: int32 (blocks, S), the tiles that occur in a column of blocks.
        place: int32, as codes, the place of a block's tile in `column`; NOWHERE: empty.
        prefix: int32 (b, words), row t has the bits of the keys 0 to t.
    """

    column: Tensor
    place: Tensor
    prefix: Tensor


@cached
def blocks_of(mask: Mask | BlockMask | None, n: int, heads: int, device: torch.device) -> Cuttable:
    """Return `mask` (None: all pairs) for n tokens, in its own blocks or in those of BLOCK tokens,
    which divide n. It is copied to the device once.
    """
    block = mask.block_size[0] if isinstance(mask, BlockMask) else BLOCK
    if mask is None:
        codes = np.full((1, n // block, n // block), FULL, np.int32)
        bits = np.zeros((0, block, block // 32), np.uint32)
    else:
        if isinstance(mask, Mask):
            mask = mask.build(n, n, block, heads=heads_of(mask, heads))
        codes, bits = mask.codes()[0], mask.bits
    every = np.full((1, *bits.shape[1:]), 2**32 - 1, np.uint32)
    kinds = [np.setdiff1d(codes[..., c], EMPTY) for c in range(codes.shape[2])]
    column = np.zeros((len(kinds), max(1, *map(len, kinds))), np.int32)
    place = np.full_like(codes, NOWHERE)
    for c, found in enumerate(kinds):
        column[c, : len(found)] = np.where(found == FULL, len(bits), found)
        here = codes[..., c]
        place[..., c] = np.where(here == EMPTY, NOWHERE, np.searchsorted(found, here))
    keys = np.tril(np.ones((block, block), bool))[None]
    arrays = {
        "codes": codes[None],
        "bits": np.concatenate([bits, every]).view(np.int32),
        "column": column,
        "place": place[None],
        "prefix": pack_bits(keys)[0].view(np.int32),
    }
    tensors: dict[str, Any] = {name: to_device(array, device) for name, array in arrays.items()}
    most = int((codes != EMPTY).sum())
    return Cuttable(n_q=n, n_k=n, block_size=(block, block), max_blocks=most, **tensors)


def skip_padding(blocks: Cuttable, lengths: Tensor, starts: Tensor | None = None) -> Selection:
    """Return the mask between the blocks of queries and keys that hold real tokens, with the keys
    cut at the first and the last of these. Made on the device, for every sequence.

    A block whose keys are all real is that of the mask. The key block that holds the last token,
    and that which holds the first, get new tiles, one for each tile that the mask has there.
    """
    if on_nvidia(lengths) and starts is None:
        codes, bits = kernels_of("dynamic").cut_blocks(blocks, lengths)
    else:
        codes, bits = cut_torch(blocks, lengths, starts)
    n, most = blocks.n_q, len(lengths) * blocks.max_blocks
    return Selection(codes, bits, n, n, blocks.block_size, most)


def cut_torch(
    blocks: Cuttable, lengths: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and bits of `skip_padding` in plain torch."""
    batch, slots, known = len(lengths), blocks.column.shape[1], len(blocks.bits) - 1
    n, block = blocks.n_q, blocks.block_size[0]
    first_key = torch.arange(0, n, block, dtype=torch.int32, device=lengths.device)
    last, left = lengths.clamp(max=n) - 1, lengths[:, None] - first_key
    real, whole, ends = left > 0, left >= block, last[:, None]
    if starts is not None:
        begin = starts[:, None] - first_key
        real, whole = real & (begin < block), whole & (begin <= 0)
        ends = torch.stack([last, starts.clamp(0, n - 1)], 1)
    column = ends // block  # (batch, ends), whose tiles are cut
    keys = blocks.prefix[(last[:, None] - column * block).clamp(0, block - 1)]
    first = torch.arange(known, known + batch * ends.shape[1] * slots, slots, device=last.device)
    first = first.int().view(batch, -1)  # new tile of each column
    number = first[:, :1].expand(-1, len(first_key))
    if starts is not None:
        before = starts[:, None] - column * block
        hidden = blocks.prefix[(before - 1).clamp(0, block - 1)]
        keys = torch.where(before[..., None] > 0, keys & ~hidden, keys)
        number = torch.where(last[:, None] // block == first_key // block, number, first[:, 1:])
    tiles = blocks.bits[blocks.column[column]] & keys[:, :, None, None]
    cut = (blocks.place + number[:, None, None]).clamp_(min=EMPTY)
    codes = torch.where(whole[:, None, None], blocks.codes, cut)
    codes = torch.where(real[:, None, :, None] & real[:, None, None], codes, EMPTY)
    return codes, torch.cat([blocks.bits[:known], tiles.flatten(0, 2)])
