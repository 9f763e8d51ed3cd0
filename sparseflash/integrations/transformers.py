"""Attention for the models of `transformers`, under the name "sparse".

Importing this module registers it. A model then takes `attn_implementation="sparse"`, or `use` sets
it together with a mask. See docs/guide/transformers.md.
"""

from copy import deepcopy
from functools import cache, partial
from inspect import signature, unwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor

import masks
from masks import Mask
from masks.registry import by_text
from sparseflash.attention import attention
from sparseflash.distributed.plan import ContextParallel
from sparseflash.dynamic.selection import Selection, selection_of_pairs
from sparseflash.integrations import check_extents, integration, is_bias, join, mask_of_tensor
from sparseflash.request import remedy

with integration("transformers", "5.23"):
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel

    from sparseflash.integrations.transformers_masks import ModelMask, make_mask, two_lengths
    from sparseflash.integrations.transformers_scores import (
        CONTEXT,
        NAME,
        OWN,
        replace_methods,
        score_of,
    )

ATTRIBUTE = "sparse_mask"  # of a config: the text of the mask

# Arguments that cannot be ignored.
REFUSED = {
    "cache": "take generate() in place of continuous batching",
    "output_attentions": "take attn_implementation='eager' where the weights are needed",
}
# Tensors that change nothing here, or are in the mask already.
KNOWN = {"input_ids", "position_ids", "seq_idx", "num_items_in_batch"}
KNOWN |= {"max_length_q", "max_length_k", "shift_labels"}
LAYER = "sparse_layer"  # of a module without layer_idx: its number
BLOCK = 64  # of the selection that is made of the choices of a model


def use(
    model: PreTrainedModel,
    mask: Mask | str | None = None,
    *,
    context: ContextParallel | None = None,
) -> PreTrainedModel:
    """Let `model` attend through sparseflash, and return it.

    The model's own mask stays (causality, sliding windows, padding and packed sequences), and so do
    its biases of the scores. `mask` is joined to the former with `&`. Its positions count from the
    first token that is no padding, and in packed sequences from the first token of each. The model
    gets a config of its own; the attention of Bloom, MPT and Falcon also gets another forward.

    Args:
        model: a model, or the part of one that a mask is meant for, such as `model.get_encoder()`.
        mask: a `masks.Mask` that has a text, its text, or None for the model's own mask alone. The
            text is kept as `sparse_mask` in the config, and so saved and loaded with the model.
        context: a plan of `sparseflash.distributed` for the sequences that the model will get, each
            rank its own tokens. Only its owners count: the masks are those of the model and `mask`.
            Call the model with `position_ids=context.positions(device)[None]`, and with
            `shift_labels` beside `labels`; see docs/guide/many_gpus.md.

    Raises:
        ValueError: a model without attention that transformers can switch, or a mask without text.
            With a mask: a model with a decoder and an encoder, or of several parts. With a mask for
        each layer: one that no layer with attention would take.
    """
    mask = masks.parse(mask) if isinstance(mask, str) else mask
    if mask is not None and not (isinstance(mask, Mask) and mask.spelled):
        raise ValueError(
            f"mask is {_what(mask)}; pass a masks.Mask that masks.parse can read, or its text"
            f"{remedy(mask) or ' (masks.pattern gives a formula a name)'}"
        )
    if mask is not None and (parts := _parts(model)):
        raise ValueError(
            f"mask is given for {type(model).__name__}, which has several sequences: call"
            f" use(part, mask) for a part with one, and use(model) for the model ({parts})"
        )
    layers = [module for module in model.modules() if _attends(type(module))]
    if mask is not None and mask.per_layer:
        _check_numbers(model, mask, layers)
    held = [(module, *pair) for module in model.modules() for pair in _configs(module)]
    own: dict[int, Any] = {}  # copies of configs by the id of the config
    for module, name, config in held:
        setattr(module, name, deepcopy(config, own))
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        if any(type(module).__name__ in OWN for module in part.modules()):
            vars(part)["_can_set_attn_implementation"] = partial(bool, True)  # now it can
    if layers:
        model.set_attn_implementation(NAME)
    if not layers or model.config._attn_implementation != NAME:
        for module, name, config in held:
            setattr(module, name, config)
        raise ValueError(
            f"{type(model).__name__} has no attention that goes through AttentionInterface: take a"
            " model that has, or put sparseflash.BlockSparseAttention into its layers"
        )
    for config in own.values():
        if isinstance(config, PreTrainedConfig):
            vars(config).pop(ATTRIBUTE, None)
    if mask is not None:
        setattr(model.config, ATTRIBUTE, mask.key)
    state: dict[str, Any] = {CONTEXT: context}
    if not (model._supports_sdpa or model._supports_flash_attn):
        state["is_causal"] = False  # eager attention goes by the mask alone
    for number, layer in enumerate(layers):
        vars(layer).update(state, **{LAYER: number})
        replace_methods(layer, attend, model.config)
        if mask is not None:  # some models give their parts copies of the config
            setattr(layer.config, ATTRIBUTE, mask.key)
    return model


