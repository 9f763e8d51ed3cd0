"""Findings about all layers together: keys that are never seen, too few layers."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from masks.analysis.reach import Reach, built, reach
from masks.analysis.segments import Segments, merged
from masks.analysis.words import count_of
from masks.registry import PATTERNS
from masks.types import BlockMask, Mask

LAYERS = 64  # that are followed where a model has fewer


@dataclass(frozen=True)
class Model:
    """A mask in a model of some layers, at one length.

    Attributes:
        mask: of every layer.
        seq_len, block_size, heads: as in `Mask.build`.
        layers: of the model; None where only what any depth can do is asked.
        causal: whether only the keys up to the query are wanted.
    """

    mask: Mask
    seq_len: int
    layers: int | None
    causal: bool
    block_size: Any
    heads: int | None

    @cached_property
    def blocks(self) -> list[BlockMask]:
        """The block mask of every layer, or one where all layers have the same."""
        return built(self.mask, self.seq_len, self.layers, self.block_size, self.heads)

    @cached_property
    def reach(self) -> Reach:
        """Of the first batch entry."""
        depth = self.layers if self.mask.per_layer else max(LAYERS, self.layers or 0)
        return reach(self.blocks, depth, causal=self.causal, batch=0)


def findings(model: Model) -> tuple[list[str], list[str]]:
    """(problems, notes), as sentences."""
    if not model.blocks[0].nnz:
        return [], []
    if model.reach.at_least is not None or not model.reach.settled:
        return _depth(model)
    separator = _separator(model, model.mask)
    if separator is None:
        return [_never(model)], []
    return [], [
        f"A query sees {model.reach.share()}, at any depth. That is what {separator} is for."
    ]


def _separator(model: Model, mask: Mask) -> Mask | None:
    """Return the part of the mask that is made to hide what is never seen, such as documents.

    A pattern of the section "Segments" is made for that. It counts where by itself, at any depth,
    every query sees as much as with the whole mask.
    """
    entry = PATTERNS.get(mask.kind)
    if mask.kind == "packed" or (entry and entry.section == "Segments"):
        alone = replace(model, mask=mask).reach.seen_keys
        return mask if np.array_equal(alone, model.reach.seen_keys) else None
    joined = mask.parts if mask.kind in ("|", "&", "heads") else ()
    found = (_separator(model, part) for part in joined)
    return next((part for part in found if part is not None), None)


def _never(model: Model) -> str:
    """Return whether some pairs are out of sight at any depth."""
    found = model.reach
    start = "With causal, a query" if model.causal else "A query"
    only = "only " if found.exact else ""
    return (
        f"{start} can see {only}{found.share()}, at any depth{_reason(model)}; "
        f"{found.most_blind}. {_remedy(model)}"
    ).rstrip()


def _reason(model: Model) -> str:
    if not model.causal:
        return ""
    if all(_only_clears_bits(merged(Segments.of(blocks))) for blocks in model.blocks):
        return ": like a causal butterfly, a layer only clears bits of the block number"
    return ": information only moves forward, and no path leads there"


def _only_clears_bits(segments: Segments) -> bool:
    """Whether the number of an allowed key block only has bits that the query block has, too.

    Blocks are those of the mask, or 2, 4, .. of them together; three at least, because of two any
    causal mask would do.
    """
    grid = segments.grid
    if grid.block_q != grid.block_k:
        return False
    for shift in range((grid.rows - 1).bit_length() - 1):
        row, first, last = (a >> shift for a in (segments.row, segments.first, segments.stop - 1))
        varying = np.frexp(first ^ last)[1]  # the low bits that differ within a run of columns
        if not ((last | ((1 << varying) - 1)) & ~row).any():
            return True
    return False


def _depth(model: Model) -> tuple[list[str], list[str]]:
    """(problems, notes) where everything is seen in the end, or may be."""
    found, layers = model.reach, model.layers
    bounds = "" if found.exact or found.at_least == found.at_most else " (bounds by blocks)"
    seen = f"Everything is seen {found.depth}{bounds}."
    if layers is None and found.at_least is None:
        seen = f"After {LAYERS} layers a query has seen {found.share(LAYERS)}, and more later."
    elif layers is not None and (found.at_least is None or found.at_least > layers):
        whole = "" if found.at_least is None else f"; all of it is seen {found.depth}"
        return [
            f"{count_of(layers, 'layer')} {'is' if layers == 1 else 'are'} not enough: a query has "
            f"seen {found.share(layers)} by then{whole}. {_remedy(model)}".rstrip()
        ], []
    elif layers is not None and (found.at_most is None or found.at_most > layers):
        seen = (
            f"Whether {count_of(layers, 'layer')} show a query every key is open: by "
            f"blocks, everything is seen {found.depth}. Use reach(.., exact=True) at a shorter "
            "length."
        )
    return [], [seen]


def _remedy(model: Model) -> str:
    """Return the first addition that was built and shows everything in time, or else the best
    one.
    """
    size = max(model.blocks[0].block_size)
    local, wide, far = (PATTERNS[name].function for name in ("local", "global_tokens", "butterfly"))
    near = local(size, 0) if model.causal else local(size)
    additions = [near, wide(size), far(size) | near]
    if model.causal:
        additions[1:] = [part & PATTERNS["causal"].function() for part in additions[1:]]
    best: tuple[float, str] = (model.reach.at_least or float("inf"), "")
    for addition in additions:
        tried = replace(model, mask=model.mask | addition).reach
        if tried.at_least is None or best[0] <= tried.at_least:
            continue
        best = tried.at_least, f"Add {addition}: everything is then seen {tried.depth}."
        if tried.at_least <= (model.layers or LAYERS):
            break
    return best[1]
