"""`flex_attention` of torch, computed by sparseflash. See docs/guide/flex_attention.md."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from masks import BlockMask, Mask
from masks.interop import from_flex
from sparseflash.attention import attention
from sparseflash.cache import on_clear
from sparseflash.score.function import Bound, Score, from_score_mod

_converted: "WeakKeyDictionary[FlexMask, BlockMask]" = WeakKeyDictionary()
on_clear(_converted.clear)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | Score | Bound | None = None,
    block_mask: FlexMask | BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention with the same arguments and results.

    A query with nothing to attend to gives output 0, LSE -inf and gradients 0.

    Args:
        query, key, value, scale, enable_gqa, return_lse: as there.
        score_mod: a function (score, b, h, q_idx, kv_idx), which is traced at every call; the
            tensors that it indexes get gradients. Or what `convert_score` makes of it, or a score
            of `sparseflash.score`. Inside torch.compile no function.
        block_mask: of `create_block_mask`, which is converted once as long as it lives, or a mask
            of `masks`. Inside torch.compile only the latter; `convert` makes it.
        kernel_options: of the kernels of torch; they change no result and are left unread.
        return_aux: AuxRequest(lse=True, max_scores=True), or one of them, gives (output,
            AuxOutput): a differentiable LSE, and the largest logit of each query, (B, H_q, N_q)
            float32.

    Raises:
        ValueError: what in a function cannot be traced, or `sparseflash.attention` does not take.
    """
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads, key {key.shape[1]}: pass enable_gqa=True"
        )
    if return_aux is not None and return_lse:
        raise ValueError(
            f"return_aux is {return_aux} and return_lse {return_lse}: pass AuxRequest(lse=True)"
            " alone"
        )
    wanted = AuxRequest(lse=return_lse) if return_aux is None else return_aux
    mask = convert(block_mask) if isinstance(block_mask, FlexMask) else block_mask
    options: dict[str, Any] = {"scale": scale}
    if score_mod is not None:
        known = isinstance(score_mod, Score | Bound)
        options["score"] = score_mod if known else convert_score(score_mod)
    options |= {"return_lse": wanted.lse, "return_max_scores": wanted.max_scores}
    found = attention(query, key, value, mask, **options)
    if return_aux is None:
        return found
    out, *others = found if any(wanted) else (found,)
    names = [name for name, asked in wanted._asdict().items() if asked]
    return out, AuxOutput(**dict(zip(names, others, strict=True)))


def convert(block_mask: FlexMask) -> BlockMask:
    """Return the exact block mask of one of torch, which must not be changed in place while it
    lives.

    Raises ValueError for block sizes other than multiples of 16 up to 256.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "block_mask is torch's BlockMask inside torch.compile: pass convert(block_mask), made"
            " outside, in its place"
        )
    if block_mask not in _converted:
        _converted[block_mask] = from_flex(block_mask)
    return _converted[block_mask]


def convert_score(score_mod: Callable[..., Any]) -> Bound:
    """Return the score function of one of torch, score_mod(score, b, h, q_idx, kv_idx), with the
    tensors that it indexes as they are now.

    Raises ValueError for what cannot be traced; see `sparseflash.score`.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "score_mod is a function inside torch.compile: pass convert_score(score_mod), made"
            " outside, or sparseflash.score with its tensors"
        )
    if not callable(score_mod):
        raise ValueError(f"score_mod is {score_mod!r}; pass a function, or sparseflash.score(...)")
    return from_score_mod(score_mod)
