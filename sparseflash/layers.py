"""Modules that a model is built from: block-sparse attention with its projections, and rotary
position embeddings.
"""

import math
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from masks import BlockMask, Mask
from masks.checks import integer
from sparseflash.attention import attention, plan
from sparseflash.backends.registry import NAMES
from sparseflash.checks import check_options, is_number, is_wrapped
from sparseflash.distributed.plan import ContextParallel
from sparseflash.dynamic.lengths import (
    PADDINGS,
    Lengths,
    attend_within,
    blocks_of,
    check_lengths,
    check_skippable,
    skip_padding,
)
from sparseflash.dynamic.selection import Selection
from sparseflash.request import as_mask_or_selector, autocast, refuse_unknown
from sparseflash.schedule.blocks import Schedule
from sparseflash.score.function import Bound, Score
from sparseflash.select.base import Selector
from sparseflash.shards import separable


class BlockSparseAttention(nn.Module):
    """Multi-head attention under a block mask: (B, N, dim) to (B, N, dim).

    Args:
        dim: features of the input and of the output.
        heads: query heads.
        kv_heads: key and value heads, a divisor of `heads`; equal to `heads` by default.
        head_dim: features of a head; dim / heads by default.
        mask: a `masks.Mask`, its text, a `masks.BlockMask`, a bool array as in
            `sparseflash.attention`, a selector of `sparseflash.select`, a plan of
            `sparseflash.distributed`, or None for dense attention.
        layer: the number of this layer, from 0. A mask that differs from layer to layer needs it;
            other masks are the same with any number.
        bias: whether the projections have biases.
        dropout: probability that an attention probability is dropped, in training only.
        rotary: a module that turns queries and keys (B, N, heads, head_dim) by their positions,
            such as `Rotary()`. With a `ContextParallel` mask it is called with `positions=`, the
            places of the own tokens in the whole sequence.
        padding: how keys beyond `lengths` are left out: "auto", "hide" or "skip"; see
            docs/guide/own_model.md. The results agree up to rounding.
        keep_max_scores: whether a forward leaves the largest logit of each head, over all
            sequences and queries, and all that torch.vmap maps over, in `max_scores`: (heads,)
            float32, or float64 like the weights, without a gradient; None before the first forward.
        deterministic, backend: as in `sparseflash.attention`.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    The parameters are those of four linear layers: `q`, `k`, `v` and `out`. Their features are
    those of head 0, then of head 1, and so on. So tensor parallelism splits them by heads: q, k and
    v by `ColwiseParallel`, out by `RowwiseParallel`. A split into any other share than the same
    share of whole heads raises ValueError in `forward`.

    Raises ValueError for arguments out of range, and for a mask that differs from layer to layer
    where `layer` is None.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        mask: Mask | BlockMask | Selector | ContextParallel | str | None = None,
        layer: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: nn.Module | None = None,
        padding: str = "auto",
        keep_max_scores: bool = False,
        deterministic: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            refuse_unknown("BlockSparseAttention", unknown)
        dim, heads = integer("dim", dim, min=1), integer("heads", heads, min=1)
        if kv_heads is not None:
            kv_heads = integer("kv_heads", kv_heads, min=1)
        if head_dim is not None:
            head_dim = integer("head_dim", head_dim, min=1)
        if head_dim is None and dim % heads:
            raise ValueError(
                f"dim is {dim}, not a multiple of heads, {heads}; pass head_dim, or another dim"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; it must divide heads, {heads}")
        if not is_number(dropout) or not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout!r}; it must be a number in [0, 1)")
        if padding not in PADDINGS:
            raise ValueError(f"padding is {padding!r}; choose one of {', '.join(PADDINGS)}")
        if not isinstance(rotary, nn.Module | None):
            raise ValueError(f"rotary is {rotary!r}; pass a module such as Rotary(), or None")
        flags = {"bias": bias, "keep_max_scores": keep_max_scores, "deterministic": deterministic}
        check_options(None, 0.0, backend, NAMES, flags)
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads or heads
        self.head_dim = head_dim or dim // heads
        self.mask = _mask(mask, layer)
        self.dropout, self.padding = dropout, padding
        self.deterministic, self.backend = deterministic, backend
        self.keep_max_scores = keep_max_scores
        self.max_scores: Tensor | None = None
        self.rotary = rotary
        inner, shared = heads * self.head_dim, self.kv_heads * self.head_dim
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q, self.k, self.v = (nn.Linear(dim, n, **made) for n in (inner, shared, shared))
        self.out = nn.Linear(inner, dim, **made)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        lengths: Lengths | Selection | Schedule | None = None,
        starts: Lengths | None = None,
        score: Score | Bound | None = None,
        **unknown: Any,
    ) -> Tensor:
        """(B, N, dim) from x (B, N, dim).

        Args:
            x: (B, N, dim).
            context: (B, N_k, dim), what keys and values are made of; x by default.
            lengths: (B,) ints, how many keys of each sequence count, a mask of
                `sparseflash.packed`, or what `plan` made of either. Output beyond the length of a
                sequence means nothing.
            starts: (B,) ints, the first key of each sequence that counts, with `lengths` that are
                ints or None. Output before it means nothing.
            score: a function of the scores with its tensors, as in `sparseflash.attention`.
        """
        if unknown:
            refuse_unknown("BlockSparseAttention", unknown)
        _check_tokens("x", x, self.dim)
        if isinstance(lengths, Selection):
            lengths = self.plan(lengths, x.shape[1]) if x.numel() else None
        if context is None:
            context = x
        else:
            _check_tokens("context", context, self.dim, x.shape[0])
        features = self.q(x), self.k(context), self.v(context)
        self._check_heads(score, *(t.shape[2] for t in features))
        q, k, v = (t.unflatten(2, (-1, self.head_dim)) for t in features)
        if self.rotary is not None:
            at: dict[str, Any] = {}
            if isinstance(self.mask, ContextParallel):
                at = {"positions": self.mask.positions(x.device)}
            q, k = self.rotary(q, **at), self.rotary(k, **at)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        given = {"starts": starts, "score": score}
        given = {name: x for name, x in given.items() if x is not None}
        found = self.attend(q, k, v, lengths, **given)
        return self.out(found.transpose(1, 2).flatten(2))

    def _check_heads(self, score: Any, *widths: int) -> None:
        """Raise ValueError unless q, k and v have the features of all heads, or of a share of them
        that the options can run on.
        """
        whole = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        if list(widths) == whole:
            return
        parts = whole[0] // max(widths[0], 1)
        if not parts or self.kv_heads % parts or [width * parts for width in widths] != whole:
            raise ValueError(
                f"q, k and v have {widths} features, of {tuple(whole)} for {self.heads} query and"
                f" {self.kv_heads} key heads of {self.head_dim}: split all three into the same"
                " number of parts, a divisor of the key heads"
            )
        if self._options["dropout_p"] or score is not None or not separable(self.mask)[1]:
            raise ValueError(
                f"the layer has {self.heads // parts} of {self.heads} heads, but dropout, the"
                f" score or the mask {self.mask} depends on the number of the head: pass"
                " use_local_output=False to ColwiseParallel"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | Schedule | None = None,
        starts: Lengths | None = None, score: Score | Bound | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention between heads: (B, heads, N, head_dim) from q of this shape, k and v."""
        mask, (q, k, v) = self.mask, autocast(q, k, v)  # what `rotary` returns may be wider
        if isinstance(lengths, Schedule):
            _check_joined(mask)
            mask, lengths = lengths, None
        elif isinstance(mask, Selector):
            mask = mask(q, k)
        options: dict[str, Any] = self._options | {"return_max_scores": self.keep_max_scores}
        options |= {"starts": starts, "score": score}
        if isinstance(mask, ContextParallel):  # lengths are of the whole sequences
            found = attention(q, k, v, mask, lengths=lengths, **options)  # type: ignore[arg-type]
        else:
            call = (attention, q, k, v, mask, lengths, self.padding)
            found = attend_within(*call, **options)
        if not self.keep_max_scores:
            return found
        out, max_scores = found
        empty = max_scores.new_full((1, self.heads, 1), -math.inf)
        largest = (max_scores if max_scores.numel() else empty).amax((0, 2))
        self.max_scores = largest if torch.compiler.is_compiling() else _unwrapped_max(largest)
        return out

    @property
    def _options(self) -> dict[str, Any]:
        dropout = self.dropout if self.training else 0.0
        return {
            "dropout_p": dropout, "deterministic": self.deterministic, "backend": self.backend
        }  # fmt: skip

    def plan(
        self, lengths: Lengths | Selection, n: int, dtype: torch.dtype | None = None
    ) -> Schedule:
        """Return the block lists of padded or packed sequences of n tokens; `forward` takes them.

        Layers of the same mask and sizes can share them. They are made on the device, outside of
        any graph of torch.compile, and are for calls in this dtype; by default that of the
        weights, or of autocast. A mask of `sparseflash.packed` is joined to that of the layer.

        Raises ValueError where padding cannot be skipped: the mask must be None, a `masks.Mask`
        or a `masks.BlockMask`, the same for every batch entry, and n a multiple of 128 or of the
        block size of the BlockMask, 32, 64 or 128.
        """
        device = self.q.weight.device
        if dtype is None:
            enabled = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if enabled else self.q.weight.dtype
        heads = (self.heads, self.kv_heads)
        shape = (n, heads, self.head_dim)
        return plan_lengths(self.mask, lengths, *shape, dtype, device, **self._options)

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}", f"heads={self.heads}", f"head_dim={self.head_dim}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.heads else []
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([*parts, f"mask={self.mask}"])


