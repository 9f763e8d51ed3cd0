"""What is wrong with a mask, in words, before it is trained."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from masks.analysis.orders import Found, best_order
from masks.analysis.reach import Reach, built, reach
from masks.analysis.segments import Segments, allowed_pairs, area, merged, ranges, seeing, seen
from masks.analysis.stats import Stats, count_of, number, percent, spans, stats
from masks.checks import flag, integer
from masks.registry import PATTERNS, TRANSFORMS
from masks.runs import Bools
from masks.types import BlockMask, Mask

HARD = "\xa0"  # a space at which no line of a report is broken
MOST_DIFFERENT = 4  # layers whose speed is looked at
LAYERS = 64  # that are followed where a model has fewer
MUCH_WASTE = 4  # computed pairs for an allowed one
MUCH_IMBALANCE = 4  # blocks of the busiest row or column over the mean; causal masks have 2
SMALLER = (64, 32, 16)  # blocks to try against waste,
AT_MOST = 1 << 16  # up to so many tokens


def causal_mask() -> Mask:
    """Return the pattern of that name."""
    return PATTERNS["causal"].function()


@dataclass(frozen=True, eq=False)
class Report:
    """What `check` found. `print` shows it.

    Attributes:
        text: what was checked, in words.
        problems: sentences on what the model cannot see, or sees and must not, and on a mask that
            saves nothing. Each names a remedy where one was found. A remedy that names a depth or a
            share of the pairs was built and tried.
        notes: sentences on what costs speed, and on what is worth knowing.
        stats: of every layer that differs.
        reach: through all layers.
    """

    text: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    stats: tuple[Stats, ...]
    reach: Reach

    @property
    def ok(self) -> bool:
        """Whether there are no problems; notes do not count."""
        return not self.problems

    def __str__(self) -> str:
        verdict = count_of(len(self.problems), "problem") if self.problems else "no problem"
        lines = textwrap.wrap(f"{self.text}: {verdict}", 100, break_long_words=False)
        for mark, sentences in (("!", self.problems), ("-", self.notes)):
            for sentence in sentences:
                whole = re.sub(
                    r"mask >> .*?(?= computes )", lambda x: x[0].replace(" ", HARD), sentence
                )
                lines += textwrap.wrap(
                    whole, 100, initial_indent=f"  {mark} ", subsequent_indent="    "
                )
        return "\n".join(lines).replace(HARD, " ")


def check(
    mask: Mask,
    seq_len: int,
    layers: int | None = None,
    causal: bool | None = None,
    *,
    heads: int | None = None,
    block_size: int | tuple[int, int] = 128,
) -> Report:
    """Look for what is wrong with a mask of self-attention.

    The problems are pairs that no depth can connect, or too few layers; queries that see nothing,
    and keys that no query sees; keys ahead of a causal query; and that every block is computed,
    though few pairs are allowed. The notes tell of computed blocks
    that are mostly masked, of rows with much more work than others, and of differences between
    heads.

    All heads count together, because a layer passes on what any of them sees, as `reach` explains.
    So do batch entries, except that the reach is that of the first one: a note says so.
    Up to 4096 tokens the reach is exact. Beyond, it is bounded by blocks, and the sentences say so.

    Args:
        seq_len: tokens.
        layers: of the model; None asks only what any depth can do.
        causal: True: no query may see ahead, and only the keys before it are wanted. False: all
            keys are. None: what the mask is.
        heads, block_size: as in `Mask.build`.

    Raises:
        ValueError: as `Mask.build`; or a mask that differs from layer to layer without `layers`.
    """
    layers = None if layers is None else integer("layers", layers, min=1)
    if causal is not None:
        flag("causal", causal)
    model = Model(mask, seq_len, layers, False, block_size, heads)
    different = list(dict.fromkeys(model.blocks))
    numbers = [stats(blocks) for blocks in different]
    leaks = not all(found.causal for found in numbers)
    claim = causal if causal is not None else not leaks
    # What looks ahead is no help to a causal model.
    allowed = mask & causal_mask() if claim and leaks else mask
    seen_by_all = replace(model, mask=allowed, causal=claim)

    problems: list[str] = []
    notes: list[str] = []
    if (entries := max(blocks.batch for blocks in different)) > 1:
        notes.append(
            f"The {entries} batch entries have masks of their own, and are not separated here: the"
            " reach is that of the first one, and the rest holds for all of them together. Check"
            " the mask of each entry by itself."
        )
    for i, (blocks, found) in enumerate(zip(different, numbers, strict=True)):
        index = model.blocks.index(blocks)
        where = f"Layer {index}: " if len(different) > 1 else ""
        costly = i < MOST_DIFFERENT
        layer = Layer(mask, mask.layer(index), blocks, found, causal, claim, heads, costly)
        problems += [where + sentence for sentence in layer_problems(layer)]
        notes += [where + sentence for sentence in layer_notes(layer)]
    unseen, worth = reachability(seen_by_all)
    depth = f", {count_of(layers, 'layer')}" if layers else ""
    text = f"{mask} at {seq_len} tokens{depth}{', causal' if claim else ''}"
    return Report(text, (*problems, *unseen), (*notes, *worth), tuple(numbers), seen_by_all.reach)


# ---- of one layer ----


@dataclass(frozen=True)
class Layer:
    """What the sentences on a layer are made from.

    Attributes:
        whole, mask, blocks, stats: the mask of all layers; that of this layer, built and counted.
        asked, causal: what `check` was given, and whether the model counts as causal.
        costly: whether masks are built to find remedies for what slows the kernels.
    """

    whole: Mask
    mask: Mask
    blocks: BlockMask
    stats: Stats
    asked: bool | None
    causal: bool
    heads: int | None
    costly: bool

    @cached_property
    def segments(self) -> Segments:
        return Segments.of(self.blocks)

    @cached_property
    def sees(self) -> Bools:
        """(slices, n_q): whether a query sees any key."""
        return seeing(self.segments)

    @property
    def share(self) -> str:
        """Allowed pairs of those computed, in words."""
        return percent(self.stats.element_density / self.stats.flop_density)

    @cached_property
    def every_block(self) -> tuple[str, bool]:
        """(that all blocks are computed, or "", whether few of their pairs are allowed)."""
        found = self.stats
        blocks, most = found.blocks, found.slices * found.n_q * found.n_k
        which, dense = "", "dense"
        if found.causal:
            whole = causal_mask().build(found.n_q, found.n_k, found.block_size)
            blocks, most = found.slices * whole.nnz, found.slices * found.n_q * (found.n_q + 1) // 2
            which, dense = " on and below the diagonal", "causal"
        if found.full + found.partial < blocks or found.pairs == most:
            return "", False
        sentence = f"Every block{which} is computed: no faster than {dense} attention"
        return sentence, 2 * found.pairs < most

    def built(self, part: Mask) -> BlockMask:
        """Build a part of the mask in the same way."""
        blocks = self.blocks
        return part.build(blocks.n_q, blocks.n_k, blocks.block_size, heads=blocks.heads)


def layer_problems(layer: Layer) -> Iterator[str]:
    """Yield what a layer sees and must not, what it cannot see, and that it saves nothing."""
    found, any_head = layer.stats, " in any head" if layer.segments.grid.slices > 1 else ""
    if layer.causal and not found.causal:
        pairs = found.pairs - stats(layer.built(layer.mask & causal_mask())).pairs
        yield (
            f"A causal model would look ahead: {count_of(pairs, 'allowed pair')} have k > q, by up "
            f"to {found.ahead} tokens. Take {layer.whole & causal_mask()}."
        )
    if not found.pairs:
        yield f"Nothing is allowed at {found.n_q} tokens: every output is 0."
        return
    blind = ~np.logical_or.reduce(layer.sees)
    if count := int(np.count_nonzero(blind)):
        sees, them = ("sees", "it") if count == 1 else ("see", "them")
        yield (
            f"{count_of(count, 'query', 'queries')} {sees} nothing{any_head} "
            f"({spans(ranges(blind))}): attention gives {them} 0. Add local(0), with which every "
            "token sees itself."
        )
    unseen = ~np.logical_or.reduce(seen(layer.segments))
    if count := int(np.count_nonzero(unseen)):
        yield (
            f"{count_of(count, 'key')} {'is' if count == 1 else 'are'} seen by no query{any_head} "
            f"({spans(ranges(unseen))}): their content is lost. Add a pattern that covers their "
            "columns, such as local(n) or global_tokens(n)."
        )
    every, few = layer.every_block if layer.costly else ("", False)
    if every and few:
        yield (
            f"{every}, though {layer.share} of the computed pairs are allowed. {_less_waste(layer)}"
        )


def layer_notes(layer: Layer) -> Iterator[str]:
    """Yield how a layer's parts and heads differ, and what makes its kernels slow."""
    found, heads = layer.stats, layer.segments.grid.heads
    if not layer.causal and layer.asked is None and not found.causal:
        part = _made_causal(layer, layer.mask, layer.built(causal_mask()).key)
        if part is not None:
            yield (
                f"The part {part} is causal, yet the mask allows keys after the query. If that is "
                "not wanted, note that a | b & causal() means a | (b & causal()), and take "
                f"{layer.mask & causal_mask()}."
            )
    if not found.pairs:
        return
    some = ~layer.sees & layer.sees.any(axis=0)
    if heads > 1 and some.any():
        which = np.unique(np.flatnonzero(some.any(axis=1)) % heads)
        listed = ", ".join(map(str, which[:4].tolist()))
        more = f" and {len(which) - 4} more" if len(which) > 4 else ""
        yield (
            f"Some queries see nothing in head{'s' * (len(which) > 1)} {listed}{more}, but do in "
            "another head: those heads give them 0."
        )
    all_pairs, head = found.n_q * found.n_k * layer.blocks.batch, layer.segments.s % heads
    parts = [layer.segments.where(head == h) for h in range(heads)] if heads > 1 else []
    shares = [allowed_pairs(part) / all_pairs for part in parts]
    if shares and max(shares) > 1.5 * min(shares):
        yield (
            f"The heads differ: head {int(np.argmin(shares))} allows {percent(min(shares))} of the "
            f"pairs, head {int(np.argmax(shares))} {percent(max(shares))}. A layer passes on what "
            "any head sees, so the reach is that of all of them together."
        )
    every, few = layer.every_block if layer.costly else ("", False)
    if every and not few:
        yield f"{every}."
    if layer.costly and not every and found.waste > MUCH_WASTE:
        block_q, block_k = found.block_size
        yield (
            f"Of the pairs in computed blocks only {layer.share} are allowed (waste "
            f"{number(found.waste)}, blocks of {block_q} x {block_k}). {_less_waste(layer)}"
        )
    for load, others, line, way in (
        (found.row_load, layer.blocks.cols, "query block", "forward"),
        (found.column_load, layer.blocks.rows, "key block", "backward"),
    ):
        if layer.costly and load.imbalance > MUCH_IMBALANCE:
            dense = " Fewer global tokens spread the work." if load.max == others else ""
            yield (
                f"The busiest {line} has {load.max} non-empty blocks, {number(load.imbalance)} "
                f"times the mean: where there is little other work, the {way} pass waits for "
                f"it.{dense}"
            )


