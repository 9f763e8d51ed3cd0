"""What is wrong with a mask, in words, before it is trained: findings, each with its remedy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from masks.analysis.reach import Reach, built, reach
from masks.analysis.stats import Load, Stats, count_of, number, percent, spans, stats
from masks.checks import flag, integer
from masks.registry import PATTERNS, TRANSFORMS
from masks.segments import Segments, allowed_pairs, area, ranges, seeing, seen
from masks.types import BlockMask, Mask

LAYERS = 64  # that are followed where a model has fewer
MUCH_WASTE = 4  # computed pairs for an allowed one
MUCH_IMBALANCE = 4  # blocks of the busiest row or column over the mean; causal masks have 2
MOST_DIFFERENT = 4  # layers whose speed is looked at
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
        lines = [f"  ! {sentence}" for sentence in self.problems]
        lines += [f"  - {sentence}" for sentence in self.notes]
        return "\n".join([f"{self.text}: {verdict}", *lines])


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
    stack = built(mask, seq_len, layers, block_size, heads)
    different = list(dict.fromkeys(stack))
    numbers = [stats(blocks) for blocks in different]
    leaks = not all(found.causal for found in numbers)
    claim = causal if causal is not None else not leaks
    # What looks ahead is no help to a causal model.
    allowed = mask & causal_mask() if claim and leaks else mask
    model = Model(allowed, seq_len, layers, claim, block_size, heads)

    said: dict[str, list[str]] = {"!": [], "-": []}
    if (entries := max(blocks.batch for blocks in different)) > 1:
        said["-"].append(
            f"The {entries} batch entries have masks of their own, and are not separated here: the"
            " reach is that of the first one, and the rest holds for all of them together. Check"
            " the mask of each entry by itself."
        )
    for i, (blocks, found) in enumerate(zip(different, numbers, strict=True)):
        index = stack.index(blocks)
        where = f"Layer {index}: " if len(different) > 1 else ""
        costly = i < MOST_DIFFERENT
        layer = Layer(mask, mask.layer(index), blocks, found, causal, claim, heads, costly)
        for mark, finding in FINDINGS:
            if sentence := finding(layer):
                said[mark].append(where + sentence)
    if model.blocks[0].nnz:
        mark, sentence = model.finding()
        said[mark].append(sentence)
    depth = f", {count_of(layers, 'layer')}" if layers else ""
    text = f"{mask} at {seq_len} tokens{depth}{', causal' if claim else ''}"
    return Report(text, tuple(said["!"]), tuple(said["-"]), tuple(numbers), model.reach)


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
    def sees(self) -> np.ndarray:
        """(slices, n_q): whether a query sees any key."""
        return seeing(self.segments)

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
        if not self.costly or found.full + found.partial < blocks or found.pairs in (0, most):
            return "", False
        sentence = f"Every block{which} is computed: no faster than {dense} attention"
        return sentence, 2 * found.pairs < most

    def built(self, part: Mask) -> BlockMask:
        """Build a part of the mask in the same way."""
        blocks = self.blocks
        return part.build(blocks.n_q, blocks.n_k, blocks.block_size, heads=blocks.heads)

    def looks_ahead(self) -> str:
        if not self.causal or self.stats.causal:
            return ""
        pairs = self.stats.pairs - stats(self.built(self.mask & causal_mask())).pairs
        return (
            f"A causal model would look ahead: {count_of(pairs, 'allowed pair')} have k > q, by up "
            f"to {self.stats.ahead} tokens. Take {self.whole & causal_mask()}."
        )

    def nothing(self) -> str:
        if self.stats.pairs:
            return ""
        return f"Nothing is allowed at {self.stats.n_q} tokens: every output is 0."

    def blind(self) -> str:
        return self._holes(
            ~np.logical_or.reduce(self.sees), ("query sees", "queries see"), "nothing{}",
            "attention gives {} 0. Add local(0), with which every token sees itself.",
        )  # fmt: skip

    def unseen(self) -> str:
        return self._holes(
            ~np.logical_or.reduce(seen(self.segments)), ("key is", "keys are"),
            "seen by no query{}", "their content is lost. Add a pattern that covers their columns, "
            "such as local(n) or global_tokens(n).",
        )  # fmt: skip

    def _holes(self, missing: np.ndarray, who: tuple[str, str], what: str, remedy: str) -> str:
        count = int(np.count_nonzero(missing))
        if not count or not self.stats.pairs:
            return ""
        any_head = " in any head" if self.segments.grid.slices > 1 else ""
        them = remedy.format("it" if count == 1 else "them")
        where = spans(ranges(missing))
        return f"{count} {who[count > 1]} {what.format(any_head)} ({where}): {them}"

    def half_causal(self) -> str:
        if self.causal or self.asked is not None or self.stats.causal:
            return ""
        part = _made_causal(self, self.mask, self.built(causal_mask()).key)
        if part is None:
            return ""
        return (
            f"The part {part} is causal, yet the mask allows keys after the query. If that is not "
            "wanted, note that a | b & causal() means a | (b & causal()), and take "
            f"{self.mask & causal_mask()}."
        )

    def blind_heads(self) -> str:
        heads, some = self.segments.grid.heads, ~self.sees & self.sees.any(axis=0)
        if heads == 1 or not some.any():
            return ""
        which = np.unique(np.flatnonzero(some.any(axis=1)) % heads).tolist()
        more = f" and {len(which) - 4} more" if len(which) > 4 else ""
        return (
            f"Some queries see nothing in head{'s' * (len(which) > 1)} "
            f"{', '.join(map(str, which[:4]))}{more}, but do in another head: those heads give "
            "them 0."
        )

    def unlike_heads(self) -> str:
        found, heads, head = self.stats, self.segments.grid.heads, self.segments.s
        parts = [self.segments.where(head % heads == h) for h in range(heads if heads > 1 else 0)]
        shares = [allowed_pairs(p) / (found.n_q * found.n_k * self.blocks.batch) for p in parts]
        if not shares or max(shares) <= 1.5 * min(shares):
            return ""
        return (
            f"The heads differ: head {int(np.argmin(shares))} allows {percent(min(shares))} of the "
            f"pairs, head {int(np.argmax(shares))} {percent(max(shares))}. A layer passes on what "
            "any head sees, so the reach is that of all of them together."
        )

    def no_saving(self) -> str:
        every, few = self.every_block
        if not few:
            return ""
        remedy = _less_waste(self.mask, self.stats, self.heads)
        return f"{every}, though {self._share} of the computed pairs are allowed. {remedy}"

    def dense(self) -> str:
        every, few = self.every_block
        return f"{every}." if every and not few else ""

    def waste(self) -> str:
        found = self.stats
        if not self.costly or self.every_block[0] or not found.pairs or found.waste <= MUCH_WASTE:
            return ""
        block_q, block_k = found.block_size
        return (
            f"Of the pairs in computed blocks only {self._share} are allowed (waste "
            f"{number(found.waste)}, blocks of {block_q} x {block_k}). "
        ) + _less_waste(self.mask, found, self.heads)

    @property
    def _share(self) -> str:
        """Allowed pairs of those computed, in words."""
        return percent(self.stats.element_density / self.stats.flop_density)

    def busy_row(self) -> str:
        return self._busy(self.stats.row_load, self.blocks.cols, "query block", "forward")

    def busy_column(self) -> str:
        return self._busy(self.stats.column_load, self.blocks.rows, "key block", "backward")

    def _busy(self, load: Load, others: int, line: str, way: str) -> str:
        if not self.costly or load.imbalance <= MUCH_IMBALANCE:
            return ""
        dense = " Fewer global tokens spread the work." if load.max == others else ""
        return (
            f"The busiest {line} has {load.max} non-empty blocks, {number(load.imbalance)} times "
            f"the mean: where there is little other work, the {way} pass waits for it.{dense}"
        )


# Each returns what it has found in a layer, with the remedy, or something false.
FINDINGS: tuple[tuple[str, Callable[[Layer], Any]], ...] = (
    ("!", Layer.looks_ahead),
    ("!", Layer.nothing),
    ("!", Layer.blind),
    ("!", Layer.unseen),
    ("!", Layer.no_saving),
    ("-", Layer.half_causal),
    ("-", Layer.blind_heads),
    ("-", Layer.unlike_heads),
    ("-", Layer.dense),
    ("-", Layer.waste),
    ("-", Layer.busy_row),
    ("-", Layer.busy_column),
)


def _less_waste(mask: Mask, found: Stats, heads: int | None) -> str:
    """Return what was built and found to compute much less, in words."""
    reorder = "eorder the tokens so that those that see each other are neighbours."
    if found.n_q > AT_MOST:
        return f"Try smaller blocks, or r{reorder}"

    def computed(mask: Mask, block_size: Any) -> float:
        segments = Segments.of(mask.build(found.n_q, found.n_k, block_size, heads=heads))
        return area(segments) / (found.slices * found.n_q * found.n_k)

    def better(share: float) -> str:
        return f"{percent(share)} of all pairs, not {percent(found.flop_density)}."

    said: list[str] = []
    if canvas := _canvas(mask):
        curve = TRANSFORMS["hilbert" if len(canvas) == 2 else "morton"].function(canvas)
        share = computed(mask >> curve, found.block_size)
        if share < found.flop_density / 1.5:
            said.append(f"mask >> masks.{curve} computes {better(share)}")
    for size in (size for size in SMALLER if size < max(found.block_size)):
        share = computed(mask, size)
        if share < found.flop_density / 2:
            said.append(f"Blocks of {size} x {size} compute {better(share)}")
            break
    return " ".join(said) or f"R{reorder}"


def _canvas(mask: Mask) -> tuple[int, ...]:
    """Return the extents of the first pattern on an image or a video in its own order, or ()."""
    if mask.kind in TRANSFORMS:  # reordered already, or not all of the tokens
        return ()
    own = getattr(mask, "arguments", {}).get("canvas", ())
    return own if len(own) > 1 else next(filter(None, map(_canvas, mask.parts)), ())


def _made_causal(layer: Layer, mask: Mask, causal: str) -> Mask | None:
    """Return the first intersection in the expression with a part that equals causal()."""
    if mask.kind == "&":
        return mask if any(layer.built(part).key == causal for part in mask.parts) else None
    found = (_made_causal(layer, part, causal) for part in mask.parts if mask.kind == "|")
    return next((part for part in found if part is not None), None)


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

    def finding(self) -> tuple[str, str]:
        """Return a problem or a note, on keys that are never seen or need many layers."""
        found, layers = self.reach, self.layers
        if found.at_least is None and found.settled:
            separator = self._separator(self.mask)
            if separator is not None:
                return "-", (
                    f"A query sees {found.share()}, at any depth. That is what {separator} is for."
                )
            start = "With causal, a query" if self.causal else "A query"
            only = "only " if found.exact else ""
            return "!", (
                f"{start} can see {only}{found.share()}, at any depth; {found.most_blind}. "
                f"{self._remedy()}"
            ).rstrip()
        if layers is not None and (found.at_least is None or found.at_least > layers):
            whole = "" if found.at_least is None else f"; all of it is seen {found.depth}"
            return "!", (
                f"{count_of(layers, 'layer')} {'is' if layers == 1 else 'are'} not enough: a query "
                f"has seen {found.share(layers)} by then{whole}. {self._remedy()}"
            ).rstrip()
        if found.at_least is None:
            return (
                "-",
                f"After {LAYERS} layers a query has seen {found.share(LAYERS)}, and more later.",
            )
        if layers is not None and (found.at_most is None or found.at_most > layers):
            return "-", (
                f"Whether {count_of(layers, 'layer')} show a query every key is open: by blocks, "
                f"everything is seen {found.depth}. Use reach(.., exact=True) at a shorter length."
            )
        bounds = "" if found.exact or found.at_least == found.at_most else " (bounds by blocks)"
        return "-", f"Everything is seen {found.depth}{bounds}."

    def _separator(self, mask: Mask) -> Mask | None:
        """Return the part of the mask that is made to hide what is never seen, such as documents.

        A pattern of the section "Segments" is made for that. It counts where by itself, at any
        depth, every query sees as much as with the whole mask.
        """
        entry = PATTERNS.get(mask.kind)
        if mask.kind == "packed" or (entry and entry.section == "Segments"):
            alone = replace(self, mask=mask).reach.seen_keys
            return mask if np.array_equal(alone, self.reach.seen_keys) else None
        joined = mask.parts if mask.kind in ("|", "&", "heads") else ()
        found = map(self._separator, joined)
        return next((part for part in found if part is not None), None)

    def _remedy(self) -> str:
        """Return the first addition that was built and shows everything in time, or the best."""
        size = max(self.blocks[0].block_size)
        names = ("local", "global_tokens", "butterfly")
        local, wide, far = (PATTERNS[name].function for name in names)
        near = local(size, 0) if self.causal else local(size)
        additions = [near, wide(size), far(size) | near]
        if self.causal:
            additions[1:] = [part & causal_mask() for part in additions[1:]]
        best: tuple[float, str] = (self.reach.at_least or float("inf"), "")
        for addition in additions:
            tried = replace(self, mask=self.mask | addition).reach
            if tried.at_least is None or best[0] <= tried.at_least:
                continue
            best = tried.at_least, f"Add {addition}: everything is then seen {tried.depth}."
            if tried.at_least <= (self.layers or LAYERS):
                break
        return best[1]
