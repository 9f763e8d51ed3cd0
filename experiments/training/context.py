"""Sequences that several processes share: each computes its own tokens in every layer."""

from typing import Any

from torch import nn

from experiments.training.distributed import Group
from sparseflash import BlockSparseAttention
from sparseflash.distributed import ContextParallel, context_parallel


def share(model: nn.Module, states: int, group: Group) -> ContextParallel | None:
    """Let the attentions of a model attend over tokens of all processes of a context.

    Every attention gets a plan in place of its mask; all plans have the same owners of tokens. The
    plan of the first one is returned: the model takes its own tokens with it.

    Args:
        states: tokens that the attentions see.

    Raises ValueError for attentions that are not those of sparseflash under a mask.
    """
    if group.context is None:
        return None
    layers = [layer for layer in model.modules() if isinstance(layer, BlockSparseAttention)]
    if not layers:
        raise ValueError(
            f"context_parallel={group.ways}: the attention of this model needs all tokens in one"
            " process: give attention=sparse or attention=flash"
        )
    given: Any = getattr(model, "masks", None) or [layer.mask for layer in layers]
    size = getattr(layers[0].mask, "block_size", (128,))[0]
    size = min(size, max(16, states // group.ways // 16 * 16))  # a block for every process
    heads = {name: getattr(layers[0], name) for name in ("heads", "kv_heads", "head_dim")}
    # dropout has the pattern of one process where heads travel
    route: Any = "heads" if any(layer.dropout for layer in layers) else "auto"
    options = heads | {"block_size": size, "route": route}
    first = context_parallel(group.context, given[0], states, **options)
    layers[0].mask = first
    for layer, mask in zip(layers[1:], given[1:], strict=True):
        layer.mask = first.with_mask(mask)
    return first
