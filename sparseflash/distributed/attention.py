"""Attention of own queries over keys on all ranks, with its gradients: one operator pair.

Forward: keys and travelling queries are sent || own keys; the visitors' part; their results are
sent home || the keys that came; the parts are merged by their LSE. Backward: every part takes the
LSE and delta of all keys, so that its gradients are the exact shares, and shares add up.

The collectives of a call are the same on every rank, in the same order. That is why they all are
in one operator: an exchange with an autograd node of its own would be left out where a rank has
nothing to differentiate, and the other ranks would wait for it.
"""

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from masks import BlockMask
from sparseflash.backends.protocol import empty_out
from sparseflash.distributed.exchange import in_kernels
from sparseflash.distributed.places import Places
from sparseflash.kernels.common.device import kernels_of
from sparseflash.operators.attention import refuse_second_derivative
from sparseflash.score.rule import rule_of

PLANS: WeakValueDictionary[str, Any] = WeakValueDictionary()

CALL = (
    "Tensor? seed, Tensor? sink, Tensor[]? tables, str plan, float? scale, float dropout_p,"
    " str score, bool deterministic, str backend"
)
torch.library.define(
    "sparseflash::context_forward",
    f"(Tensor q, Tensor k, Tensor v, {CALL})"
    " -> (Tensor out, Tensor lse, Tensor fetched, Tensor guests)",
)
torch.library.define(
    "sparseflash::context_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" Tensor fetched, Tensor guests, {CALL})"
    # those of a table that needs none are empty
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] dtables)",
)


class Call(NamedTuple):
    """The arguments of both operators behind the tensors of tokens."""

    seed: Tensor | None
    sink: Tensor | None
    tables: list[Tensor] | None  # of the score function
    plan: str
    scale: float | None
    dropout_p: float
    score: str
    deterministic: bool
    backend: str

    def options(self, places: Places, batch: int) -> tuple[Any, ...]:
        """Return what follows the mask in a call of our operators for a part; without the sink."""
        seed, score, tables = None, self.score, self.tables
        if self.dropout_p:
            assert self.seed is not None
            seed = places.keys(self.seed, batch)
        if score:
            score, tables = places.rule(score), [*(tables or ()), *places.tables]
        numbers = self.scale, self.dropout_p, self.deterministic, self.backend
        return None, None, seed, None, tables, *numbers, score, seed is not None, False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return (out, LSE) of one part; 0 and -inf where it has no block."""
        if mask is None:
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            return empty_out(q, v).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        options = self.options(places, len(q))
        return torch.ops.sparseflash.forward(q, k, v, mask.key, *options)[:2]

    def backward(
        self, queries: "Queries", k: Tensor, v: Tensor, mask: BlockMask | None, places: Places
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the gradients of q, k, v and tables in a part, from the results of all keys."""
        q, tables = queries.q, self.tables or ()
        if mask is None:
            dq, dk, dv, *dtables = (torch.zeros_like(t) for t in (q, k, v, *tables))
            return dq, dk, dv, self.wanted(dtables)
        call = queries.dout, queries.dlse, q, k, v, queries.out, queries.lse, mask.key
        found = torch.ops.sparseflash.backward(*call, *self.options(places, len(q)))
        return *found[:3], found[4][: len(tables)]

    def wanted(self, tables: list[Tensor]) -> list[Tensor]:
        """Return gradients of tables, empty ones where none is needed."""
        kinds = rule_of(self.score).kinds if self.score else ()
        return [t if kind.wanted else t.new_empty(0) for t, kind in zip(tables, kinds, strict=True)]


class Queries(NamedTuple):
    """What a backward knows of some queries."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def of(self, rows: Any) -> "Queries":
        """Return those of some tokens; None: of all."""
        if rows is None:
            return self
        taken: Any = (None if x is None else rows.take(x) for x in self)
        return Queries(*taken)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Any) -> None:
    """Merge the results of further keys into (out, LSE), in place; rows: whose they are."""
    index = None if rows is None else rows.index
    if in_kernels(out):
        return kernels_of("distributed").merge(out, lse, other, other_lse, index)
    at = (slice(None), slice(None), slice(None) if index is None else index)
    both = _merged(out[at], lse[at], other, other_lse)
    out[at], lse[at] = both[0].to(out.dtype), both[1]


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and LSE, of the dtype of the LSE, over the keys of both."""
    total = torch.logaddexp(lse, other_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)  # where neither has a key
    first, second = ((x - base).exp().unsqueeze(-1) for x in (lse, other_lse))
    # 0 * x: a part without keys has output 0, never NaN
    return out.to(lse.dtype) * first + other.to(lse.dtype) * second, total


