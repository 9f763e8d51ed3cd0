"""Findings about one layer, as sentences: leaks, holes, heads, and what costs speed."""

from typing import TYPE_CHECKING

import numpy as np

from masks.analysis import loads
from masks.analysis.segments import Segments, ranges
from masks.analysis.stats import Stats
from masks.analysis.words import count_of, number, percent, spans

if TYPE_CHECKING:
    from masks.types import Mask

MUCH_WASTE = 4  # computed pairs for an allowed one
MUCH_IMBALANCE = 4  # blocks of the busiest line over the mean; causal masks have 2
SMALLER = (64, 32, 16)  # blocks to try against waste,
AT_MOST = 1 << 16  # up to so many tokens
ON_A_CANVAS = ("neighborhood", "local_2d", "axial", "sliding_tiles")


def ahead(mask: "Mask", segments: Segments, stats: Stats, causal: bool | None) -> list[str]:
    """Keys after the query, where the model claims to be causal."""
    if not causal or stats.causal:
        return []
    pairs = count_of(loads.pairs_ahead(segments), "allowed pair")
    return [
        f"A causal model would look ahead: {pairs} have k > q, by up to {stats.ahead} tokens. "
        f"Take {_and_causal(mask)}."
    ]


def precedence(mask: "Mask", stats: Stats, causal: bool | None) -> list[str]:
    """A mask that names causal() and is not causal, where nothing else speaks of it."""
    named = "& causal()" in mask.key or "causal() &" in mask.key
    if causal is not None or stats.causal or not named:
        return []
    return [
        "The mask names causal(), yet it allows keys after the query. If that is not wanted, mind "
        f"that a | b & causal() means a | (b & causal()), and take {_and_causal(mask)}."
    ]


def _and_causal(mask: "Mask") -> str:
    from masks.patterns.bands import causal

    return str(mask & causal())


def holes(segments: Segments) -> list[str]:
    """Queries that see nothing, and keys that nobody sees, in any head."""
    grid = segments.grid
    if not len(segments.row):
        return [f"Nothing is allowed at {grid.n_q} tokens: every output is 0."]
    found = []
    any_head = " in any head" if grid.slices > 1 else ""
    blind = ~np.logical_or.reduce(loads.seeing(segments))
    if blind.any():
        count = int(np.count_nonzero(blind))
        one = count == 1
        found.append(
            f"{count_of(count, 'query', 'queries')} "
            f"{'sees' if one else 'see'} nothing{any_head} ({spans(ranges(blind))}): attention "
            f"gives {'it' if one else 'them'} 0. Add local(0), with which every token sees itself."
        )
    unseen = ~np.logical_or.reduce(loads.seen(segments))
    if unseen.any():
        count = int(np.count_nonzero(unseen))
        one = count == 1
        found.append(
            f"{count_of(count, 'key')} {'is' if one else 'are'} seen by no "
            f"query{any_head} ({spans(ranges(unseen))}): nobody learns what they hold. Add a "
            "pattern that covers their columns, such as local(n) or global_tokens(n)."
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
        found.append(
            f"Some queries see nothing in {_name_heads(which)}, but do in another head: those "
            "heads give them 0."
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


def _name_heads(heads: np.ndarray) -> str:
    listed = ", ".join(map(str, heads[:4].tolist()))
    more = f" and {len(heads) - 4} more" if len(heads) > 4 else ""
    return f"head{'s' * (len(heads) > 1)} {listed}{more}"


def speed(mask: "Mask", stats: Stats, heads: int | None) -> list[str]:
    """What makes the kernels slower than the number of allowed pairs says."""
    if not stats.pairs:
        return []
    found = []
    if stats.waste > MUCH_WASTE:
        block_q, block_k = stats.block_size
        allowed = percent(stats.element_density / stats.flop_density)
        remedy = _smaller_blocks(mask, stats, heads)
        on_canvas = any(name in mask.key for name in ON_A_CANVAS) and ">>" not in mask.key
        if on_canvas:
            remedy = (
                "Reorder the canvas with >> tiled(canvas, tile), or >> hilbert(canvas). " + remedy
            )
        elif not remedy:
            remedy = "Reorder the tokens so that those that see each other are neighbours."
        found.append(
            f"Of the pairs in computed blocks only {allowed} are allowed (waste "
            f"{number(stats.waste)}, blocks of {block_q} x {block_k}). {remedy}".rstrip()
        )
    loads_of = (
        (stats.row_load, "query block", "forward"),
        (stats.column_load, "key block", "backward"),
    )
    for load, line, way in loads_of:
        if load.imbalance > MUCH_IMBALANCE:
            found.append(
                f"The busiest {line} has {load.most} non-empty blocks, {number(load.imbalance)} "
                f"times the mean: where there is little other work, the {way} pass waits for it. "
                "Fewer global tokens spread the work."
            )
    return found


def _smaller_blocks(mask: "Mask", stats: Stats, heads: int | None) -> str:
    """The smaller block that computes half as much or less, in words."""
    if stats.n_q > AT_MOST or mask.per_layer:
        return ""
    for size in (size for size in SMALLER if size < max(stats.block_size)):
        segments = Segments.of(mask.build(stats.n_q, stats.n_k, size, heads=heads))
        area, pairs = loads.area(segments), loads.allowed_pairs(segments)
        if area / pairs < stats.waste / 2:
            return f"Blocks of {size} x {size} would waste {number(area / pairs)}."
    return ""
