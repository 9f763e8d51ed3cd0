"""Several devices share one sequence: which of them owns which tokens, and what has to travel.

Each rank owns blocks of tokens: their queries, keys and values. A non-empty block (row, column)
whose row and column have different owners needs a transfer. Either the key block travels to the
owner of the row, once for all rows there that need it, or the query block travels to the owner of
the column and its partial output comes back. Global tokens are the case where queries should
travel: one row that needs every key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.checks import file_path, flag, installed, integer
from masks.draw import COLOURS, EXAMPLE, MATPLOTLIB, save
from masks.runs import Bools, Ints
from masks.segments import Segments
from masks.types import BlockMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNKS = 32  # for each rank, of which "greedy" chooses
MEMORY = 3e12  # bytes a second that a device reads and writes
GREEDY_AT_MOST = 1 << 28  # steps of "greedy" that "auto" is ready to wait for


class Sizes(NamedTuple):
    """What the transfers and the time of a partition are counted from.

    tflops, gb_s: of one device, and of its link in each direction.
    """

    heads: int
    kv_heads: int
    head_dim: int = 128
    v_dim: int = 128
    itemsize: int = 2
    tflops: float = 600.0
    gb_s: float = 450.0


class Route(NamedTuple):
    """How the blocks of a mask are served."""

    here: Ints  # (nnz,) the rank that owns the row
    there: Ints  # (nnz,) the rank that owns the column
    visits: Bools  # (nnz,) whether the query block travels
    keys: Bools  # (units, ranks, blocks of tokens) the key blocks that each rank receives
    queries: Bools  # (units, ranks, blocks of tokens) and the query blocks

    @property
    def at(self) -> Ints:
        """The rank that computes each block."""
        return np.where(self.visits, self.there, self.here)


def route(
    blocks: Segments, unit: Ints, owner: Ints, ranks: int, price: float, queries: bool = True
) -> Route:
    """Return how each block is served.

    A row whose keys on another rank include more than `price` that no other row here needs is
    served there. Rows leave until none is left, which does not depend on their order; the bytes are
    within 2 % of the cheapest vertex cover for the masks that were compared.

    Args:
        unit: (nnz,) the slice of keys and values that a block belongs to.
        owner: (blocks of tokens,) ranks.
        price: bytes of a travelling query block and its output / bytes of a key and value block.
        queries: whether queries may travel at all.
    """
    n, here, there = len(owner), owner[blocks.row], owner[blocks.col]
    shape = int(unit.max(initial=0)) + 1, ranks, n
    visits = np.zeros(len(here), bool)
    key = (unit * ranks + here) * n + blocks.col
    while queries:
        left = key[~visits] if visits.any() else key
        alone = np.bincount(left, minlength=shape[0] * ranks * n) == 1
        at = np.flatnonzero(alone[key])
        at = at[(here[at] != there[at]) & ~visits[at]]
        pair = (unit[at] * n + blocks.row[at]) * ranks + there[at]
        leaves = np.bincount(pair, minlength=shape[0] * ranks * n) > price
        if not leaves.any():
            break
        visits |= leaves[(unit * n + blocks.row) * ranks + there]
    found = []
    for kept, code in ((~visits, key), (visits, (unit * ranks + there) * n + blocks.row)):
        travels = np.zeros(shape, bool)
        if kept.any():
            travels.reshape(-1)[code if kept.all() else code[kept]] = True
        travels[:, owner, np.arange(n)] = False  # a rank has its own
        found.append(travels)
    return Route(here, there, visits, *found)


def units(mask: BlockMask, slices: Ints, kv_heads: int) -> Ints:
    """Return the slice of keys and values of each slice of the mask.

    A mask without heads has one for each batch entry that it has.
    """
    if mask.heads == 1:
        return slices
    batch, head = np.divmod(slices, mask.heads)
    return batch * kv_heads + head * kv_heads // mask.heads


@dataclass(frozen=True)
class Partition:
    """What each rank computes, receives and sends in a forward. `print` shows it as a table.

    The backward receives the same again, and sends as many gradients back. Times are a model:
    compute at `sizes.tflops`, transfers at `sizes.gb_s`, hidden behind compute, no latency.

    Attributes:
        text: the mask, in words.
        n, block: tokens, and those of a block.
        name: of the rule that gave the owners.
        owner: (blocks of tokens,) ranks.
        computed: (ranks,) non-empty blocks, of all slices of the mask.
        received, sent: (ranks,) bytes.
        visits: query blocks that travel.
        gathered: bytes that each rank receives where all keys and values go everywhere.
        handled: bytes that the busiest rank reads and writes in a forward for what travels: blocks
            packed and unpacked, and partial outputs merged.
        tried: the modelled forward, in seconds, of each rule that was tried.
    """

    text: str
    n: int
    block: int
    sizes: Sizes
    name: str
    owner: Ints
    computed: Ints
    received: Ints
    sent: Ints
    visits: int
    gathered: float
    block_seconds: float
    handled: float
    tried: dict[str, float]

    @property
    def ranks(self) -> int:
        return len(self.computed)

    @property
    def imbalance(self) -> float:
        """The most blocks of a rank / their mean."""
        return float(self.computed.max() / self.computed.mean()) if self.computed.any() else 1.0

    @property
    def share(self) -> float:
        """The most bytes that a rank receives or sends / those of an all-gather."""
        return float(max(self.received.max(), self.sent.max()) / self.gathered)

    @property
    def compute(self) -> float:
        """Seconds of the forward on the busiest rank."""
        return float(self.computed.max()) * self.block_seconds

    @property
    def transfer(self) -> float:
        """Seconds of the busiest link in the forward."""
        return float(max(self.received.max(), self.sent.max())) / (1e9 * self.sizes.gb_s)

    @property
    def together(self) -> bool:
        """Whether waiting for the keys costs less than computing them apart and merging."""
        joined = 2.0 * self.gathered / self.ranks  # own keys are copied beside those that come
        return self.transfer + joined / MEMORY < self.handled / MEMORY

    @property
    def forward(self) -> float:
        """Seconds of the forward, transfers hidden behind compute."""
        return max(self.compute, self.transfer)

    @property
    def speedup(self) -> float:
        """Modelled time of one device / that of the ranks, forward and backward."""
        one = 3.5 * float(self.computed.sum()) * self.block_seconds
        ranks = self.forward + max(2.5 * self.compute, 2 * self.transfer)
        return one / ranks if ranks else 1.0

    def rivals(self) -> dict[str, tuple[float, float]]:
        """Return (bytes received in a forward, modelled speed-up) of other ways to share.

        all-gather: every rank has all keys, rows dealt out by their cost, transfer hidden.
        heads: all tokens of a share of the heads (Ulysses); only as many ranks as key heads.
        """
        sizes, one = self.sizes, float(self.computed.sum()) * self.block_seconds
        ideal, ranks, bandwidth = one / self.ranks, self.ranks, 1e9 * sizes.gb_s

        def speedup(compute: float, moved: float, hidden: bool) -> float:
            transfer = moved / bandwidth
            if hidden:
                time = max(compute, transfer) + max(2.5 * compute, 2 * transfer)
            else:
                time = 3.5 * compute + 2 * transfer
            return 3.5 * one / time if time else 1.0

        found = {"all-gather": (self.gathered, speedup(ideal, self.gathered, True))}
        if ranks <= sizes.kv_heads:
            width = (sizes.heads + sizes.kv_heads) * (sizes.head_dim + sizes.v_dim)
            moved = width * self.n / ranks * (ranks - 1) / ranks * sizes.itemsize
            found["heads"] = moved, speedup(ideal, moved, False)
        return found

    def __str__(self) -> str:
        sizes = self.sizes
        lines = [
            f"{self.text}: {self.n} tokens on {self.ranks} ranks, owners {self.name!r}",
            f"  blocks of a rank    {self.computed.mean():.6g} in the mean, {self.computed.max()}"
            f" at most ({self.imbalance:.3f})",
            f"  received, forward   {self.received.mean() / 1e6:.4g} MB in the mean,"
            f" {self.received.max() / 1e6:.4g} MB at most",
            f"  of an all-gather    {self.share:.4g}; query blocks that travel: {self.visits}",
            f"  model               {self.speedup:.3g} times one device, forward and backward"
            f" ({sizes.tflops:g} TFLOP/s, {sizes.gb_s:g} GB/s, transfers hidden)",
        ]
        for name, (moved, speedup) in self.rivals().items():
            lines.append(f"  {name:18s}  {moved / 1e6:.4g} MB, {speedup:.3g} times")
        if len(self.tried) > 1:
            tried = ", ".join(f"{name} {1e3 * t:.3g}" for name, t in self.tried.items())
            lines.append(f"  ms by owners        {tried}")
        return "\n".join(lines)

    __repr__ = __str__

    def draw(self, path: Any = None, ax: "Axes | None" = None) -> "Axes":
        """Draw the work and the transfers of every rank; needs matplotlib, but no display."""
        with installed(*MATPLOTLIB):
            from matplotlib import pyplot as plt
        if path is not None:
            file_path(path, EXAMPLE)
        if ax is None:
            ax = plt.figure(figsize=(6, 3), layout="constrained").subplots()
        place, width = np.arange(self.ranks), 0.27
        mean = self.computed.mean() or 1.0
        bars = (
            ("blocks computed / mean", self.computed / mean, COLOURS["full"]),
            ("bytes received / all-gather", self.received / self.gathered, COLOURS["partial"]),
            ("bytes sent / all-gather", self.sent / self.gathered, "0.6"),
        )
        for i, (label, values, colour) in enumerate(bars):
            ax.bar(place + (i - 1) * width, values, width, color=colour, label=label)
        ax.axhline(1.0, color="0.4", linewidth=0.8, linestyle=":")
        ax.set(xlabel="rank", xticks=place, title=f"{self.text}, {self.n} tokens ({self.name})")
        ax.legend(
            frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3
        )
        if path is not None:
            save(ax.figure, path)  # pyright: ignore[reportArgumentType]
        return ax


def partition(
    mask: BlockMask,
    ranks: int,
    *,
    owner: str | NDArray[np.integer] = "auto",
    queries: bool = True,
    heads: int | None = None,
    kv_heads: int | None = None,
    **sizes: Any,
) -> Partition:
    """Return what each of `ranks` devices computes, receives and sends.

    Args:
        owner: "contiguous", "zigzag", "snake" (rows by their cost, dealt out there and back),
            "greedy" (chunks of rows, the dearest first, where they add the least time), "auto" (the
            first of them that the model finds nearly as fast as any can be), or the rank of every
            block of tokens, (blocks,) ints.
        queries: whether queries may travel instead of keys.
        heads, kv_heads: of queries, and of keys; those of the mask, else 32, and `heads`.
        sizes: the further fields of `Sizes`.

    Raises ValueError for a mask whose queries and keys are not the same tokens, and for fewer
    blocks of tokens than ranks.
    """
    ranks, queries = integer("ranks", ranks, min=1), flag("queries", queries)
    size = mask.block_size[0]
    if mask.n_q != mask.n_k or len(set(mask.block_size)) > 1:
        raise ValueError(
            f"the mask is {mask.n_q} x {mask.n_k} in blocks of {mask.block_size}: ranks share one"
            " sequence, in square blocks"
        )
    heads = integer("heads", heads or (mask.heads if mask.heads > 1 else 32), min=1)
    kv_heads = integer("kv_heads", kv_heads or heads, min=1)
    if heads % kv_heads or mask.heads not in (1, heads, kv_heads):
        raise ValueError(
            f"heads is {heads} and kv_heads {kv_heads}, of a mask with {mask.heads} heads: kv_heads"
            " must divide heads, and the mask have 1, kv_heads or heads of them"
        )
    unknown = set(sizes) - set(Sizes._fields)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}: choose from {Sizes._fields[2:]}")
    sized = Sizes(heads, kv_heads, **{"v_dim": sizes.get("head_dim", 128)} | sizes)
    blocks = Segments.of(mask).blocks()
    unit = units(mask, blocks.s, kv_heads)
    count = _Counts(mask, sized, size)
    found, costs = [], []
    for name, given in owners(mask.rows, blocks, ranks, owner):
        found.append(_counted(name, given, ranks, mask, blocks, unit, count, queries))
        costs.append(_cost(found[-1].compute, found[-1].transfer, found[-1].handled))
        if costs[-1] <= 1.02 * _cost(found[-1].compute / found[-1].imbalance, 0.0, 0.0):
            break  # no other can be much faster
    # of nearly equal ones the first, which is the simplest
    best = next(p for p, cost in zip(found, costs, strict=True) if cost <= 1.02 * min(costs))
    best.tried.update({p.name: p.forward for p in found})
    return best


def _cost(compute: float, transfer: float, handled: float) -> float:
    return max(compute, transfer) + handled / MEMORY + 0.1 * (compute + transfer)


class _Counts:
    """Bytes and seconds of a block."""

    def __init__(self, mask: BlockMask, sizes: Sizes, size: int):
        own = mask.heads if mask.heads > 1 else 1
        shared = sizes.kv_heads if mask.heads > 1 else 1  # slices of keys and values
        self.sizes, self.size, self.price = sizes, size, sizes.heads / sizes.kv_heads
        width = (sizes.head_dim + sizes.v_dim) * size * sizes.itemsize
        self.key = width * sizes.kv_heads // shared
        self.query = sizes.head_dim * size * sizes.itemsize * sizes.heads // shared
        self.result = (sizes.v_dim * sizes.itemsize + 4) * size * sizes.heads // shared
        self.gathered = width * sizes.kv_heads * mask.batch * (mask.n_q / size)
        flop = 2 * (sizes.head_dim + sizes.v_dim) * size * size * sizes.heads / own
        self.seconds = flop / (1e12 * sizes.tflops)


def _counted(
    name: str, owner: Ints, ranks: int, mask: BlockMask, blocks: Segments, unit: Ints,
    count: _Counts, queries: bool,
) -> Partition:  # fmt: skip
    way = route(blocks, unit, owner, ranks, count.price, queries)
    received, sent = np.zeros(ranks), np.zeros(ranks)
    for travels, there, back in (
        (way.keys, count.key, 0),
        (way.queries, count.query, count.result),
    ):
        come = travels.sum((0, 2))
        gone = np.bincount(owner, travels.sum((0, 1)), ranks)
        received += there * come + back * gone
        sent += there * gone + back * come
    far = np.zeros(len(owner), bool)  # rows with keys that come
    far[blocks.row[(way.here != way.there) & ~way.visits]] = True
    merged = count.query * way.keys.shape[0] * np.bincount(owner, far, ranks)
    handled = float((6 * merged + 4 * received).max())
    gathered = count.gathered * (ranks - 1) / ranks if ranks > 1 else 1.0
    computed = np.bincount(way.at, minlength=ranks)
    return Partition(
        mask.text or "mask", mask.n_q, count.size, count.sizes, name, owner, computed,
        received.astype(np.int64), sent.astype(np.int64), int(way.queries.sum()), gathered,
        count.seconds, handled, {},
    )  # fmt: skip


# ---- owners: the rank of every block of tokens, as many for each as go ----


def owners(n: int, blocks: Segments, ranks: int, owner: Any) -> Iterator[tuple[str, Ints]]:
    """Yield (name, (n,) ranks) of the rules to try: the one that is named, or several.

    Raises ValueError for an unknown name, an array that does not fit, and too many ranks.
    """
    if ranks > n:
        raise ValueError(f"{n} blocks of tokens for {ranks} ranks: take smaller blocks")
    if not isinstance(owner, str):
        given = np.asarray(owner)
        if given.shape != (n,) or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"owner is {given.dtype} of {given.shape}: give ({n},) ints")
        if given.min() < 0 or given.max() >= ranks:
            raise ValueError(f"owner has ranks {given.min()} to {given.max()} of {ranks}")
        yield "own", given.astype(np.int64)
        return
    if owner not in ("auto", *RULES):
        raise ValueError(f"owner is {owner!r}: choose from auto, {', '.join(RULES)}, or an array")
    names = [owner]
    if owner == "auto":
        names = ["contiguous", "zigzag", "snake"]
        names += ["greedy"] if CHUNKS * ranks * ranks * n <= GREEDY_AT_MOST else []
    for name in names if ranks > 1 else names[:1]:
        yield name, RULES[name](n, blocks, ranks) if ranks > 1 else np.zeros(n, np.int64)


def _contiguous(n: int, blocks: Segments, ranks: int) -> Ints:
    return np.arange(n) * ranks // n


def _zigzag(n: int, blocks: Segments, ranks: int) -> Ints:
    chunk = np.arange(n) * 2 * ranks // n
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def _snake(n: int, blocks: Segments, ranks: int) -> Ints:
    cost, owner, place = np.bincount(blocks.row, minlength=n), np.empty(n, np.int64), np.arange(n)
    turn, there = np.divmod(place, ranks)
    owner[np.argsort(-cost, kind="stable")] = np.where(turn % 2, ranks - 1 - there, there)
    return owner


def _greedy(n: int, blocks: Segments, ranks: int) -> Ints:
    each = max(1, min(CHUNKS, n // ranks))
    chunk = np.arange(n) * (each * ranks) // n
    cost = np.bincount(chunk[blocks.row], minlength=each * ranks)
    need = np.zeros((len(cost), n), bool)
    need[chunk[blocks.row], blocks.col] = True
    need[chunk, np.arange(n)] = False  # own keys
    have, load, left = np.zeros((ranks, n), bool), np.zeros(ranks), np.full(ranks, each)
    chosen, mean = np.empty(len(cost), np.int64), cost.sum() / ranks
    key = 8.0 * len(cost) * cost.sum() / max(1, n * n)  # a fetched key weighs like so many blocks
    for i in np.argsort(-cost, kind="stable").tolist():
        new = (need[i] & ~have).sum(1)
        over = np.maximum(0, load + cost[i] - 1.02 * mean)
        score = np.where(left > 0, key * new + 0.02 * load + 50 * over, np.inf)
        rank = int(score.argmin())
        chosen[i] = rank
        have[rank] |= need[i]
        load[rank] += cost[i]
        left[rank] -= 1
    return chosen[chunk]


RULES: dict[str, Callable[[int, Segments, int], Ints]] = {
    "contiguous": _contiguous, "zigzag": _zigzag, "snake": _snake, "greedy": _greedy,
}  # fmt: skip
