"""What a query has seen after t layers: exactly by tokens, or between two bounds by blocks.

A layer adds to every token what its query sees, and the residual stream keeps what the token had.
So after t layers, query q has seen key k if a path of at most t allowed pairs leads from q to k. A
token has its own information from the start. All heads count together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from masks.analysis.layers import count_ones, possibly, surely, unpack
from masks.analysis.stats import count_of, percent, spans
from masks.checks import flag, integer
from masks.runs import Ints
from masks.segments import Segments, by_token, ranges
from masks.types import BlockMask, Mask

EXACT = 4096  # tokens: up to here the reach is that of tokens, unless something else is asked for
MOST_TOKENS = 1 << 15  # of the exact reach


@dataclass(frozen=True, eq=False)
class Reach:
    """What `reach` finds. `print` shows it in words.

    Attributes:
        n, unit: tokens, and whether pairs of "tokens" or of "blocks" were counted.
        causal: whether only the pairs with k <= q are wanted, and not all.
        lower, upper: share of the wanted pairs that are seen after 1, 2, .. layers. Of blocks, a
            pair counts in `upper` when some query there may see some key, and in `lower` when
            every query surely sees every key. Equal for tokens.
        at_least, at_most: layers until every query has seen every wanted key lie between these
            two. None: not in the layers of `upper`, and of `lower`.
        settled: whether more layers would change nothing in `upper`.
        seen_keys, wanted_keys: by query (block): how many key tokens (blocks) it has seen in the
            end, by `upper`, and how many are wanted.
        seen_by, wanted_by: by key (block): how many queries (blocks) have seen it, likewise.
        worst, missing: the query tokens (first, last) that miss most, and which keys they miss.
    """

    n: int
    unit: str
    causal: bool
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    at_least: int | None
    at_most: int | None
    settled: bool
    seen_keys: Ints = field(repr=False)
    wanted_keys: Ints = field(repr=False)
    seen_by: Ints = field(repr=False)
    wanted_by: Ints = field(repr=False)
    worst: tuple[int, int] | None
    missing: tuple[tuple[int, int], ...]

    @property
    def exact(self) -> bool:
        return self.unit == "tokens"

    @property
    def never(self) -> str:
        """The pairs that are never seen, at any depth, in words; empty where there are none."""
        if not self.settled or self.at_least is not None:
            return ""
        return f"A query sees {self.share()}, at any depth; {self.most_blind}."

    def share(self, layers: int = 0) -> str:
        """Return in words what a query has seen after so many layers, or in the end."""
        seen = self.upper[min(layers, len(self.upper)) - 1]
        most, before = "" if self.exact else "at most ", " before it" if self.causal else ""
        return f"{most}{percent(seen)} of the keys{before}"

    @property
    def most_blind(self) -> str:
        """The query, or block of queries, that misses most keys in the end, in words."""
        first, last = self.worst or (0, 0)
        who = f"query {first} never sees" if first == last else f"queries {first}-{last} never see"
        return f"{who} keys {spans(self.missing)}"

    def __str__(self) -> str:
        what = f"pairs of {self.unit}" + (" with k <= q" if self.causal else "")
        lines = [f"{what} seen, {self.n} tokens"]
        shown = [i for i in range(len(self.upper)) if i < 12 or i == len(self.upper) - 1]
        for i in shown:
            low, high = percent(self.lower[i]), percent(self.upper[i])
            lines.append(f"  layer {i + 1:3}  {high if low == high else f'{low} to {high}'}")
        lines.append(f"  everything: {self.depth}")
        return "\n".join([*lines, self.never] if self.never else lines)

    @property
    def depth(self) -> str:
        """After how many layers every query has seen every wanted key, in words."""
        if self.at_least is None:
            in_vain = count_of(len(self.upper), "layer")
            return "never, at any depth" if self.settled else f"not in {in_vain}"
        if self.at_most is None:
            return f"after {count_of(self.at_least, 'layer')} at the earliest"
        if self.at_least == self.at_most:
            return f"after {count_of(self.at_least, 'layer')}"
        return f"after {self.at_least} to {self.at_most} layers"


def reach(
    blocks: BlockMask | Sequence[BlockMask],
    layers: int | None = None,
    *,
    causal: bool = False,
    exact: bool | None = None,
    batch: int | None = None,
    head: int | None = None,
) -> Reach:
    """Return what is seen after 1, 2, .. layers of one mask, or of one mask a layer.

    Args:
        blocks: of self-attention, n_q == n_k. Several are taken in turn, the first one in layer 1.
        layers: None goes on until nothing changes (256 layers at most), or to the end of several
            masks.
        causal: count the pairs with k <= q only.
        exact: True by tokens, up to 32768 of them; False by blocks. None: by tokens up to 4096 of
            them, where they are not too many pieces. That takes some hundredths of a second at 4096
            tokens and seconds at 32768, more for masks of small pieces that need many layers.
        batch: which entry, needed where entries have masks of their own.
        head: which head alone; all heads together by default.

    Raises:
        ValueError: n_q != n_k, masks of different shapes, an argument out of range, entries with
            masks of their own without `batch`, or an exact reach that would cost too much.
    """
    stack = list(blocks) if isinstance(blocks, Sequence) else [blocks]
    layers = None if layers is None else integer("layers", layers, min=1)
    flag("causal", causal)
    asked = exact is not None and flag("exact", exact)
    if not stack:
        raise ValueError("blocks is empty: give a block mask, or one for every layer")
    first = stack[0]
    shapes = {(b.n_q, b.n_k, b.block_size) for b in stack}
    if len(shapes) > 1:
        raise ValueError(f"masks of shapes {sorted(shapes)} do not stack: build them alike")
    if first.n_q != first.n_k:
        raise ValueError(
            f"n_q is {first.n_q} and n_k {first.n_k}: only self-attention goes through layers, "
            "so build with n_k = n_q"
        )
    if asked and first.n_q > MOST_TOKENS:
        raise ValueError(
            f"the exact reach of {first.n_q} tokens costs too much: take {MOST_TOKENS} at most, "
            "or exact=False"
        )
    exact = asked or (exact is None and first.n_q <= EXACT)
    if layers is None and len(stack) > 1:
        layers = len(stack)
    entry = _entry(stack, batch)
    segments = [Segments.of(b, entry if b.batch > 1 else 0, head) for b in stack]
    if exact:
        try:
            segments = [by_token(one) for one in segments]
        except ValueError:  # too many pieces
            if asked:
                raise
            exact = False
    walk = possibly(segments, causal)
    seen = walk.run(layers)
    least = seen if exact else surely(segments, causal).run(layers)
    total = int(walk.wanted.sum())
    depth = max(len(seen.counts), len(least.counts))  # the last number holds from there on
    upper, lower = (x + x[-1:] * (depth - len(x)) for x in (seen.counts, least.counts))
    grid, wanted, seen_keys = walk.grid, walk.wanted, count_ones(seen.found)
    query = int(np.argmax(wanted - seen_keys))
    unseen = ~unpack(seen.found[query : query + 1])[0, : wanted[query]]
    missing = ranges(np.repeat(unseen, grid.block_k)[: grid.n_k])
    return Reach(
        n=first.n_q,
        unit="tokens" if exact else "blocks",
        causal=causal,
        lower=tuple(count / total for count in lower),
        upper=tuple(count / total for count in upper),
        at_least=_when(upper, total),
        at_most=_when(lower, total),
        settled=seen.settled,
        seen_keys=seen_keys,
        wanted_keys=wanted,
        seen_by=seen.by,
        wanted_by=len(wanted) - np.searchsorted(np.sort(wanted), np.arange(grid.cols), "right"),
        worst=(int(grid.q_first[query]), int(grid.q_last[query])) if missing else None,
        missing=missing,
    )


def built(
    mask: Mask, seq_len: int, layers: int | None, block_size: Any, heads: int | None
) -> list[BlockMask]:
    """Return the block mask of every layer; only one where all layers have the same.

    Raises:
        ValueError: as `Mask.build`, or a mask that differs from layer to layer without `layers`.
    """
    if mask.per_layer and layers is None:
        raise ValueError(f"{mask} differs from layer to layer: give layers=")
    count = integer("layers", layers, min=1) if mask.per_layer else 1
    return [mask.layer(i).build(seq_len, block_size=block_size, heads=heads) for i in range(count)]


def _entry(stack: Sequence[BlockMask], batch: int | None) -> int:
    """Return the batch entry that is followed."""
    entries = max(b.batch for b in stack)
    if batch is not None:
        return integer("batch", batch, min=0, max=entries - 1)
    if entries > 1:
        raise ValueError(
            f"batch is None, and the {entries} batch entries have masks of their own: give batch=0"
            f" to {entries - 1} for the reach of one"
        )
    return 0


def _when(counts: list[int], total: int) -> int | None:
    """Return the first layer with all of them."""
    return next((i + 1 for i, count in enumerate(counts) if count == total), None)