def _made_causal(layer: Layer, mask: Mask, causal: str) -> Mask | None:
    """Return the first intersection in the expression with a part that equals causal()."""
    if mask.kind == "&":
        return mask if any(layer.built(part).key == causal for part in mask.parts) else None
    found = (_made_causal(layer, part, causal) for part in mask.parts if mask.kind == "|")
    return next((part for part in found if part is not None), None)


def _less_waste(layer: Layer) -> str:
    """Return what was built and found to compute much less, in words."""
    mask, found, heads, said = layer.mask, layer.stats, layer.heads, []
    if found.n_q > AT_MOST:
        return "Try smaller blocks, or reorder the tokens."

    def computed(mask: Mask, block_size: int | tuple[int, int]) -> float:
        segments = Segments.of(mask.build(found.n_q, found.n_k, block_size, heads=heads))
        return area(segments) / (found.slices * found.n_q * found.n_k)

    if canvas := _canvas(mask):
        curve = TRANSFORMS["hilbert" if len(canvas) == 2 else "morton"].function(canvas)
        share = computed(curve(mask), found.block_size)
        order = Found(f"masks.{curve}", share, found.flop_density, found.n_q)
    else:
        order = best_order(mask, found.n_q, found.block_size, heads)
    if order and order.share < order.before / 1.5:
        at = f" at {order.tokens} tokens" if order.tokens < found.n_q else ""
        shares = f"{percent(order.share)} of all pairs{at}, not {percent(order.before)}"
        said.append(f"mask >> {order.text} computes {shares}.")
    for size in (size for size in SMALLER if size < max(found.block_size)):
        share = computed(mask, size)
        if share < found.flop_density / 2:
            shares = f"{percent(share)} of all pairs, not {percent(found.flop_density)}"
            said.append(f"Blocks of {size} x {size} compute {shares}.")
            break
    return " ".join(said) or "Reorder the tokens so that those that see each other are neighbours."


