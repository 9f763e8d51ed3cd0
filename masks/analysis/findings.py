"""Findings about one layer, as sentences: leaks, holes, heads, and what costs speed."""

import numpy as np

from masks.analysis import loads
from masks.analysis.orders import Found, best_order
from masks.analysis.segments import Segments, ranges
from masks.analysis.stats import Stats
from masks.analysis.words import count_of, number, percent, spans
from masks.registry import PATTERNS, TRANSFORMS
from masks.types import BlockMask, Mask

MUCH_WASTE = 4  # computed pairs for an allowed one
MUCH_IMBALANCE = 4  # blocks of the busiest row or column over the mean; causal masks have 2
SMALLER = (64, 32, 16)  # blocks to try against waste,
AT_MOST = 1 << 16  # up to so many tokens


def ahead(mask: Mask, found: Stats, causal_pairs: int) -> str:
    """Keys after the query in a model that should be causal."""
    pairs = count_of(found.pairs - causal_pairs, "allowed pair")
    return (
        f"A causal model would look ahead: {pairs} have k > q, by up to {found.ahead} tokens. "
        f"Take {mask & causal()}."
    )


def causal() -> Mask:
    """Return the pattern of that name."""
    return PATTERNS["causal"].function()


def precedence(mask: Mask, blocks: BlockMask) -> list[str]:
    """Return a mask that is not causal, though a part of it was made so by `& causal()`."""
    part = _made_causal(mask, blocks)
    if part is None:
        return []
    return [
        f"The part {part} is causal, yet the mask allows keys after the query. If that is not "
        f"wanted, note that a | b & causal() means a | (b & causal()), and take {mask & causal()}."
    ]


def _made_causal(mask: Mask, blocks: BlockMask) -> Mask | None:
    """Return the first intersection in the expression with a part that equals causal()."""

    def build(part: Mask) -> BlockMask:
        return part.build(blocks.n_q, blocks.n_k, blocks.block_size, heads=blocks.heads)

    if mask.kind == "&":
        wanted = build(causal()).key
        return mask if any(build(part).key == wanted for part in mask.parts) else None
    inner = mask.parts if mask.kind == "|" else ()
    found = (_made_causal(part, blocks) for part in inner)
    return next((part for part in found if part is not None), None)


def holes(segments: Segments) -> list[str]:
    """Return the queries that see nothing, and keys that no query sees, in any head."""
    grid = segments.grid
    if not len(segments.row):
        return [f"Nothing is allowed at {grid.n_q} tokens: every output is 0."]
    found = []
    any_head = " in any head" if grid.slices > 1 else ""
    blind = ~np.logical_or.reduce(loads.seeing(segments))
    if count := int(np.count_nonzero(blind)):
        sees, them = ("sees", "it") if count == 1 else ("see", "them")
        found.append(
            f"{count_of(count, 'query', 'queries')} {sees} nothing{any_head} "
            f"({spans(ranges(blind))}): attention gives {them} 0. Add local(0), with which every "
            "token sees itself."
        )
    unseen = ~np.logical_or.reduce(loads.seen(segments))
    if count := int(np.count_nonzero(unseen)):
        found.append(
            f"{count_of(count, 'key')} {'is' if count == 1 else 'are'} seen by no query{any_head} "
            f"({spans(ranges(unseen))}): their content is lost. Add a pattern that covers their "
            "columns, such as local(n) or global_tokens(n)."
        )
    return found


def between_heads(segments: Segments) -> list[str]:
    """How the heads differ, and what only some of them lack."""
    heads = segments.grid.heads
    if heads == 1 or not len(segments.row):
        return []
    found = []
    sees = loads.seeing(segments)
    some = ~sees & sees.any(axis=0)
    if some.any():
        which = np.unique(np.flatnonzero(some.any(axis=1)) % heads)
        listed = ", ".join(map(str, which[:4].tolist()))
        more = f" and {len(which) - 4} more" if len(which) > 4 else ""
        found.append(
            f"Some queries see nothing in head{'s' * (len(which) > 1)} {listed}{more}, but do in "
            "another head: those heads give them 0."
        )
    slices = [segments.where(segments.s % heads == head) for head in range(heads)]
    all_pairs = segments.grid.n_q * segments.grid.n_k * segments.grid.batch
    shares = [loads.allowed_pairs(one) / all_pairs for one in slices]
    if max(shares) > 1.5 * min(shares):
        found.append(
            f"The heads differ: head {int(np.argmin(shares))} allows {percent(min(shares))} of the "
            f"pairs, head {int(np.argmax(shares))} {percent(max(shares))}. A layer passes on what "
            "any head sees, so the reach is that of all of them together."
        )
    return found