def _check_numbers(model: PreTrainedModel, mask: Mask, layers: list[Any]) -> None:
    """Raise ValueError if masks are for layers that share attention, or have none, and so for no
    other: a mask for every layer may have some for those without.
    """
    own = [getattr(layer, "layer_idx", None) for layer in layers]
    numbers = [number if idx is None else idx for number, idx in enumerate(own)]
    depth = getattr(model.config, "num_hidden_layers", 0)
    wanted = {mask.layer(number).key for number in range(depth)}
    lost = wanted - {mask.layer(number).key for number in numbers}
    if lost and (None in own or len(wanted) < depth):
        raise ValueError(
            f"mask is {mask}, and the attention of {type(model).__name__} is that of layers"
            f" {numbers} of {depth}, of which none takes {', '.join(sorted(lost))}: give as many"
            " masks as there are layers, or one"
        )


def _what(value: Any) -> str:
    """Return a value for an error: a tensor or an array by its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of {value.dtype}, {tuple(value.shape)}"
    return repr(value)


def _parts(model: PreTrainedModel) -> str:
    """Return the parts of a model of several sequences, for an error; "" for other models."""
    config, given = model.config, signature(model.forward).parameters
    two = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    decodes = getattr(model, "is_decoder", True)  # not the encoder of T5, whose class is the same
    two = two and any("decoder" in x or (decodes and x.startswith("encoder_")) for x in given)
    names = set(config.sub_configs) - {"attn_config", "ffn_config"}  # of the layers of MPT and DBRX
    if not two and not any(getattr(config, name, None) for name in names):
        return ""
    models = [
        f"{name} is a {type(part).__name__}"
        for name, part in model.named_modules()
        if name and isinstance(part, PreTrainedModel)
    ]
    return ", ".join(models) or "it has none"


def _configs(module: torch.nn.Module) -> list[tuple[str, PreTrainedConfig]]:
    """Return the configs that a module holds, by their names."""
    return [pair for pair in vars(module).items() if isinstance(pair[1], PreTrainedConfig)]


@cache
def _attends(kind: type) -> bool:
    """Return whether a class of modules is in `OWN` or calls AttentionInterface."""
    if kind.__name__ in OWN:
        return True
    functions = [unwrap(f) for base in kind.__mro__ for f in vars(base).values() if callable(f)]
    codes = [getattr(function, "__code__", None) for function in functions]
    return any("get_interface" in code.co_names for code in codes if code is not None)


def mask_of(config: Any) -> Mask | None:
    """Return the mask that the config of a model, or None, asks for."""
    text = getattr(config, ATTRIBUTE, None)
    if text is None:
        return None
    if text not in _MASKS:
        _MASKS[text] = masks.parse(text)
    return _MASKS[text]


_MASKS: dict[str, Mask] = {}
by_text(_MASKS.clear)


@torch.compiler.disable
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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the function of AttentionInterface: (B, N_q, H, D_v), and no weights.

    Args:
        attention_mask: what `sparse_mask` made, a 4D tensor of the user or the model, perhaps with
            biases, or None where the model makes none.
        is_causal: whether None means causal, as for sdpa; by default what the module says.
        s_aux: (H,) learned scores of attention sinks, which have no value.
        softcap: bound of the scores, as in Gemma 2.
        cu_seq_lens_q, cu_seq_lens_k: ends of the documents that are packed into a sequence, from 0.
        indices: (B, N_q, n) numbers of the keys that a query may see.
        block_indices: (B, groups of heads, N_q, n) numbers of blocks of keys, or -1.
        position_bias: what is added to the scores, (B, H, N_q, N_k) with extents of 1, or what
            `distance_bias` made.
    """
    for name, given in others.items():
        known = name in KNOWN or not isinstance(given, Tensor)
        if known and (name not in REFUSED or given is None or given is False):
            continue
        cure = REFUSED.get(name, "take attn_implementation='eager'")
        raise ValueError(f"{name} is {_what(given)}, which sparseflash has no place for: {cure}")
    n_q, n_k = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "sink": s_aux}
    added = _bias_of(attention_mask)
    for name, given in {"attention_mask": added, "position_bias": position_bias}.items():
        if isinstance(given, Tensor):
            check_extents(name, given, *query.shape[:3], n_k)
    used = attention_mask.asked.used if isinstance(attention_mask, ModelMask) else n_k
    options["score"] = score_of(softcap, query.device, used, position_bias, added)
    chosen = mask_of(getattr(module, "config", None))
    if chosen is not None and chosen.per_layer:
        chosen = chosen.layer(_number(module))
    if (context := getattr(module, CONTEXT, None)) is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if isinstance(position_bias, Tensor) or added is not None:
            raise ValueError(
                f"{type(module).__name__} adds a tensor to the scores, which has the own tokens"
                " only where ranks share a sequence: take a model without, or one GPU"
            )
        own = masks.causal() if causal else masks.dense()
        own = _own_of_the_whole(attention_mask, own, context, others.get("position_ids"))
        mask = context.with_mask(join(own, chosen))
        out = attention(query, key, value, mask, **options)
        return out.transpose(1, 2).contiguous(), None
    documents = _documents(cu_seq_lens_q, cu_seq_lens_k, n_q, n_k)
    if isinstance(attention_mask, ModelMask) and attention_mask.shape[2] == 1 < n_q:
        attention_mask = attention_mask.expand(-1, -1, n_q, -1)  # values: all queries see the same
    if isinstance(attention_mask, ModelMask):
        asked = attention_mask.asked
        if (n_q, n_k) != (asked.n_q, asked.n_k):
            raise ValueError(
                f"the model made a mask of {asked.n_q} queries and {asked.n_k} keys, and"
                f" {type(module).__name__} has {n_q} and {n_k}: take attn_implementation='eager'"
            )
        key, value = key[:, :, :used], value[:, :, :used]
        mask = asked.mask(chosen, documents)
    else:
        if attention_mask is not None:
            own = mask_of_tensor(attention_mask, n_q, n_k) if added is None else None
        else:
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            own = masks.causal() if is_causal and n_q > 1 else None
        if chosen is not None and n_q != n_k:  # which of the tokens the queries are, is not said
            raise ValueError(f"{two_lengths(n_q, n_k, chosen)}, or attention_mask (batch, tokens)")
        mask = join(own, chosen)
        if documents is not None:
            mask = (masks.dense() if mask is None else mask) >> masks.packed(documents)
    if indices is not None or block_indices is not None:
        mask = _selection(module, query, key, mask, indices, block_indices)
    out = attention(query, key, value, mask, **options)
    return out.transpose(1, 2).contiguous(), None