def _canvas(mask: Mask) -> tuple[int, ...]:
    """Return the extents of the first pattern on an image or a video in its own order, or ()."""
    if mask.kind in TRANSFORMS:  # reordered already, or not all of the tokens
        return ()
    own = getattr(mask, "arguments", {}).get("canvas", ())
    return own if len(own) > 1 else next(filter(None, map(_canvas, mask.parts)), ())


# ---- of all layers together ----


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


def reachability(model: Model) -> tuple[list[str], list[str]]:
    """Return problems and notes on keys that are never seen, and on too few layers."""
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
    """Return the first addition that was built and shows everything in time, or the best one."""
    size = max(model.blocks[0].block_size)
    local, wide, far = (PATTERNS[name].function for name in ("local", "global_tokens", "butterfly"))
    near = local(size, 0) if model.causal else local(size)
    additions = [near, wide(size), far(size) | near]
    if model.causal:
        additions[1:] = [part & causal_mask() for part in additions[1:]]
    best: tuple[float, str] = (model.reach.at_least or float("inf"), "")
    for addition in additions:
        tried = replace(model, mask=model.mask | addition).reach
        if tried.at_least is None or best[0] <= tried.at_least:
            continue
        best = tried.at_least, f"Add {addition}: everything is then seen {tried.depth}."
        if tried.at_least <= (model.layers or LAYERS):
            break
    return best[1]
