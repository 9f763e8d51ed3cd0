"""Attention for the models of `transformers`, under the name "sparse".

Importing this module registers it. A model then takes `attn_implementation="sparse"`, or `use` sets
it together with a mask. See docs/guide/transformers.md.
"""

from typing import Any

import torch
from torch import Tensor

import masks
from masks import Mask
from masks.registry import by_text
from sparseflash.attention import attention
from sparseflash.integrations import integration
from sparseflash.integrations.tensors import join, mask_of_tensor
from sparseflash.terms import Terms

with integration("transformers", "5.23"):
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel

    from sparseflash.integrations.transformers_masks import make_mask

NAME = "sparse"  # names with "flash" would be taken for FlashAttention
ATTRIBUTE = "sparse_mask"  # of a config: the text of the mask

# Arguments that change the scores, and so cannot be ignored.
REFUSED = {
    "position_bias": "take attn_implementation='sdpa'",
    "indices": "take attn_implementation='eager'",
    "cache": "take generate() in place of continuous batching",
    "output_attentions": "take attn_implementation='eager' where the weights are needed",
}


def use(model: PreTrainedModel, mask: Mask | str | None = None) -> PreTrainedModel:
    """Let `model` attend through sparseflash, and return it.

    The model's own mask stays: causality, sliding windows, padding and packed sequences. `mask` is
    joined to it with `&`. Its positions count from the first token that is no padding, and in
    packed sequences from the first token of each.

    Args:
        mask: a `masks.Mask` that has a text, its text, or None for the model's own mask alone. The
            text is kept as `sparse_mask` in the config, and so saved and loaded with the model.

    Raises:
        ValueError: a model that transformers cannot switch, or a mask without text. With a mask: a
            model with a decoder and an encoder, or of several parts; use one part then.
    """
    config = model.config
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} does not go through AttentionInterface: take a model that"
            " does, or put sparseflash.BlockSparseAttention into its layers"
        )
    if mask is None:
        if hasattr(config, ATTRIBUTE):
            delattr(config, ATTRIBUTE)
        return model
    two = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    if two or any(getattr(config, part, None) for part in config.sub_configs):
        raise ValueError(
            f"mask is given for {type(model).__name__}, which has several sequences: call use() for"
            " the part of the model that it is meant for, and with mask=None for the model"
        )
    mask = masks.parse(mask) if isinstance(mask, str) else mask
    if not isinstance(mask, Mask) or not mask.spelled:
        raise ValueError(
            f"mask is {mask!r}; pass a masks.Mask that masks.parse can read, or its text"
            " (masks.pattern gives a formula a name)"
        )
    setattr(config, ATTRIBUTE, mask.key)
    return model


def mask_of(config: Any) -> Mask | None:
    """The mask that the config of a model, or None, asks for."""
    text = getattr(config, ATTRIBUTE, None)
    if text is None:
        return None
    if text not in _MASKS:
        _MASKS[text] = masks.parse(text)
    return _MASKS[text]


_MASKS: dict[str, Mask] = {}
by_text(_MASKS.clear)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function of AttentionInterface: (B, N_q, H, D_v), and no weights.

    Args:
        attention_mask: what `sparse_mask` made, a 4D tensor of the user, or None where the model
            makes none.
        is_causal: whether None means causal, as for sdpa; by default what the module says.
        s_aux: (H,) learned scores of attention sinks, which have no value.
        softcap: bound of the scores, as in Gemma 2.
    """
    for name, remedy in REFUSED.items():
        if (given := others.get(name)) is not None and given is not False:
            what = f"a {type(given).__name__}" if isinstance(given, Tensor) else repr(given)
            raise ValueError(f"{name} is {what}, which sparseflash has no place for: {remedy}")
    if not isinstance(attention_mask, Mask):
        if attention_mask is not None:
            own = mask_of_tensor(attention_mask, query.shape[2])
        else:
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            own = masks.causal() if is_causal and query.shape[2] > 1 else None
        attention_mask = join(own, mask_of(getattr(module, "config", None)))
    if attention_mask is not None and attention_mask.per_layer:
        attention_mask = attention_mask.layer(module.layer_idx)  # pyright: ignore
    terms = None if s_aux is None and softcap is None else Terms(s_aux, softcap)
    options = {"scale": scaling, "dropout_p": dropout, "terms": terms}
    out = attention(query, key, value, attention_mask, **options)
    return out.transpose(1, 2).contiguous(), None


def sparse_mask(*, config: Any = None, **given: Any) -> Mask:
    """The function of AttentionMaskInterface: `make_mask`, with the mask that the config has."""
    return make_mask(mask_of(config), **given)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sparse_mask)
