"""What each rank sends, receives and computes, for one mask and one distribution of the tokens."""

from dataclasses import dataclass

import numpy as np

from masks import BlockMask
from masks.analysis.partition import route, units
from masks.runs import Bools, Ints
from masks.take import blocks_of, moved


@dataclass(frozen=True)
class Exchange:
    """Blocks of tokens that a rank sends, and those that it receives, for each peer.

    A unit is a block of tokens in one slice, (slice, place of the block in its tensor). The mask's
    batch entries and the key heads that it tells apart are the slices.
    """

    send: tuple[Ints, ...]  # for each peer, slice * blocks of the sent tensor + place
    slots: tuple[Ints, ...]  # for each peer, slice * `blocks` + place in the received tensor
    blocks: int  # of the received tensor, in every slice

    @property
    def sent(self) -> int:
        """Units."""
        return sum(map(len, self.send))

    @property
    def received(self) -> int:
        """Units."""
        return sum(map(len, self.slots))

    def back(self, blocks: int) -> "Exchange":
        """Return the exchange of what belongs to the units, the other way."""
        return Exchange(self.slots, self.send, blocks)


@dataclass(frozen=True)
class Part:
    """All that one rank has to know."""

    own: Ints  # blocks of tokens, ascending
    tokens: int
    slices: tuple[int, int]  # batch entries and key heads that the mask tells apart
    keys: Exchange  # key blocks that come
    queries: Exchange  # query blocks that come, of rows whose keys are here
    far: Ints | None  # places of the own blocks that need keys that came; None: of all
    local: BlockMask | None  # own queries, own keys; None: no block
    remote: BlockMask | None  # own queries of `far`, keys that came
    guests: BlockMask | None  # queries that came, own keys


def parts(
    mask: BlockMask, owner: Ints, ranks: int, heads: int, kv_heads: int, queries: bool = True
) -> tuple[list[Part], bool, bool]:
    """Return the part of every rank, and whether any key and whether any query travels at all.

    Every rank computes the same from the same arguments.
    """
    blocks, n, size = blocks_of(mask), mask.rows, mask.block_size[0]
    unit = units(mask, blocks.slice, kv_heads)
    way = route(blocks, unit, owner, heads / kv_heads, queries)
    slices = mask.batch, kv_heads if mask.heads > 1 else 1
    counts = np.bincount(owner, minlength=ranks)
    place = np.empty(n, np.int64)  # of a block of tokens in its rank
    for rank in range(ranks):
        place[owner == rank] = np.arange(counts[rank])
    width = np.minimum((np.arange(n) + 1) * size, mask.n_k) - np.arange(n) * size
    tokens = np.bincount(owner, width, ranks).astype(int)
    given = _Travel(unit, slices[0] * slices[1], ranks, place, counts)
    keys, key_slot = given.exchanges(way.fetched, way.here, way.there, blocks.col)
    guests, guest_slot = given.exchanges(way.visits, way.there, way.here, blocks.row)
    made = []
    for rank in range(ranks):
        own, many = np.flatnonzero(owner == rank), int(tokens[rank])
        fetched, visitors = keys[rank].blocks * size, guests[rank].blocks * size

        def part(kept: Bools, row: Ints, col: Ints, n_q: int, n_k: int, whole: bool):
            if not kept.any():
                return None
            inner = blocks._replace(row=row, col=col).where(kept)
            cut = None if whole else width[blocks.col[kept]]
            return BlockMask(*moved(mask, inner, n_q, n_k, cut))

        here = way.here == rank
        row, col = place[blocks.row], place[blocks.col]
        local = here & ~way.fetched & ~way.visits
        remote, visited = here & way.fetched, (way.there == rank) & way.visits
        far = np.unique(row[remote])
        line = np.zeros(n, np.int64)  # of a place among `far`
        line[far] = np.arange(len(far))
        most = int(width[own[far]].sum())
        made.append(
            Part(
                own,
                many,
                slices,
                keys[rank],
                guests[rank],
                None if len(far) == len(own) else far,
                part(local, row, col, many, many, True),
                part(remote, line[row], key_slot, most, fetched, False),
                part(visited, guest_slot, col, visitors, many, True),
            )
        )
    return made, bool(way.fetched.any()), bool(way.visits.any())


class _Travel:
    """What goes from rank to rank: the units of the blocks, and the slots that they take there."""

    def __init__(self, unit: Ints, slices: int, ranks: int, place: Ints, counts: Ints):
        self.unit, self.slices, self.ranks = unit, slices, ranks
        self.place, self.counts = place, counts

    def exchanges(self, kept: Bools, at: Ints, source: Ints, block: Ints):
        """Return each rank's exchange where ranks `at` receive blocks `block` of ranks `source`,
        and the slot of each of them (0 where it is not kept).

        The slots of a slice go by source, then by block: what comes is in place without a copy
        where the mask has one slice.
        """
        n, ranks = len(self.place), self.ranks
        code = ((at * self.slices + self.unit) * ranks + source) * n + block
        moved, inverse = np.unique(code[kept], return_inverse=True)
        rest, b = np.divmod(moved, n)
        rest, s = np.divmod(rest, ranks)
        a, u = np.divmod(rest, self.slices)
        line = a * self.slices + u
        count = np.bincount(line, minlength=ranks * self.slices)
        slot = np.arange(len(moved)) - (np.cumsum(count) - count)[line]
        most = count.reshape(ranks, self.slices).max(1)
        made = []
        for rank in range(ranks):
            send, slots = [], []
            for peer in range(ranks):
                gone, come = (a == peer) & (s == rank), (a == rank) & (s == peer)
                send.append(u[gone] * self.counts[rank] + self.place[b[gone]])
                slots.append(u[come] * most[rank] + slot[come])
            made.append(Exchange(tuple(send), tuple(slots), int(most[rank])))
        where = np.zeros(len(kept), np.int64)
        where[kept] = slot[inverse.ravel()]
        return made, where
