"""Attention for the transformers of `diffusers`, by masks of images and videos.

See docs/guide/images_and_videos.md.
"""

import re
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import masks
from masks import BlockMask, Mask
from masks.transforms.reorder import Reorder
from sparseflash.attention import attention
from sparseflash.cache import cached
from sparseflash.integrations import integration, join, mask_of_tensor
from sparseflash.request import as_mask_or_selector
from sparseflash.select.base import Selector

with integration("diffusers", "0.42"):
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.modeling_utils import ModelMixin


# Names of cross-attention without `is_cross_attention`, and of attention of text or audio alone.
CROSS = re.compile(r"cross|attn2$|_to_\w+_attn$", re.I)
APART = re.compile("te?xt|context|caption|token_refiner|audio", re.I)


def use(
    model: ModelMixin,
    mask: Mask | Selector | str | None = None,
    *,
    order: Reorder | None = None,
    latents: int | None = None,
    text_first: bool = False,
) -> ModelMixin:
    """Let the self-attention of `model` go through sparseflash with a mask, and return it.

    Cross-attention, and attention of text or audio alone, stays dense and has no number in
    `masks.layers`: it has `is_cross_attention`, or such a name. Padding that the model passes is
    left out too. A later call takes the place of this one, so another mask can follow after some
    steps of denoising. A layer that then does not attend by its mask is an error.

    Args:
        mask: of the latent tokens, row by row, such as `masks.neighborhood((frames, height, width),
            kernel)`; or its text. None is dense attention. A selector chooses again in each call,
            among the text, if any, and then the latents in `order`.
        order: `masks.tiled(canvas, tile)` or another order of the tokens, in which attention is
            computed. It changes no result, and makes the blocks denser.
        latents: their number, where the model joins text to them in one sequence. The text then
            sees all, and is seen by all. By default all tokens are latents.
        text_first: whether the text comes before the latents rather than after.

    Raises:
        ValueError: a model without attention that goes through diffusers' backends, or none of its
            self-attention with a mask.
    """
    given = as_mask_or_selector(mask)
    if isinstance(given, BlockMask):
        raise ValueError("mask is a BlockMask; pass the Mask that it comes from, or its text")
    found: dict[Any, bool] = {
        m: _is_self_attention(name, m)
        for name, m in model.named_modules()
        if hasattr(_processor(m), "_attention_backend")
    }
    if not (found if given is None else any(found.values())):
        kind = "layer of self-attention" if found else "layer"
        raise ValueError(
            f"{type(model).__name__} has no {kind} that goes through diffusers' attention backends:"
            " take a model that does, or put sparseflash.BlockSparseAttention into its layers"
        )
    number, seen = 0, set[int]()
    for layer, own in found.items():
        if id(processor := _processor(layer)) in seen:  # of several layers
            layer.set_processor(copy(processor))
        seen.add(id(processor))
        chosen = None
        if given is not None and own:
            chosen = given.layer(number) if isinstance(given, Mask) else given
            number += 1
            if _check_used not in layer._forward_hooks.values():
                layer.register_forward_hook(_check_used)
        attend = Attend(chosen, order, latents, text_first)
        _processor(layer)._attention_backend = _backend(attend)
    return model


@dataclass(eq=False)
class Attend:
    """The function of one backend: attention by a mask, in an order."""

    mask: Mask | Selector | None
    order: Reorder | None
    latents: int | None
    text_first: bool
    used: bool = False  # the mask, since the last layer returned

    @property
    def key(self) -> str:
        mask = f"{self.mask} at {id(self.mask)}" if isinstance(self.mask, Selector) else self.mask
        return f"sparse({mask}, {self.order}, {self.latents}, {self.text_first})"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """(B, N_q, H, D_v) from query (B, N_q, H, D), key and value."""
        if _parallel_config is not None:
            raise ValueError("the model is context parallel: use it without a parallel_config")
        n_q, n_k = query.shape[1], key.shape[1]
        own = None
        if attn_mask is not None:
            if attn_mask.shape != (len(query), n_k):  # else of the keys of each sequence
                attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
            own = mask_of_tensor(attn_mask, n_q, n_k)
        own = join(own, masks.causal() if is_causal else None)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options = {"scale": scale, "dropout_p": dropout_p}
        if self.mask is None or n_q != n_k:
            return attention(q, k, v, own, **options).transpose(1, 2)
        self.used = True
        text = n_q - (n_q if self.latents is None else self.latents)
        if text < 0:
            raise ValueError(
                f"latents is {self.latents}, and there are {n_q} tokens: pass fewer, or call"
                " use(part, mask) for the layers that have so many"
            )
        index = None
        if self.order is not None or (text and not self.text_first):
            places, index = _places(self.order, n_q, text, self.text_first, q.device)
            q, k, v = (x[:, :, index] for x in (q, k, v))
            own = None if own is None else own >> masks.permuted(places)
        if isinstance(self.mask, Selector):
            chosen = self.mask(q, k)
        else:
            chosen = self.mask if self.order is None else self.mask >> self.order
            chosen = chosen >> masks.shift(text) if text else chosen
        if text:
            chosen = chosen | masks.global_tokens(text)
        out = attention(q, k, v, chosen if own is None else chosen & own, **options)
        if index is not None:
            out = torch.empty_like(out).index_copy(2, index, out)
        return out.transpose(1, 2)


@cached
def _places(
    order: Reorder | None, n: int, text: int, text_first: bool, device: torch.device
) -> tuple[np.ndarray, Tensor]:
    """Tokens in the order of attention, with the text first; and the same on the device."""
    latents = np.arange(n - text) if order is None else order.order(n - text)
    first = text if text_first else 0  # the first latent token of the model
    places = np.append(np.arange(text) + (0 if text_first else n - text), latents + first)
    with torch.inference_mode(False):  # so that a later call may train
        return places, torch.from_numpy(places).to(device)


def _processor(layer: torch.nn.Module) -> Any:
    return getattr(layer, "processor", None)


def _is_self_attention(name: str, layer: Any) -> bool:
    """Return whether a layer attends among the latents, by what it says, or else by its names."""
    names = type(layer).__name__, type(_processor(layer)).__name__, name
    crosses = getattr(layer, "is_cross_attention", None)
    crosses = any(map(CROSS.search, names)) if crosses is None else crosses
    return not crosses and APART.search(name) is None


def _check_used(layer: Any, *_: Any) -> None:
    """Raise ValueError if a layer has a mask and has not attended by it; a forward hook."""
    name = getattr(_processor(layer), "_attention_backend", None)
    attend = _AttentionBackendRegistry._backends.get(name)
    if isinstance(attend, Attend) and attend.mask is not None:
        if not attend.used:
            raise ValueError(
                f"{type(layer).__name__} does not attend by the mask {attend.mask}: its queries and"
                " keys are two sequences, or it takes another backend. Set is_cross_attention=True"
                " on the layer, which leaves it dense, or call use(part, mask) for other layers"
            )
        attend.used = False


def _backend(attend: Attend) -> AttentionBackendName:
    """Return a name that diffusers finds `attend` by, one more in its enumeration."""
    name: Any = str.__new__(AttentionBackendName, attend.key)
    name._name_ = name._value_ = attend.key
    # unpickled by its value, it would be no name that the enumeration was defined with
    name.__reduce_ex__ = lambda protocol: (_backend, (attend,))
    _AttentionBackendRegistry.register(name)(attend)
    return name
