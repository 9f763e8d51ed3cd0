"""Biases that models of `transformers` add to the scores.

Most models pass a bias to their attention, or add it to their mask, as a tensor for every pair. T5
and its kin compute one by distance, and the classes in `OWN` compute attention themselves.
"""

from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import dropout
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from sparseflash.score import Bound, Score, score

CONTEXT = "sparse_context"  # of a module: the plan of the sequence that the ranks share
NAME = "sparse"  # of our attention; names with "flash" would be taken for FlashAttention

#: s + bias, (H, N_q + N_k - 1): entry N_k - 1 is of the first query and the first key.
_by_distance = score(lambda s, h, q, k, n_k, bias: s + bias[h, q - k + n_k - 1])


def score_of(cap: float | None, device: torch.device, n_k: int, *biases: Any) -> Bound | None:
    """Return the score function that bounds scores of n_k keys by `cap tanh(s / cap)` and then adds
    biases.

    biases: tensors (B, H, N_q, N_k) with extents of 1, what `distance_bias` made, or None. Raises
    ValueError for a bias by distance together with another change of the scores.
    """
    tensors = [x for x in biases if isinstance(x, Tensor)]
    tensors = [x for x in tensors if x.requires_grad or x.any()]  # T5's cross-attention adds zeros
    made: list[Any] = [x for x in biases if callable(x)]
    if made and (tensors or cap is not None):
        raise ValueError(
            "attention_mask is a bias, or softcap is given, beside a bias by distance: pass"
            " attention_mask as booleans, or take attn_implementation='sdpa'"
        )
    if made:
        return made[0](device, n_k)
    if not tensors:
        return None if cap is None else _added(cap)()
    bias = sum(tensors[1:], tensors[0])
    varies = [extent > 1 for extent in bias.shape]
    varies[3] |= not any(varies)
    return _added(cap, *varies)(bias=bias[tuple(slice(None) if more else 0 for more in varies)])


@cache
def _added(cap: float | None, *varies: bool) -> Score:
    """Return the sum of a score, bounded by `cap`, and a bias of the dimensions in `varies`."""

    def capped(s):
        return s if cap is None else cap * np.tanh(s / cap)

    def added(s, b, h, q, k, bias):
        at = zip((b, h, q, k), varies, strict=True)
        return capped(s) + bias[tuple(x for x, more in at if more)]

    return score(added if varies else capped)


def replace_methods(layer: Any, attend: Any, config: Any) -> None:
    """Let attention as of T5, or of `OWN`, go through `attend` while `config` asks for it."""
    name, function = "forward", OWN.get(type(layer).__name__)
    if function is not None:
        vars(layer)["config"] = config  # Bloom and MPT have none
    elif "past_seen_tokens" in signature(getattr(layer, "compute_bias", score)).parameters:
        name, function = "compute_bias", distance_bias
    if function is not None:
        vars(layer)[name] = partial(_call, layer, name, function, attend)


def _call(layer: Any, name: str, function: Any, attend: Any, *args: Any, **given: Any) -> Any:
    if layer.config._attn_implementation == NAME:
        return function(layer, attend, *args, **given)
    return getattr(type(layer), name)(layer, *args, **given)


def distance_bias(layer, attend, query_length, key_length, device=None, past_seen_tokens=0):
    """Return what makes T5's bias a score function, without a tensor for every pair. Where ranks
    share a sequence the bias is that of the whole.
    """
    if (context := getattr(layer, CONTEXT, None)) is not None:
        query_length = key_length = context.n

    def make(device: torch.device, n_k: int) -> Bound:  # in each layer: it may be recomputed
        n_k = n_k if context is None else key_length
        last = past_seen_tokens + query_length - 1  # number of the last query
        row = type(layer).compute_bias(layer, 1, query_length + n_k - 1, None, last)  # (1, H, 1, n)
        return _by_distance(bias=row[0, :, 0].flip(1).to(device))

    return make


def _bloom(layer, attend, x, residual, *, alibi, attention_mask, layer_past, use_cache, **others):
    q, k, v = layer._reshape(layer.query_key_value(x))
    k, v = (k, v) if layer_past is None else layer_past.update(k, v, layer.layer_idx)
    others |= {"dropout": layer.attention_dropout.p * layer.training}
    bias = alibi.unflatten(0, (len(q), -1))  # (B, H, 1, N_k)
    out, _ = attend(
        layer, q, k, v, attention_mask, scaling=layer.inv_norm_factor, position_bias=bias, **others
    )
    out = layer.dense(out.flatten(2))
    return residual + dropout(out, layer.hidden_dropout, layer.training), None


def _mpt(
    layer, attend, x, *, position_bias, attention_mask, cache=None, past_key_values=None, **others
):
    cache = past_key_values if cache is None else cache  # transformers 5.23 has the longer name
    qkv = layer.Wqkv(x)
    qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv) if layer.clip_qkv else qkv
    q, k, v = (part.unflatten(2, (layer.n_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, 2))
    k, v = (k, v) if cache is None else cache.update(k, v, layer.layer_idx)
    others |= {"dropout": layer.attn_dropout_p * layer.training}
    bias = position_bias[None, :, :, -k.shape[2] :]  # (1, H, 1, N_k)
    out, _ = attend(
        layer, q, k, v, attention_mask, scaling=layer.softmax_scale, position_bias=bias, **others
    )
    return layer.out_proj(out.flatten(2)), None


def _falcon(
    layer, attend, x, *, alibi, attention_mask, layer_past, use_cache, position_embeddings, **others
):
    heads = layer._split_heads(layer.query_key_value(x))
    q, k, v = (part.transpose(1, 2) for part in heads)
    if alibi is None:  # else it is in attention_mask, with the scale of the scores
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    k, v = (k, v) if layer_past is None else layer_past.update(k, v, layer.layer_idx)
    p = layer.attention_dropout.p * (layer.training and alibi is not None)  # as its own
    out, _ = attend(
        layer, q, k, v, attention_mask, dropout=p, scaling=layer.inv_norm_factor, **others
    )
    return layer.dense(out.flatten(2)), None


#: Attention that does not go through AttentionInterface, by the name of its class.
OWN = {"BloomAttention": _bloom, "MptAttention": _mpt, "FalconAttention": _falcon}
