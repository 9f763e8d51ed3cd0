"""Findings about all layers together: groups that never meet, keys never seen, too few layers."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from masks.analysis.components import block_components, token_components
from masks.analysis.reach import Reach, built, reach
from masks.analysis.segments import Segments, merged
from masks.analysis.words import count_of, spans
from masks.registry import PATTERNS
from masks.runs import Ints
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

    @cached_property
    def groups(self) -> Ints:
        """(seq_len,): a label for every token, equal where tokens are connected."""
        segments = Segments.of(self.blocks[0])
        label = token_components(segments)
        if label is None:  # too many edges: by blocks
            grid = segments.grid
            label = np.repeat(block_components(segments), grid.block_q)[: grid.n_q]
        return label


def findings(model: Model) -> tuple[list[str], list[str]]:
    """(problems, notes), as sentences."""
    if not model.blocks[0].nnz:
        return [], []
    if len(model.blocks) == 1 and np.any(model.groups != model.groups[0]):
        apart, separator = _apart(model), _separator(model, len(np.unique(model.groups)))
        if separator is not None:
            return [], [f"{apart} That is what {separator} is for."]
        return [f"{apart} {_remedy(model)}".rstrip()], []
    if model.reach.at_least is None and model.reach.settled:
        return [_never(model)], []
    return _depth(model)


def _apart(model: Model) -> str:
    """Groups of tokens that never meet."""
    label, n = model.groups, model.seq_len
    sizes = np.unique(label, return_counts=True)[1]
    # Blocks can join groups that tokens keep apart: the groups bound what is seen as well.
    pairs = (sizes * (sizes + 1) // 2) if model.causal else sizes**2
    share = pairs.sum() / ((n * (n + 1) // 2) if model.causal else n * n)
    share = min(model.reach.upper[-1], share)
    return (
        f"The tokens fall into {len(sizes)} groups that never see each other, at any depth: "
        f"{_shape_of(label, sizes)}. A query sees {replace(model.reach, upper=(share,)).share()}."
    )


def _shape_of(label: Ints, sizes: Ints) -> str:
    count, n = len(sizes), len(label)
    if count == n:
        return "every token is alone"
    if np.array_equal(label, np.arange(n) % count):
        return f"token i is in group i mod {count}"
    if _are_stretches(label):
        if (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]:
            return f"each is a stretch of {sizes[0]} neighbours"
        bounds = pairwise(np.append(0, np.cumsum(sizes)).tolist())
        return f"the tokens {spans([(first, stop - 1) for first, stop in bounds])}"
    alone = int(np.count_nonzero(sizes == 1))
    verb = "is" if alone == 1 else "are"
    some = f", and {count_of(alone, 'token')} {verb} alone" if alone else ""
    return f"the largest holds {sizes.max()} of {n} tokens{some}"


def _are_stretches(label: Ints) -> bool:
    return bool((np.diff(label) >= 0).all())


def _separator(model: Model, groups: int) -> Mask | None:
    """The part of the mask that is made for these groups, such as documents; None without one.

    A pattern of the section "Segments" is made to keep stretches of tokens apart. It counts where
    it has the groups of the whole mask by itself: other parts then neither join nor split them.
    """
    mask, label = model.mask, model.groups
    if len(np.unique(label)) != groups or not _are_stretches(label):
        return None
    entry = PATTERNS.get(mask.kind)
    if mask.kind == "packed" or (entry and entry.section == "Segments"):
        return mask
    joined = mask.parts if mask.kind in ("|", "&", "heads") else ()
    found = (_separator(replace(model, mask=part), groups) for part in joined)
    return next((part for part in found if part is not None), None)


def _never(model: Model) -> str:
    """Connected, and yet some pairs are out of sight at any depth."""
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
    """The first addition that was built and shows everything in time, or else the best one."""
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
