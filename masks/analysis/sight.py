"""Findings about all layers together, as sentences: what is never seen, or not soon enough."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from masks.analysis.expressions import built
from masks.analysis.graph import block_components, token_components
from masks.analysis.reach import Reach, reach
from masks.analysis.segments import Segments
from masks.analysis.words import count_of, percent, spans
from masks.runs import Ints

if TYPE_CHECKING:
    from masks.types import BlockMask, Mask

EXACT = 4096  # tokens: up to here the reach is that of tokens
LAYERS = 64  # looked at, where a model has fewer
SEPARATE = ("documents", "packed", "block_diagonal")  # these are meant to keep tokens apart


@dataclass(frozen=True)
class Case:
    """A mask, what is asked of it, and what it reaches."""

    mask: "Mask"
    blocks: "list[BlockMask]"
    layers: int | None
    causal: bool
    heads: int | None
    block_size: Any
    reach: Reach

    @classmethod
    def of(
        cls,
        mask: "Mask",
        blocks: "list[BlockMask]",
        layers: int | None,
        causal: bool,
        heads: int | None,
        block_size: Any,
    ) -> "Case":
        depth = layers if mask.per_layer else max(LAYERS, layers or 0)
        exact = blocks[0].n_q <= EXACT
        try:
            found = reach(blocks, depth, causal=causal, exact=exact)
        except ValueError:
            if not exact:
                raise
            found = reach(blocks, depth, causal=causal)  # too many intervals for tokens
        return cls(mask, blocks, layers, causal, heads, block_size, found)

    def with_mask(self, mask: "Mask") -> "Case":
        blocks = built(mask, self.reach.n, self.layers, self.block_size, self.heads)
        return Case.of(mask, blocks, self.layers, self.causal, self.heads, self.block_size)

    @property
    def keys(self) -> str:
        """What a query wants to see."""
        return "the keys before it" if self.causal else "the keys"

    def share(self, layer: int, only: str = "") -> str:
        """What a query has seen after so many layers (-1: in the end), in words."""
        index = min(layer, len(self.reach.upper)) - 1 if layer > 0 else -1
        bound = only if self.reach.exact else "at most "
        return f"{bound}{percent(self.reach.upper[index])} of {self.keys}"


def findings(case: Case) -> tuple[list[str], list[str]]:
    """(problems, notes)"""
    if not case.blocks[0].nnz:
        return [], []
    apart = _groups(case)
    if apart and any(name in case.mask.key for name in SEPARATE):
        return [], [f"{apart} That is what {_separator(case.mask)} is for."]
    if apart:
        return [f"{apart} {_remedy(case)}".rstrip()], []
    if case.reach.at_least is None and case.reach.settled:
        return [_never(case)], []
    return _depth(case)


def _separator(mask: "Mask") -> str:
    return next(name for name in SEPARATE if name in mask.key)


def _groups(case: Case) -> str:
    """The groups of tokens that never meet; empty where there is one group only."""
    if len(case.blocks) > 1:  # layers join what one of them keeps apart
        return ""
    segments = Segments.of(case.blocks[0])
    label = token_components(segments)
    if label is None:
        grid = segments.grid
        label = np.repeat(block_components(segments)[: grid.rows], grid.block_q)[: grid.n_q]
    sizes = np.unique(label, return_counts=True)[1]
    if len(sizes) == 1:
        return ""
    # Blocks can join groups that tokens keep apart: the groups bound what is seen as well.
    pairs = (sizes * (sizes + 1) // 2) if case.causal else sizes**2
    n = len(label)
    most = min(case.reach.upper[-1], pairs.sum() / ((n * (n + 1) // 2) if case.causal else n * n))
    bound = "" if case.reach.exact else "at most "
    return (
        f"The tokens fall into {len(sizes)} groups that never see each other, at any depth: "
        f"{_shape_of(label, sizes)}. A query sees {bound}{percent(most)} of {case.keys}."
    )


def _shape_of(label: Ints, sizes: Ints) -> str:
    count, n = len(sizes), len(label)
    token = np.arange(n)
    if count == n:
        return "every token is alone"
    if np.array_equal(label, token % count):
        return f"token i is in group i mod {count}"
    if (np.diff(label) >= 0).all():
        if (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]:
            return f"each is a stretch of {sizes[0]} neighbours"
        stretches = ranges_of(label)
        return f"the tokens {spans(stretches, 3)}"
    alone = int(np.count_nonzero(sizes == 1))
    some = (
        f", and {count_of(alone, 'token')} {'is' if alone == 1 else 'are'} alone" if alone else ""
    )
    return f"the largest holds {sizes.max()} of {n} tokens{some}"


def ranges_of(label: Ints) -> tuple[tuple[int, int], ...]:
    """(first, last) of every stretch of equal labels."""
    first = np.flatnonzero(np.append(True, label[1:] != label[:-1]))
    last = np.append(first[1:], len(label)) - 1
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def _never(case: Case) -> str:
    """Connected, and yet some pairs are out of sight for ever."""
    found = case.reach
    query, last = found.worst or (0, 0)
    whose = f"query {query} never sees" if query == last else f"queries {query}-{last} never see"
    start = "With causal, a query" if case.causal else "A query"
    return (
        f"{start} can see {case.share(-1, 'only ')}, at any depth{_reason(case)}; "
        f"{whose} keys {spans(found.missing)}. {_remedy(case)}"
    ).rstrip()


def _reason(case: Case) -> str:
    text = case.mask.key
    if case.causal and "butterfly" in text:
        return ": a causal butterfly only clears bits of the block number"
    if case.causal:
        return ": information only moves forward, and no path leads there"
    return ""


def _depth(case: Case) -> tuple[list[str], list[str]]:
    """(problems, notes) where everything is seen in the end, or may be."""
    found, layers = case.reach, case.layers
    if layers is None:
        if found.at_least is None:
            return [], [
                f"After {LAYERS} layers a query has seen {case.share(LAYERS)}, and more later."
            ]
        return [], [f"Everything is seen {found.depth}{_bound(found)}."]
    if found.at_least is None or found.at_least > layers:
        whole = "" if found.at_least is None else f"; all of it is seen {found.depth}"
        return [
            f"{count_of(layers, 'layer')} {'is' if layers == 1 else 'are'} not enough: a query has "
            f"seen {case.share(layers)} by then{whole}. {_remedy(case)}".rstrip()
        ], []
    if found.at_most is None or found.at_most > layers:
        return [], [
            f"Whether {count_of(layers, 'layer')} show every query {case.keys} is open: by blocks, "
            f"everything is seen {found.depth}. Look at reach(.., exact=True) of a shorter length."
        ]
    return [], [f"Everything is seen {found.depth}{_bound(found)}."]


def _bound(found: Reach) -> str:
    return "" if found.exact or found.at_least == found.at_most else " (bounds by blocks)"


def _remedy(case: Case) -> str:
    """The first addition of a few that was built and does what is asked, in words."""
    from masks.patterns.bands import causal, local
    from masks.patterns.butterfly import butterfly
    from masks.patterns.columns import global_tokens

    size = max(case.blocks[0].block_size)
    near = local(size, 0) if case.causal else local(size)
    wide = butterfly(size) | near
    additions = [near, global_tokens(size), wide]
    if case.causal:
        additions[1:] = [part & causal() for part in additions[1:]]
    best: tuple[float, str] = (case.reach.at_least or float("inf"), "")
    for addition in additions:
        tried = case.with_mask(case.mask | addition).reach
        if tried.at_least is None or best[0] <= tried.at_least:
            continue
        best = tried.at_least, f"Add {addition}: everything is then seen {tried.depth}."
        if tried.at_least <= (case.layers or LAYERS):
            break
    return best[1]