def _bias_of(mask: Any) -> Tensor | None:
    """Return the bias that a model or a user added to a mask."""
    if isinstance(mask, ModelMask):
        return mask.bias
    biased = isinstance(mask, Tensor) and mask.ndim == 4 and mask.is_floating_point()
    return mask if biased and is_bias(mask) else None


def _own_of_the_whole(
    given: Any, own: Mask, context: ContextParallel, positions: Tensor | None
) -> Mask:
    """Return the model's mask of a sequence that ranks share; own: where the model made none.

    Raises ValueError where the model sees more than the own tokens of a sequence without padding,
    or has other positions than theirs.
    """
    if isinstance(given, ModelMask):
        asked = given.asked
        if asked.own is None or asked.real is not None or asked.q_offset or asked.n_q != asked.n_k:
            raise ValueError(
                f"the model made a mask of {asked.n_q} queries and {asked.n_k} keys with padding, a"
                " cache or a function of its own: a sequence that ranks share has none of them"
            )
        own = asked.own
    elif given is not None:
        raise ValueError(f"attention_mask is {_what(given)}: pass the mask to use(), of all tokens")
    if positions is not None:
        wanted = context.positions(positions.device)
        if positions.shape[-1] != len(wanted) or not (positions == wanted).all():
            raise ValueError(
                "position_ids are not those of the own tokens: call the model with"
                " position_ids=context.positions(device)[None]"
            )
    return own


def _number(module: Any) -> int:
    """Return the number of a layer; raise ValueError where it has none."""
    number = getattr(module, "layer_idx", None)
    number = getattr(module, LAYER, None) if number is None else number
    if number is None:
        raise ValueError(
            f"the mask differs per layer, and {type(module).__name__} has no number: call use()"
        )
    return number


def _documents(
    queries: Tensor | None, keys: Tensor | None, n_q: int, n_k: int
) -> list[list[int]] | None:
    """Return the lengths of packed documents, from the ends that queries and keys share."""
    if queries is None and keys is None:
        return None
    ends = [None if given is None else given.tolist() for given in (queries, keys)]
    if n_q != n_k or ends[0] != ends[1] or ends[0] is None or ends[0][-1] != n_q:
        raise ValueError(
            f"cu_seq_lens_q is {ends[0]} and cu_seq_lens_k {ends[1]}, for {n_q} queries and {n_k}"
            " keys: give the same to both, which end with the last token of the one sequence"
        )
    return [np.diff(ends[0]).tolist()]


def _selection(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    indices: Tensor | None,
    block_indices: Tensor | None,
) -> Selection:
    """Return the keys that the model picked for each query, within `mask`."""
    size, picked = 1, indices
    if block_indices is not None:
        size, picked = module.indexer.block_size, block_indices
    assert picked is not None
    count = -(-key.shape[2] // size)
    at = picked.long() if picked.ndim == 4 else picked.long()[:, None]
    at = torch.where((at < 0) | (at > count), count, at)
    pairs = at.new_zeros(*at.shape[:3], count + 1, dtype=torch.bool).scatter(3, at, True)
    pairs = pairs[..., :count].repeat_interleave(size, 3)[..., : key.shape[2]]
    found = selection_of_pairs(pairs, query.shape[1], BLOCK)
    return found if mask is None else found & mask


@torch.compiler.disable
def sparse_mask(*, config: Any = None, **given: Any) -> ModelMask:
    """Return what AttentionMaskInterface asks for: `make_mask` with the config's mask."""
    return make_mask(mask_of(config), **given)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sparse_mask)
