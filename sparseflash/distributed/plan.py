"""A sequence that several ranks share: who owns which tokens, and attention over all of them."""

import hashlib
import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from masks import BlockMask, Mask, dense, documents
from masks.analysis.partition import Partition
from masks.runs import Ints
from sparseflash.cache import untraced
from sparseflash.checks import check_tensors, seed_tensor
from sparseflash.distributed import attention as operators
from sparseflash.distributed.exchange import Rows, Transfer, Units
from sparseflash.distributed.heads import Share, by_heads, share_of_heads
from sparseflash.distributed.places import RUN, PartPlaces, Places, places_of_part
from sparseflash.distributed.route import part_of
from sparseflash.distributed.selected import OwnRows, block_size_of, by_choice, differs_by_head
from sparseflash.dynamic.lengths import check_bounds, real_tokens
from sparseflash.operators.attention import plain
from sparseflash.request import as_mask_or_selector, term_tensors
from sparseflash.score.function import bound, check_fit
from sparseflash.select.base import Selector

RECENT = 256  # plans of other masks that are kept: of the layers, and of lengths
OPTIONS = "scale", "dropout_p", "deterministic", "backend"  # that ranks have to share
KEPT = ("_others", "_tokens_of", "_devices")  # caches of a plan
_numbers = itertools.count()


class OnDevice(NamedTuple):
    """What calls on one device need to know.

    keys, queries: None where nothing of the kind travels anywhere.
    far: the own tokens whose keys come from other ranks; None: all.
    """

    places: PartPlaces
    keys: Transfer | None
    queries: Transfer | None
    far: Rows | None