def plan_lengths(
    mask: Any,
    lengths: Lengths | Selection,
    n: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> Schedule:
    """`BlockSparseAttention.plan`; heads: of queries, and of keys and values."""
    n = integer("n", n, min=1)
    if isinstance(lengths, Selection):
        _check_joined(mask)
        if isinstance(mask, Mask) and mask.per_head and lengths.heads == 1:
            codes = lengths.codes.expand(-1, heads[0], -1, -1)
            most = lengths.max_blocks * heads[0]
            lengths = replace(lengths, codes=codes, max_blocks=most, owned=0)
        blocks = lengths if mask is None else lengths & mask
        batch = blocks.batch
    else:
        batch = lengths.numel() if isinstance(lengths, Tensor) else np.size(lengths)
        if not batch:
            raise ValueError(f"lengths is {lengths!r}; give that of one sequence at least")
        check_skippable(mask, n, n, "pass the lengths themselves")
        lengths = check_lengths(lengths, batch, n, device)
        blocks = skip_padding(blocks_of(mask, n, heads[0], device), lengths)
    n_k = blocks.n_k
    q, k, v = (
        torch.empty(batch, tokens, h, head_dim, dtype=dtype, device=device).transpose(1, 2)
        for tokens, h in ((n, heads[0]), (n_k, heads[1]), (n_k, heads[1]))
    )
    made = plan(blocks, q, k, v, **options)
    assert isinstance(made, Schedule)
    return made


def _check_joined(mask: Any) -> None:
    """Raise ValueError for a mask of a layer that a packed mask or a plan cannot hold."""
    if isinstance(mask, Selector | ContextParallel):
        shown = repr(mask) if isinstance(mask, Selector) else "a plan of context_parallel"
        raise ValueError(
            f"the mask is {shown}, and lengths a packed mask or a plan: pass ints, or a layer whose"
            " mask is a Mask or None"
        )


def _unwrapped_max(x: Tensor) -> Tensor:
    """x as it outlives the transforms of torch.func: the largest over what torch.vmap maps."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while is_wrapped(x):
        mapped = functorch.is_batchedtensor(x)
        dim, x = functorch.maybe_get_bdim(x), functorch.get_unwrapped(x)
        x = x.amax(dim) if mapped else x
    return x


def _check_tokens(name: str, x: Any, dim: int, batch: int | None = None) -> None:
    """Raise ValueError unless x is a tensor (batch, N, dim); None: of any batch."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; pass a torch tensor")
    if x.ndim != 3 or x.shape[2] != dim or batch not in (None, x.shape[0]):
        wanted = "batch" if batch is None else batch
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({wanted}, N, {dim})")


