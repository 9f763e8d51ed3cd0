"""Vision transformers in the style of `timm`, whose attention modules have `qkv` and `proj`."""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

import masks
from masks import Mask
from sparseflash.attention import attention
from sparseflash.integrations import join, mask_of_tensor
from sparseflash.request import as_mask_or_selector
from sparseflash.select.base import Selector

NEEDED = ("qkv", "proj", "num_heads")
WEIGHTS = {"qkv", "q_norm", "k_norm", "norm", "gate", "proj"}  # modules that may have some


def use(model: nn.Module, mask: Mask | Selector | str | None = None) -> nn.Module:
    """Let the attention modules of `model` go through sparseflash with a mask, and return it.

    Modules, parameters and their names stay; the forward of each attention module is replaced.
    These have the form of `timm.layers.Attention`: `qkv`, `num_heads`, `proj`, and perhaps `scale`,
    `q_norm`, `k_norm`, `attn_drop`, `norm`, `gate` and `proj_drop`.

    Args:
        mask: of all tokens, its text, a bool array, or a selector. With a class token before the
            patches: `masks.neighborhood((height, width), 7) >> masks.shift(1) |
            masks.global_tokens(1)`.

    Raises:
        ValueError: a model without such modules, or with others that have `num_heads` and are no
            cross, class or pooling attention by name; or with one that computes something else than
            softmax attention, because it adds a bias or turns positions, for instance.
    """
    given = as_mask_or_selector(mask)
    found = [m for m in model.modules() if all(hasattr(m, name) for name in NEEDED)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention with {', '.join(NEEDED)}: put"
            " sparseflash.BlockSparseAttention into its layers"
        )
    inside = {part for layer in found for part in layer.modules()}
    for other in model.modules():
        kind = type(other).__name__
        apart = any(word in kind for word in ("Cross", "Class", "Pool"))  # not between all tokens
        if hasattr(other, "num_heads") and not apart and inside.isdisjoint(other.modules()):
            raise ValueError(
                f"{type(model).__name__} has {kind} without qkv besides, which would not go by the"
                " mask: call use(part, mask) for parts of the model"
            )
    for layer in found:
        vars(layer).pop("forward", None)  # of an earlier call
        _check(layer)
    for number, layer in enumerate(found):
        chosen = given.layer(number) if isinstance(given, Mask) else given
        layer.forward = partial(_forward, layer, chosen)
    return model


def _check(layer: Any) -> None:
    """Raise ValueError unless the module gives on a few tokens what `_forward` gives."""
    training = layer.training
    layer.eval()
    try:
        weight = layer.qkv.weight
        tokens = torch.arange(14 * weight.shape[1]).sin().view(2, 7, -1)
        tokens = tokens.to(weight.device, weight.dtype)
        if others := {name.split(".")[0] for name, _ in layer.named_parameters()} - WEIGHTS:
            raise TypeError(f"it has parameters of its own: {', '.join(sorted(others))}")
        if others := signature(layer.forward).parameters.keys() - signature(_forward).parameters:
            raise TypeError(f"forward has arguments of its own: {', '.join(sorted(others))}")
        with torch.no_grad():
            torch.testing.assert_close(_forward(layer, None, tokens), layer(tokens))
    except Exception as error:
        raise ValueError(
            f"{type(layer).__name__} is not plain softmax attention of queries, keys and values:"
            " put sparseflash.BlockSparseAttention into the layers, which takes a bias such as that"
            " of Swin and BEiT as score=sparseflash.score_rules.swin(rows, columns)(bias=table)"
        ) from error
    finally:
        layer.train(training)


def _forward(
    layer: Any, mask: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Return the output of an attention module for x (B, N, dim)."""
    batch, n, _ = x.shape
    qkv = layer.qkv(x).reshape(batch, n, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)  # (B, heads, N, head_dim)
    q, k = _apply(layer, "q_norm", q), _apply(layer, "k_norm", k)
    if isinstance(mask, Selector):
        if attn_mask is not None or is_causal:
            raise ValueError(
                f"attn_mask or is_causal is given, and the mask {mask} depends on q and k: put the"
                " mask into the within= of the selector"
            )
        allowed = mask(q, k)
    else:
        own = None
        if attn_mask is not None:  # the last extents are N, N, as in torch
            own = mask_of_tensor(attn_mask[(None,) * (4 - attn_mask.ndim)], n, n)
        allowed = join(mask, own, masks.causal() if is_causal else None)
    dropout = layer.attn_drop.p if layer.training and hasattr(layer, "attn_drop") else 0.0
    scale = getattr(layer, "scale", None)
    out = attention(q, k, v, allowed, scale=scale, dropout_p=dropout)
    out = _apply(layer, "norm", out.transpose(1, 2).reshape(batch, n, -1))
    if getattr(layer, "gate", None) is not None:
        out = out * layer.gate(x).sigmoid()
    return _apply(layer, "proj_drop", layer.proj(out))


def _apply(layer: Any, name: str, x: Tensor) -> Tensor:
    """Return the part of a layer with this name, applied to x; x where there is none."""
    part = getattr(layer, name, None)
    return x if part is None else part(x)