def speed(mask: Mask, found: Stats, heads: int | None) -> tuple[list[str], list[str]]:
    """(problems, notes): what makes the kernels slower than the allowed pairs suggest."""
    if not found.pairs:
        return [], []
    wrong, said = [], []
    share = percent(found.element_density / found.flop_density)
    if every := _every_block(found):
        blocks, dense, most = every
        sentence = f"Every block{blocks} is computed: no faster than {dense} attention"
        if 2 * found.pairs < most:
            less = _less_waste(mask, found, heads)
            wrong.append(f"{sentence}, though {share} of the computed pairs are allowed. {less}")
        else:
            said.append(f"{sentence}.")
    elif found.waste > MUCH_WASTE:
        block_q, block_k = found.block_size
        said.append(
            f"Of the pairs in computed blocks only {share} are allowed (waste "
            f"{number(found.waste)}, blocks of {block_q} x {block_k}). "
            f"{_less_waste(mask, found, heads)}"
        )
    rows, cols = -(-found.n_q // found.block_size[0]), -(-found.n_k // found.block_size[1])
    for load, others, line, way in (
        (found.row_load, cols, "query block", "forward"),
        (found.column_load, rows, "key block", "backward"),
    ):
        if load.imbalance > MUCH_IMBALANCE:
            dense = " Fewer global tokens spread the work." if load.max == others else ""
            said.append(
                f"The busiest {line} has {load.max} non-empty blocks, {number(load.imbalance)} "
                f"times the mean: where there is little other work, the {way} pass waits for "
                f"it.{dense}"
            )
    return wrong, said


def _every_block(found: Stats) -> tuple[str, str, int] | None:
    """(which blocks, which attention, its pairs) that a mask computes all of, allowing fewer pairs.

    None where it skips a block, or allows all of these pairs.
    """
    blocks, most = found.blocks, found.slices * found.n_q * found.n_k
    which, dense = "", "dense"
    if found.causal:
        whole = causal().build(found.n_q, found.n_k, found.block_size)
        blocks, most = found.slices * whole.nnz, found.slices * found.n_q * (found.n_q + 1) // 2
        which, dense = " on and below the diagonal", "causal"
    if found.full + found.partial < blocks or found.pairs == most:
        return None
    return which, dense, most


def _less_waste(mask: Mask, found: Stats, heads: int | None) -> str:
    """Return what was built and found to compute much less, in words."""
    if found.n_q > AT_MOST:
        return "Try smaller blocks, or reorder the tokens."

    def computed(mask: Mask, block_size: int | tuple[int, int]) -> float:
        segments = Segments.of(mask.build(found.n_q, found.n_k, block_size, heads=heads))
        return loads.area(segments) / (found.slices * found.n_q * found.n_k)

    said = []
    much = found.flop_density
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
        if share < much / 2:
            shares = f"{percent(share)} of all pairs, not {percent(much)}"
            said.append(f"Blocks of {size} x {size} compute {shares}.")
            break
    return " ".join(said) or "Reorder the tokens so that those that see each other are neighbours."


def _canvas(mask: Mask) -> tuple[int, ...]:
    """Return the extents of the first pattern on an image or a video, in its own order; ()
    without one.
    """
    if mask.kind in TRANSFORMS:  # reordered already, or not all of the tokens
        return ()
    own = getattr(mask, "arguments", {}).get("canvas", ())
    return own if len(own) > 1 else next(filter(None, map(_canvas, mask.parts)), ())
