"""`flex_attention` of torch, computed by sparseflash. See docs/guide/flex_attention.md."""

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
from sparseflash.terms import Terms

_converted: "WeakKeyDictionary[FlexMask, BlockMask]" = WeakKeyDictionary()
on_clear(_converted.clear)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Terms | None = None,
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
        query, key, value: (B, H_q, N_q, D), (B, H_kv, N_k, D) and (B, H_kv, N_k, D_v).
        score_mod: `sparseflash.Terms`, which say by name what a function of torch's computes.
        block_mask: of `create_block_mask`, which is converted once as long as it lives, or a mask
            of `masks`. Inside torch.compile only the latter; `convert` makes it.
        scale: of the scores; D ** -0.5 by default.
        enable_gqa: whether H_q may be a multiple of H_kv.
        return_lse: also return the LSE, (B, H_q, N_q) float32.
        kernel_options: of the kernels of torch; they change no result and are left unread.
        return_aux: AuxRequest(lse=True, max_scores=True), or one of them, gives (output,
            AuxOutput): a differentiable LSE, and the largest logit of each query, (B, H_q, N_q)
            float32.

    Raises:
        ValueError: a function as score_mod, or what `sparseflash.attention` does not take.
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
    options: dict[str, Any] = {"scale": scale, "terms": _terms(score_mod)}
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


def _terms(score_mod: Any) -> Terms | None:
    if score_mod is None or isinstance(score_mod, Terms):
        return score_mod
    name = getattr(score_mod, "__qualname__", repr(score_mod))
    raise ValueError(
        f"score_mod is {name}; pass sparseflash.Terms(...) for soft-capping, slopes or a bias by"
        " distance, or None. What it forbids belongs into a mask_mod, a factor into scale; for all"
        " else take torch's flex_attention"
    )