@torch.library.impl("sparseflash::context_forward", ("CPU", "CUDA"))
def _forward(q, k, v, *arguments):
    call = Call(*arguments)
    cp = PLANS[call.plan]
    cp.agree(q, v, call.sink, call.score, call.seed, call._asdict())
    part, units = cp.part, cp.units
    places, keys, queries, rows = cp.on_device(q.device)
    fetched = guests = q.new_empty(0)
    if keys:
        coming = keys.send(keys.outgoing.pack(_rowwise(k), _rowwise(v)), cp)
    if queries:
        visiting = queries.send(queries.outgoing.pack(_rowwise(q)), cp)
    own_k, own_v = k, v
    if part.together:
        fetched = keys.place(coming.wait())
        own_k, own_v = joined(keys, k, v, fetched)
    out, lse = call.forward(q, own_k, own_v, part.local, places.local)
    if queries:
        guests = queries.place(visiting.wait())
        found = call.forward(units.tensor(guests), k, v, part.guests, places.guests)
        results = _with_numbers(units, found[0], found[1])
        home = queries.send_back(results, cp)
    if keys and not part.together:
        fetched = keys.place(coming.wait())
        if part.remote is not None:
            come = _fetched(units, fetched, q.shape[3])
            far = q if rows is None else rows.take(q)
            _merge(out, lse, *call.forward(far, *come, part.remote, places.remote), rows)
    if queries:
        out, lse = _merge_results(out, lse, home.wait(), queries)
    if call.sink is not None:  # one more key, whose value is 0
        out, lse = _merged(out, lse, out.new_zeros(()), call.sink[:, None].to(lse.dtype))
    return _laid_out(empty_out(q, v), out), lse.contiguous(), fetched, guests


@torch.library.impl("sparseflash::context_backward", ("CPU", "CUDA"))
def _backward(dout, dlse, q, k, v, out, lse, fetched, guests, *arguments):
    call = Call(*arguments)
    cp = PLANS[call.plan]
    part, units = cp.part, cp.units
    places, keys, queries, rows = cp.on_device(q.device)
    own = Queries(q, out, lse, _rowwise(dout), dlse)
    local = remote = visited = None
    if queries:
        visiting = queries.send(_of_guests(queries, own), cp)
    if keys:
        if part.together:
            own_k, own_v = joined(keys, k, v, fetched)
            local = call.backward(own, own_k, own_v, part.local, places.local)
            far = keys.behind.pack(*local[1:3])
            local = local[0], *(t[:, :, : k.shape[2]] for t in local[1:3]), local[3]
        else:
            come = _fetched(units, fetched, q.shape[3])
            remote = call.backward(own.of(rows), *come, part.remote, places.remote)
            far = torch.cat([units.of(t).flatten(0, 2) for t in remote[1:3]], -1)
        if cp.early:
            home = keys.send_back(far, cp)
    if queries:
        visitors = _visitors(units, queries.place(visiting.wait()), guests, lse.dtype)
        visited = call.backward(visitors, k, v, part.guests, places.guests)
        returning = queries.send_back(units.of(visited[0]).flatten(0, 2), cp)
    if local is None:
        local = call.backward(own, k, v, part.local, places.local)
    if keys and not cp.early:
        home = keys.send_back(far, cp)
    dq, dk, dv, dtables = local
    if remote is not None:
        if rows is None:
            dq = dq + remote[0]
        else:
            rows.add(dq, remote[0])
        dtables = _sums(dtables, remote[3])
    if visited is not None:
        dk, dv, *dtables = _sums([dk, dv, *dtables], [*visited[1:3], *visited[3]])
    if keys:
        keys.add((dk, dv), home.wait())
    if queries:
        queries.add((dq,), returning.wait())
    dsink = lse.new_empty(0)
    if call.sink is not None:
        low = lse.masked_fill(lse == -torch.inf, torch.inf)
        probability = (call.sink[:, None].to(lse.dtype) - low).exp()
        dsink = -(probability * _delta(own)).sum((0, 2)).to(call.sink.dtype)
    pairs = (q, dq), (k, dk), (v, dv)
    laid_out = (_laid_out(torch.empty_like(x), dx) for x, dx in pairs)
    return *laid_out, dsink, dtables


def _laid_out(result: Tensor, x: Tensor) -> Tensor:
    """Return x in the dtype and the layout of `result`, which a compiler has been told."""
    same = x.dtype == result.dtype and x.stride() == result.stride()
    return x if same else result.copy_(x)


