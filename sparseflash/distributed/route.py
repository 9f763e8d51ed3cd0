"""What each rank sends, receives and computes, for one mask and one distribution of the tokens."""

from dataclasses import dataclass

import numpy as np

from masks import BlockMask
from masks.analysis.partition import route, units
from masks.runs import Bools, Ints
from masks.segments import Segments


@dataclass(frozen=True)
class Exchange:
    """Blocks of tokens that a rank sends, and those that it receives, for each peer.

    A unit is a block of tokens in one slice, (slice, place of the block in its tensor). The mask's
    batch entries and the key heads that it tells apart are the slices.
    """

    send: tuple[Ints, ...]  # for each peer, slice * blocks of the sent tensor + place
    slots: tuple[Ints, ...]  # for each peer, slice * `blocks` + place in the received tensor
    blocks: int  # of the received tensor, in every slice
    number: Ints  # (slices, blocks) the block of tokens in each slot

    @property
    def sent(self) -> int:
        """Units."""
        return sum(map(len, self.send))

    @property
    def received(self) -> int:
        """Units."""
        return sum(map(len, self.slots))


@dataclass(frozen=True)
class Part:
    """All that one rank has to know."""

    own: Ints  # blocks of tokens, ascending
    tokens: int
    slices: tuple[int, int]  # batch entries and key heads that the mask tells apart
    keys: Exchange  # key blocks that come
    queries: Exchange  # query blocks that come, of rows whose keys are here
    far: Ints | None  # places of the own blocks that need keys that came; None: of all
    together: bool  # whether `local` has all keys: own ones, to a full block, and those that came
    local: BlockMask | None  # own queries, own keys; None: no block
    remote: BlockMask | None  # own queries of `far`, keys that came
    guests: BlockMask | None  # queries that came, own keys


def part_of(
    rank: int, mask: BlockMask, owner: Ints, ranks: int, heads: int, kv_heads: int,
    queries: bool = True, together: bool = False,
) -> tuple[Part, bool, bool]:  # fmt: skip
    """Return the part of a rank, and whether any key and whether any query travels at all.

    together: one call for all keys, where every block of the rank needs some that come.
    """
    blocks, n, size = Segments.of(mask).blocks(), mask.rows, mask.block_size[0]
    unit = units(mask, blocks.s, kv_heads)
    way = route(blocks, unit, owner, ranks, heads / kv_heads, queries)
    slices = mask.batch, kv_heads if mask.heads > 1 else 1
    place = places_of(owner)
    own = np.flatnonzero(owner == rank)
    width = np.minimum((np.arange(n) + 1) * size, mask.n_k) - np.arange(n) * size
    many = int(width[own].sum())
    keys, key_slot = exchange_of(rank, way.keys, owner, place)
    guests, guest_slot = exchange_of(rank, way.queries, owner, place)
    own_slot = np.broadcast_to(place, key_slot.shape)

    def part(kept: Bools, rows: Ints, cols: Ints, n_q: int, n_k: int, whole: bool):
        if not kept.any():
            return None
        inner, u = blocks.where(kept), unit[kept]
        cut = None if whole else width[inner.col]
        inner = inner.at(rows[u, inner.row], cols[u, inner.col])
        return BlockMask.of_segments(inner, n_q, n_k, cut)

    here, there = way.here == rank, way.there == rank
    remote = here & ~there & ~way.visits
    needs = np.zeros(n, bool)  # keys that come
    needs[blocks.row[remote]] = True
    far = np.flatnonzero(needs)
    line = np.broadcast_to(np.cumsum(needs) - 1, key_slot.shape)  # of a block among `far`
    most, fetched, visitors = int(width[far].sum()), keys.blocks * size, guests.blocks * size
    together = together and 0 < len(far) == len(own)
    if together:
        both = np.where(owner == rank, place, len(own) + key_slot)
        local = part(here & ~way.visits, own_slot, both, many, len(own) * size + fetched, False)
    else:
        local = part(here & there, own_slot, own_slot, many, many, True)
    made = Part(
        own,
        many,
        slices,
        keys,
        guests,
        None if len(far) == len(own) else place[far],
        together,
        local,
        None if together else part(remote, line, key_slot, most, fetched, False),
        part(there & way.visits, guest_slot, own_slot, visitors, many, True),
    )
    return made, bool(way.keys.any()), bool(way.queries.any())


def places_of(owner: Ints) -> Ints:
    """Return the place of each block of tokens in its rank."""
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(owner), np.int64)
    counts = np.bincount(owner)
    place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place


def exchange_of(rank: int, travels: Bools, owner: Ints, place: Ints) -> tuple[Exchange, Ints]:
    """Return the exchange of a rank where `travels` (slices, ranks, blocks) says who receives
    what, and the slot of each block that comes, (slices, blocks).

    The slots of a slice go by source, then by block: what comes is in place without a copy where
    the mask has one slice.
    """
    ranks = travels.shape[1]
    order = np.argsort(owner, kind="stable")
    come = travels[:, rank]
    slot = np.zeros(come.shape, np.int64)
    slot[:, order] = np.cumsum(come[:, order], axis=1) - 1
    most = int(come.sum(1).max())
    number = np.zeros((len(come), most), np.int64)
    u, block = np.nonzero(come)
    number[u, slot[u, block]] = block
    counts = np.bincount(owner, minlength=ranks)
    send, slots = [], []
    for peer in range(ranks):
        u, block = np.nonzero(travels[:, peer] & (owner == rank))
        send.append(u * counts[rank] + place[block])
        u, block = np.nonzero(come & (owner == peer))
        slots.append(u * most + slot[u, block])
    return Exchange(tuple(send), tuple(slots), most, number), slot