class ContextParallel:
    """The distribution of one sequence over the ranks of a group, for one mask.

    `sparseflash.attention(q, k, v, plan)` takes it as a mask, with the rank's own tokens in q, k
    and v: (B, H, tokens, D), in the order of `positions`. Make it with `context_parallel`.

    Attributes:
        n, size: tokens of the whole sequence, and of a block.
        mask: the `masks.BlockMask` of the whole sequence; of a selector, all that it may choose.
        source: the mask or the selector that was given.
        heads, kv_heads: of queries, and of keys and values.
        owner: (blocks of tokens,) the rank that owns each.
        rank, ranks, group: of torch.distributed.
        bound: whether the group is known yet, see `on`.
        changes: whether torch.compile leaves calls out of its graphs, which then serve other plans.
        route: "blocks" or "heads": what travels.
        tokens: of this rank.
        bytes_sent: by all calls of this rank so far, its own share included.
    """

    rows: OwnRows | None = None  # of a selector
    inner: Any = None  # the plan of the second dimension of a mesh

    def __init__(
        self, group: Any, source: Mask | BlockMask | Selector, mask: BlockMask, found: Partition,
        route: str, number: Ints | None = None, whole_heads: int = 0,
    ):  # fmt: skip
        """Make the plan; number, whole_heads: of its heads where it has some of those of a call."""
        if isinstance(source, Selector) and route == "blocks":
            route = "keys"
        if isinstance(source, Selector) and route == "heads" and differs_by_head(source):
            raise ValueError(
                f"route='heads' gives each rank some heads, and {source!r} has a mask that differs"
                " from head to head: take route='keys'"
            )
        if isinstance(group, tuple):
            self.group, self.bound, (self.rank, self.ranks) = None, False, group
        else:
            self.group, self.bound = group, True
            self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.source, self.mask, self.partition, self.route = source, mask, found, route
        self.n, self.size, self.owner = mask.n_q, mask.block_size[0], found.owner
        self.heads, self.kv_heads = found.sizes.heads, found.sizes.kv_heads
        self.bytes_sent, self._agreed, self.changes = 0, False, False
        # Gradients go home while the own ones are computed, but for short transfers: until its
        # peer comes, a transfer holds multiprocessors, and ranks reach it at different times.
        self.early = found.transfer > 0.02 * found.compute
        self._others: dict[Any, ContextParallel] = {}  # by the mask, for the same owners
        self._tokens_of: dict[Any, Tensor] = {}  # their places, by rank and device
        self._devices: dict[torch.device, OnDevice] = {}
        width = np.minimum((np.arange(mask.rows) + 1) * self.size, self.n)
        width -= np.arange(mask.rows) * self.size
        self._tokens = np.bincount(self.owner, width, self.ranks).astype(int).tolist()
        self.tokens = self._tokens[self.rank]
        self.share: Share | None = None
        self.number: Ints = np.arange(self.heads) if number is None else number
        self.whole_heads = whole_heads or self.heads
        if route == "heads":
            self.share = share_of_heads(mask, self.heads, self.kv_heads, self.ranks)
            self.number = self.share.heads[self.rank]
        elif isinstance(source, Selector):
            self.rows = OwnRows(self)
        else:
            call: Any = mask, self.owner, self.ranks, self.heads, self.kv_heads
            call = *call, route == "blocks", found.together
            self.part, *travels = part_of(self.rank, *call)
            self.fetches, self.visits = travels
            self.units = Units(self.part.slices, self.size)
        self._register()

    def on(self, mesh: Any = None) -> "ContextParallel":
        """Give a plan of (rank, ranks) the group that it is for; see `context_parallel`."""
        group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        place = dist.get_rank(group), dist.get_world_size(group)
        if place != (self.rank, self.ranks):
            raise ValueError(
                f"the plan is for (rank, ranks) {(self.rank, self.ranks)}, the group has {place}:"
                " make it with those"
            )
        self.group, self.bound, self.changes = group, True, True
        return self

    def _bound(self) -> None:
        if not self.bound:
            raise ValueError("the plan was made without a group: call plan.on(mesh) first")

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, which binds the plan to its own group."""
        unbound = {"group": None, "bound": False, "_agreed": False}
        return self.__dict__ | unbound | {name: {} for name in KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._register()

    def _register(self) -> None:
        self.key = f"{digest_of(self)}:{next(_numbers)}"
        operators.PLANS[self.key] = self

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the own tokens of x, which has all n of them along `dim`."""
        if x.shape[dim] != self.n:
            raise ValueError(f"x has {x.shape[dim]} tokens along dim {dim}, the plan {self.n}")
        return x.index_select(dim, self.positions(x.device))

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all n tokens in their order, on every rank; x has the own ones along `dim`.

        The gradient is the sum over the ranks, each of which may have a loss of its own. Every rank
        of the group has to call it.
        """
        if x.shape[dim] != self.tokens:
            raise ValueError(f"x has {x.shape[dim]} tokens along dim {dim}, the rank {self.tokens}")
        return _Whole.apply(x, self, dim)

    def _whole(self, x: Tensor, dim: int) -> Tensor:
        parts = self._gathered(x.movedim(dim, 0))
        found = parts[0].new_empty(self.n, *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            found[self._positions(rank, x.device)] = part
        return found.movedim(0, dim)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Return the tensors (tokens, ..) of all ranks of the group."""
        self._bound()
        whole = own.new_zeros(max(self._tokens), *own.shape[1:])
        whole[: self.tokens] = own
        come = [torch.empty_like(whole) for _ in range(self.ranks)]
        dist.all_gather(come, whole, group=self.group)
        return [t[:count] for t, count in zip(come, self._tokens, strict=True)]

    def _sum(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return (tokens,) int64, the place of each own token in the whole sequence, ascending."""
        return self._positions(self.rank, device)

    def _positions(self, rank: int, device: Any) -> Tensor:
        key = rank, str(device)
        if key not in self._tokens_of:
            token = np.arange(self.n)
            own = token[self.owner[token // self.size] == rank]
            self._tokens_of[key] = torch.from_numpy(own).to(device)
        return self._tokens_of[key]

    def order(self, device: torch.device) -> Tensor | None:
        """Return the places of all tokens, rank by rank; None where they ascend."""
        if (self.owner[1:] >= self.owner[:-1]).all():
            return None
        return torch.cat([self._positions(rank, device) for rank in range(self.ranks)])

    def with_mask(self, mask: Any) -> "ContextParallel":
        """Return the plan of another mask for the same owners, such as that of another layer.

        The last plans are kept by the key of the mask. Every rank of the group has to call it.
        """
        key = mask if isinstance(mask, Selector) else getattr(mask, "key", None)
        if key is not None and key in self._others:
            return self._others[key]
        source, blocks = blocks_of(mask, self.n, self.size, self.heads)
        if blocks.block_size != self.mask.block_size:
            raise ValueError(
                f"{source!r} has blocks of {blocks.block_size}, the plan of {self.mask.block_size}:"
                f" make it with block_size={blocks.block_size[0]}"
            )
        sizes = self.partition.sizes._asdict()
        found = blocks.partition(self.partition.ranks, owner=self.owner, **sizes)
        made = self._made(source, blocks, found)
        if self.bound:
            made.check_agreement()
        if key is not None:
            if len(self._others) == RECENT:
                self._others.pop(next(iter(self._others)))
            made._others = self._others
            self._others[key] = made
        return made

    def _made(self, source: Any, mask: BlockMask, found: Partition) -> "ContextParallel":
        heads = self.number, self.whole_heads
        group = self.group if self.bound else (self.rank, self.ranks)
        return ContextParallel(group, source, mask, found, self.route, *heads)

    def within(self, lengths: Tensor, starts: Tensor | None) -> "ContextParallel":
        """Return the plan for the tokens of each sequence from its start on, within its length."""
        first = lengths * 0 if starts is None else torch.minimum(starts, lengths)
        rows = list(zip(first.tolist(), lengths.tolist(), strict=True))
        if not isinstance(self.source, Mask):
            raise ValueError(
                "lengths and starts need the mask as an expression, and the plan has a BlockMask:"
                " make it of a masks.Mask, or with route='heads'"
            )
        # queries, then keys of: before, within, and after; only what is within has both
        q, k = ([(*(s, 0)[::i], e - s, *(self.n - e, 0)[::i]) for s, e in rows] for i in (1, -1))
        return self.with_mask(self.source & documents(q, k))

    def check_agreement(self) -> None:
        """Raise ValueError on every rank unless all have made the same plan."""
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        _compare(self, self.key.partition(":")[0], torch.device(device))

    def explain(self) -> str:
        """Return what each rank computes and sends, and how that compares with other ways."""
        how = {"blocks": "key blocks, or query blocks where these are fewer, travel"}
        how |= {"keys": "key blocks travel", "heads": "heads travel (Ulysses)"}
        lines = [f"{how[self.route]}; this is rank {self.rank}, with {self.tokens} tokens"]
        if isinstance(self.source, Selector):
            lines.append(f"  {self.source!r} chooses at each call; all that it may choose:")
        if self.share is not None:
            shares = ", ".join(str(len(x)) for x in self.share.kv_heads)
            lines.append(f"  key heads of a rank  {shares}")
        return "\n".join([*lines, str(self.partition)])

    def attend(self, *inputs: Any, **options: Any) -> Any:
        """Run `sparseflash.attention`, which is `attend`, for the own queries over all keys."""
        bounded = options["lengths"] is not None or options["starts"] is not None
        if self.changes or self.rows is not None or (bounded and self.share is None):
            return _outside(self, *inputs, **options)
        return self._attend(*inputs, **options)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attend: Any, sink: Any, score: Any, seed: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """options: the other ones of `attention`."""
        self.check(q, k, v)
        if score is not None:
            score = bound(score)
            check_fit(score, q.device, (len(q), self.whole_heads, self.n, self.n))
        if self.share is not None or plain(q, k, v):  # else the operator does
            self.agree(q, v, sink, "" if score is None else score.key(), seed, options)
        if options["dropout_p"]:
            seed = self.shared_seed(seed, q.device)
        if self.share is not None:
            return by_heads(self, attend, q, k, v, sink, score, seed, options)
        self.refuse("return_max_scores", options["return_max_scores"])
        lengths, starts = options.pop("lengths"), options.pop("starts")
        if self.rows is not None:
            self.refuse("lengths", lengths)
            self.refuse("starts", starts)
            return by_choice(self, attend, q, k, v, score, seed, options | {"sink": sink})
        plan, ends = self, None
        if lengths is not None or starts is not None:
            ends, starts = check_bounds(lengths, starts, q.shape[0], self.n, q.device)
            plan = plan.within(ends, starts)
        tables = [] if score is None else [t.contiguous() for t in score.tables]
        call = operators.Call(
            seed if options["dropout_p"] else None,
            term_tensors(sink, None, q, k, v).sink,
            tables or None,
            plan.key,
            options["scale"],
            options["dropout_p"],
            "" if score is None else score.key(),
            options["deterministic"],
            options["backend"],
        )
        out, lse, *_ = torch.ops.sparseflash.context_forward(q, k, v, *call)
        if ends is not None:  # the LSE of padding is -inf, beside a sink as well
            real = real_tokens(ends, self.n, starts)[:, self.positions(q.device)]
            lse = lse.masked_fill(~real[:, None], -torch.inf)
        return (out, lse) if options["return_lse"] else out

    def shared_seed(self, seed: int | Tensor | None, device: torch.device) -> Tensor:
        """Return the seed of all ranks: that of the first where none is given."""
        found = seed_tensor(seed, device)
        if seed is None:
            dist.broadcast(found, group_src=0, group=self.group)
        return found

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError for tensors that do not fit each other or the plan."""
        self._bound()
        check_tensors(q, k, v)
        wanted = (q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        have = (self.heads, self.kv_heads, self.tokens, self.tokens)
        if wanted != have:
            raise ValueError(
                f"q, k have {wanted[:2]} heads and {wanted[2:]} tokens; the plan has {have[:2]}"
                f" heads, and {self.tokens} tokens on rank {self.rank}: shard q, k and v with it"
            )
        if self.mask.batch not in (1, q.shape[0]):
            raise ValueError(f"q has batch {q.shape[0]}, the mask of the plan {self.mask.batch}")

    def refuse(self, name: str, value: Any) -> None:
        """Raise ValueError for an option that only a plan whose heads travel supports."""
        if value is not None and value is not False:
            raise ValueError(
                f"{name} is {value}, and blocks of tokens travel in this plan, which attention"
                " with it does not support: make the plan with route='heads'"
            )

    def on_device(self, device: torch.device) -> OnDevice:
        """Return what calls on a device need to know; the first one copies it there."""
        if device not in self._devices:
            part, blocks = self.part, len(self.part.own)
            where = part, self.size, self.n, self.number, self.whole_heads, device
            keys, queries = (
                Transfer.of(exchange, self.units, blocks, device) if travels else None
                for exchange, travels in ((part.keys, self.fetches), (part.queries, self.visits))
            )
            far = None if part.far is None else Rows(part.far, self.size, self.tokens, device)
            self._devices[device] = OnDevice(places_of_part(*where), keys, queries, far)
        return self._devices[device]

    def whole_places(self, device: torch.device) -> Places:
        """Return where the own heads of the whole sequence stand."""
        number, token = torch.from_numpy(self.number), torch.arange(0, self.n, RUN)[None, None]
        number, token, n = (x.to(device) for x in (number, token, torch.tensor(self.n)))
        return Places(number, self.whole_heads, token, token, n)

    def agree(
        self, q: Tensor, v: Tensor, sink: Tensor | None, score: str, seed: int | Tensor | None,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Compare the first call among the ranks: shapes, dtype and options.

        Raises ValueError on every rank where they differ, which would hang or give wrong numbers.
        """
        if not self._agreed:
            what = [q.shape[0], q.shape[3], v.shape[3], str(q.dtype), sink is not None, score]
            what += [str(options[name]) for name in OPTIONS]
            if options["dropout_p"]:
                what += [str(seed.tolist() if isinstance(seed, Tensor) else seed)]
            _compare(self, json.dumps([*what, self.key.partition(":")[0]]), q.device)
            self._agreed = True


_outside = untraced(ContextParallel._attend, "the plan changes, or its selector chooses")


class _Whole(torch.autograd.Function):
    """`unshard`, with its gradient."""

    @staticmethod
    def forward(ctx, x, cp, dim):  # type: ignore[override]
        ctx.call = cp, dim
        return cp._whole(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):  # type: ignore[override]
        cp, dim = ctx.call
        total = dx.clone(memory_format=torch.contiguous_format)
        cp._sum(total)
        return cp.shard(total, dim), None, None


def blocks_of(
    mask: Any, n: int, block_size: int, heads: int | None
) -> tuple[Mask | BlockMask | Selector, BlockMask]:
    """Return a mask as it was given and as blocks; for a selector all that it may choose."""
    source: Any
    mask = source = as_mask_or_selector(dense() if mask is None else mask)
    if isinstance(mask, Selector):
        block_size, mask = block_size_of(mask), mask.candidates()
        if isinstance(mask, BlockMask) and mask.block_size != (block_size, block_size):
            mask = None
        mask = dense() if mask is None else mask
    if isinstance(mask, Mask):
        if mask.per_head and heads is None:
            raise ValueError(f"{mask} differs from head to head: pass heads=")
        mask = mask.build(n, block_size=block_size, heads=heads if mask.per_head else None)
    if (mask.n_q, mask.n_k) != (n, n):
        raise ValueError(f"the mask is {mask.n_q} x {mask.n_k}, the sequence has {n} tokens")
    return source, mask


def digest_of(cp: ContextParallel) -> str:
    chosen = repr(cp.source) if isinstance(cp.source, Selector) else ""
    what = [cp.mask.key, chosen, cp.ranks, cp.route, *map(str, cp.partition.sizes)]
    digest = hashlib.sha256(json.dumps(what).encode())
    digest.update(cp.owner.astype("<i8").tobytes())
    return digest.hexdigest()


def _compare(cp: ContextParallel, what: str, device: torch.device) -> None:
    """Raise ValueError on every rank unless all have the same text."""
    digest = hashlib.sha256(what.encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    come = [torch.empty_like(own) for _ in range(cp.ranks)]
    dist.all_gather(come, own, group=cp.group)
    first = come[0].cpu()
    if others := [rank for rank, t in enumerate(come) if not torch.equal(t.cpu(), first)]:
        raise ValueError(
            f"ranks {others} have another mask, length, shape or option than rank 0; rank"
            f" {cp.rank} has {what}: every rank must make the same plan and the same calls"
        )