def _mask(mask: Any, layer: int | None) -> Mask | BlockMask | Selector | ContextParallel | None:
    if isinstance(mask, ContextParallel):
        return mask
    mask = as_mask_or_selector(mask)
    if layer is not None:
        layer = integer("layer", layer, min=0)
    if isinstance(mask, Mask):
        if layer is None and mask.per_layer:
            raise ValueError(f"{mask} differs from layer to layer; pass layer=, the number of this")
        return mask if layer is None else mask.layer(layer)
    return mask


class Rotary(nn.Module):
    """Rotary position embeddings (Su et al., arXiv 2104.09864).

    Features i and i + r / 2 of the first r = fraction * head_dim features are a pair, which
    position t turns by the angle t * base ** (-2 i / r), as in GPT-NeoX and Llama. The further
    features stay as they are.
    """

    def __init__(self, base: float = 10_000.0, fraction: float = 1.0):
        super().__init__()
        if not isinstance(base, Real) or not 1 < base < math.inf:
            raise ValueError(f"base is {base!r}; it must be a finite number above 1")
        if not isinstance(fraction, Real) or not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction!r}; it must be a number in (0, 1]")
        self.base, self.fraction = base, fraction

    def forward(self, x: Tensor, start: int = 0, positions: Tensor | None = None) -> Tensor:
        """x (B, N, heads, head_dim), turned; the same shape and dtype.

        start: the position of the first token: the number of those before it, which a cache holds.
        positions: (N,), those of all tokens, where they do not follow one another.
        """
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            what = type(x).__name__
            if isinstance(x, Tensor):
                what = f"{x.dtype} of shape {tuple(x.shape)}"
            raise ValueError(f"x is {what}; pass floating-point (batch, N, heads, head_dim)")
        turned = round(self.fraction * x.shape[-1])
        if turned % 2 or not turned:
            raise ValueError(
                f"rotary turns {turned} of {x.shape[-1]} features; choose an even number of them"
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        if positions is not None:
            if positions.shape != x.shape[1:2]:
                raise ValueError(
                    f"positions has shape {tuple(positions.shape)}, x {x.shape[1]} tokens: give one"
                    " number for each"
                )
            cos, sin = _turns(positions.to(wide), turned, self.base)
        else:
            made = torch.ops.sparseflash.rotary if torch.compiler.is_compiling() else rotary_table
            cos, sin = made(x.shape[1], turned, self.base, wide == torch.float64, x.device, start)
        cos, sin = cos[:, None], sin[:, None]  # (N, 1, turned / 2)
        first, *rest = (x,) if turned == x.shape[-1] else (x[..., :turned], x[..., turned:])
        a, b = first.to(wide).chunk(2, dim=-1)
        pair = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
        return torch.cat([*pair, *rest], dim=-1)

    def extra_repr(self) -> str:
        return f"base={self.base}, fraction={self.fraction}"


def rotary_table(
    n: int, turned: int, base: float, double: bool, device: torch.device, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (n, turned / 2) of the angles of `Rotary`, in float64 or float32."""
    dtype = torch.float64 if double else torch.float32
    return _turns(torch.arange(start, start + n, dtype=dtype, device=device), turned, base)


def _turns(token: Tensor, turned: int, base: float) -> tuple[Tensor, Tensor]:
    place = torch.arange(0, turned, 2, dtype=token.dtype, device=token.device)
    angle = token[:, None] * base ** (-place / turned)
    return angle.cos(), angle.sin()


# An operator, or the compiler would compute power, cosine and sine again for every head and batch.
# It takes no dtype: AOTInductor of torch 2.11 passes float64 for float32.
torch.library.define(
    "sparseflash::rotary",
    "(SymInt n, int turned, float base, bool double, Device device, SymInt start=0)"
    " -> (Tensor, Tensor)",
)
torch.library.impl("sparseflash::rotary", "CompositeExplicitAutograd")(rotary_table)
torch.library.register_fake("sparseflash::rotary")(rotary_table)