def _fetched(units: Any, fetched: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values that came."""
    return units.tensor(fetched[..., :dim]), units.tensor(fetched[..., dim:])


def joined(keys: Any, k: Tensor, v: Tensor, fetched: Tensor) -> list[Tensor]:
    """Return own keys and values, to a full block, with those that came behind them."""
    size, joined = fetched.shape[1], []
    for x in (k, v):
        both = x.new_empty(*x.shape[:2], keys.behind.blocks * size, x.shape[3])
        both[:, :, : x.shape[2]] = x
        both[:, :, x.shape[2] : -(-x.shape[2] // size) * size] = 0.0
        joined.append(both)
    keys.behind.unpack(fetched, *joined)
    return joined


def _of_guests(queries: Any, own: Queries) -> Tensor:
    """Return packed units of dout, with LSE and delta, of the queries that travel."""
    pack, lse = queries.outgoing.pack, own.lse
    packed = pack(own.dout)
    delta = (packed.to(lse.dtype) * pack(own.out).to(lse.dtype)).sum(-1)
    if own.dlse is not None:
        delta -= pack(own.dlse.unsqueeze(-1).to(lse.dtype)).squeeze(-1)
    numbers = torch.stack([pack(lse.unsqueeze(-1)).squeeze(-1), delta], -1)
    return torch.cat([packed, numbers.view(packed.dtype)], -1)


def _visitors(units: Any, come: Tensor, guests: Tensor, dtype: torch.dtype) -> Queries:
    """Return the queries that came, from what `_of_guests` packed."""
    q, come = units.tensor(guests), units.tensor(come)
    dim = come.shape[3] - 2 * dtype.itemsize // come.dtype.itemsize
    dout = come[..., :dim].contiguous()
    lse, delta = _from_dtype(dtype, come[..., dim:])
    return Queries(q, torch.zeros_like(dout), lse, dout, -delta)  # delta comes in as -dlse


def _from_dtype(dtype: torch.dtype, x: Tensor) -> list[Tensor]:
    """Return numbers that were viewed as another dtype, as kernels read them."""
    return [t.contiguous() for t in x.contiguous().view(dtype).unbind(-1)]


def _with_numbers(units: Any, out: Tensor, lse: Tensor) -> Tensor:
    """Return units of out with the LSE behind it."""
    both = out, lse.unsqueeze(-1).view(out.dtype)  # the same bits
    return torch.cat([units.of(t).flatten(0, 2) for t in both], -1)


def _sums(own: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [x + y for x, y in zip(own, others, strict=True)]


def _rowwise(x: Tensor) -> Tensor:
    """Return x with its rows contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _delta(own: Queries) -> Tensor:
    delta = (own.dout.to(own.lse.dtype) * own.out.to(own.lse.dtype)).sum(-1)
    return delta if own.dlse is None else delta - own.dlse


def _merge_results(out: Tensor, lse: Tensor, come: Tensor, queries: Any) -> tuple[Tensor, Tensor]:
    """Merge the results that the ranks sent home, rank by rank, always in the same order."""
    dim, wide, lse = out.shape[3], lse.dtype, lse.unsqueeze(-1)

    def merge(both: list[Tensor], part: Tensor) -> list[Tensor]:
        come_lse = _from_dtype(wide, part[..., dim:])[0]
        merged, total = _merged(both[0], both[1].squeeze(-1), part[..., :dim], come_lse)
        return [merged, total.unsqueeze(-1)]

    queries.update((out, lse), come, merge)
    return out, lse.squeeze(-1)


@torch.library.register_fake("sparseflash::context_forward")
def _forward_fake(q, k, v, *arguments):
    cp = PLANS[Call(*arguments).plan]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    (batch, heads), size = cp.part.slices, cp.size
    rest = q.shape[0] // batch

    def units(exchange, travels, h, dim):
        shape = (batch * heads * exchange.blocks, size, rest, h // heads, dim)
        return q.new_empty(shape if travels else (0,))

    keys = units(cp.part.keys, cp.fetches, k.shape[1], k.shape[3] + v.shape[3])
    guests = units(cp.part.queries, cp.visits, q.shape[1], q.shape[3])
    return empty_out(q, v), q.new_empty(q.shape[:3], dtype=dtype), keys, guests


@torch.library.register_fake("sparseflash::context_backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, fetched, guests, *arguments):
    call = Call(*arguments)
    dsink = lse.new_empty(0) if call.sink is None else torch.empty_like(call.sink)
    dtables = call.wanted([torch.empty_like(t) for t in call.tables or ()])
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsink, dtables


def _save(ctx, inputs, output):
    q, k, v, *arguments = inputs
    call = Call(*arguments)
    out, lse, fetched, guests = output
    ctx.mark_non_differentiable(fetched, guests)
    tables = call.tables or ()
    ctx.save_for_backward(q, k, v, out, lse, fetched, guests, call.seed, call.sink, *tables)
    ctx.set_materialize_grads(False)
    ctx.options = call[3:]


def _differentiate(ctx, dout, dlse, *_):
    *tensors, seed, sink = (found := ctx.saved_tensors)[:9]
    call = Call(seed, sink, list(found[9:]) or None, *ctx.options)
    dout = torch.zeros_like(tensors[3]) if dout is None else dout
    *gradients, dsink, dtables = torch.ops.sparseflash.context_backward(dout, dlse, *tensors, *call)
    dtables = [d if d.numel() else None for d in dtables]
    others = None, None if sink is None else dsink, dtables or None
    return *gradients, *others, *(None for _ in ctx.options)


torch.library.register_autograd("sparseflash::context_forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::context_backward", refuse_second_derivative)
