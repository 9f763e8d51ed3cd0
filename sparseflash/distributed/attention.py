"""Attention of own queries over keys on all ranks, with its gradients: one operator pair.

Forward: keys and travelling queries are sent || own keys; the visitors' part; their results are
sent home || the keys that came; the parts are merged by their LSE. Backward: every part takes the
LSE and delta of all keys, so that its gradients are the exact shares, and shares add up.

The collectives of a call are the same on every rank, in the same order. That is why they all are
in one operator: an exchange with an autograd node of its own would be left out where a rank has
nothing to differentiate, and the other ranks would wait for it.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from masks import BlockMask
from sparseflash.backends.protocol import empty_out
from sparseflash.distributed.exchange import in_kernels
from sparseflash.kernels.common.device import kernels_of
from sparseflash.operators.attention import refuse_second_derivative

PLANS: WeakValueDictionary[str, Any] = WeakValueDictionary()

TERMS = "Tensor? sink, Tensor? bias, Tensor? slopes"
OPTIONS = "str plan, float? scale, float softcap, bool deterministic, str backend"
torch.library.define(
    "sparseflash::context_forward",
    f"(Tensor q, Tensor k, Tensor v, {TERMS}, {OPTIONS})"
    " -> (Tensor out, Tensor lse, Tensor fetched, Tensor guests)",
)
torch.library.define(
    "sparseflash::context_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" Tensor fetched, Tensor guests, {TERMS}, {OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)",
)


def _options(
    bias: Any, slopes: Any, scale: Any, softcap: float, deterministic: bool, backend: str
) -> tuple[Any, ...]:
    """Return what follows the mask in a call of our operators; without seed and sink."""
    tensors = None, None, None, None, bias, slopes, None
    biased = bias is not None or slopes is not None
    return (*tensors, scale, 0.0, deterministic, backend, softcap, biased, "", False)


def _part(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: Any
) -> tuple[Tensor, Tensor]:
    """Return (out, LSE) of one part; 0 and -inf where it has no block."""
    if mask is None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return empty_out(q, v).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    return torch.ops.sparseflash.forward(q, k, v, mask.key, *options, True)[:2]


def _part_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: BlockMask | None, options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of q, k, v and the bias in one part, from the results of all keys."""
    bias = options[4]
    if mask is None:
        zeros = None if bias is None else torch.zeros_like(bias)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), zeros
    call = dout, dlse, q, k, v, out, lse, mask.key
    found = torch.ops.sparseflash.backward(*call, *options)
    return *found[:3], None if bias is None else found[4]


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Any) -> None:
    """Merge the results of further keys into (out, LSE), in place; rows: whose they are."""
    index = None if rows is None else rows.index
    if in_kernels(out):
        return kernels_of("distributed").merge(out, lse, other, other_lse, index)
    at = (slice(None), slice(None), slice(None) if index is None else index)
    both = [out[at], lse[at]]
    _merge_parts(both, other, other_lse)
    out[at], lse[at] = both[0].to(out.dtype), both[1]


def _merge_parts(both: list[Tensor], other: Tensor, other_lse: Tensor) -> None:
    """Replace [out, LSE], of the dtype of the LSE, by those over the keys of both."""
    out, lse = both
    total = torch.logaddexp(lse, other_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)  # where neither has a key
    first, second = ((x - base).exp().unsqueeze(-1) for x in (lse, other_lse))
    # 0 * x: a part without keys has output 0, never NaN
    both[:] = out.to(lse.dtype) * first + other.to(lse.dtype) * second, total


@torch.library.impl("sparseflash::context_forward", ("CPU", "CUDA"))
def _forward(q, k, v, sink, bias, slopes, plan, scale, softcap, deterministic, backend):
    cp = PLANS[plan]
    cp.agree(q, v, scale, softcap, deterministic)
    part, units, group = cp.part, cp.units, cp.group
    options = _options(bias, slopes, scale, softcap, deterministic, backend)
    keys, queries = cp.transfers(q.device)
    fetched = guests = q.new_empty(0)
    if keys:
        coming = cp.count(keys.send(_rowwise(k), _rowwise(v), group=group))
    if queries:
        visiting = cp.count(queries.send(_rowwise(q), group=group))
    own_k, own_v = k, v
    if part.together:
        fetched = keys.place(coming.wait())
        own_k, own_v = joined(keys, k, v, fetched)
    out, lse = _part(q, own_k, own_v, part.local, options)
    if queries:
        guests = queries.place(visiting.wait())
        found = _part(units.tensor(guests), k, v, part.guests, options)
        results = _with_numbers(units, found[0], found[1])
        home = cp.count(queries.send_back(results, group))
    if keys and not part.together:
        fetched = keys.place(coming.wait())
        if part.remote is not None:
            (come_k, come_v), rows = _fetched(units, fetched, q.shape[3]), cp.far(q.device)
            other = _part(_rows(q, rows, part.beyond), come_k, come_v, part.remote, options)
            _merge(out, lse, _tokens(other[0], q, rows), _tokens(other[1], q, rows), rows)
    if queries:
        out, lse = _merge_results(out, lse, home.wait(), queries)
    if sink is not None:
        with_sink = torch.logaddexp(lse, sink[:, None].to(lse.dtype))
        out = out * (lse - with_sink).exp().unsqueeze(-1)
        lse = with_sink
    return _laid_out(empty_out(q, v), out), lse.contiguous(), fetched, guests


@torch.library.impl("sparseflash::context_backward", ("CPU", "CUDA"))
def _backward(
    dout, dlse, q, k, v, out, lse, fetched, guests, sink, bias, slopes, plan, scale, softcap,
    deterministic, backend,
):  # fmt: skip
    cp = PLANS[plan]
    part, units, group = cp.part, cp.units, cp.group
    options = _options(bias, slopes, scale, softcap, deterministic, backend)
    keys, queries = cp.transfers(q.device)
    dout = _rowwise(dout)
    dq = dk = dv = dbias = dq2 = dk2 = dv2 = dbias2 = far = rows = None
    if queries:
        visiting = cp.count(queries.send_packed(_of_guests(queries, out, lse, dout, dlse), group))
    if keys:
        if part.together:
            own = joined(keys, k, v, fetched)
            found = _part_backward(dout, dlse, q, own[0], own[1], out, lse, part.local, options)
            far = keys.behind.pack(*found[1:3])
            dq, dk, dv = found[0], *(t[:, :, : k.shape[2]] for t in found[1:3])
            dbias = found[3]
        else:
            rows, n = cp.far(q.device), part.beyond
            come_k, come_v = _fetched(units, fetched, q.shape[3])
            dq2, *far, dbias2 = _part_backward(
                _rows(dout, rows, n), _rows(dlse, rows, n), _rows(q, rows, n), come_k, come_v,
                _rows(out, rows, n), _rows(lse, rows, n), part.remote, options,
            )  # fmt: skip
            dq2 = _tokens(dq2, q, rows)
            far = torch.cat([units.of(t).flatten(0, 2) for t in far], -1)
        if cp.early:
            home = cp.count(keys.send_back(far, group))
    if queries:
        come = units.tensor(queries.place(visiting.wait()))
        gdout = come[..., : v.shape[3]].contiguous()
        glse, gdelta = _from_dtype(lse.dtype, come[..., v.shape[3] :])
        gq = units.tensor(guests)
        zero = torch.zeros_like(gdout)  # delta comes in as -dlse
        call = gdout, -gdelta, gq, k, v, zero, glse, part.guests, options
        gdq, dk2, dv2, _ = _part_backward(*call)
        returning = cp.count(queries.send_back(units.of(gdq).flatten(0, 2), group))
    if not part.together:
        dq, dk, dv, dbias = _part_backward(dout, dlse, q, k, v, out, lse, part.local, options)
        dbias = _sum(dbias, dbias2)
        if rows is not None:
            rows.add(dq, dq2)
        else:
            dq = _sum(dq, dq2)
    if keys and not cp.early:
        home = cp.count(keys.send_back(far, group))
    dk, dv = _sum(dk, dk2), _sum(dv, dv2)
    if keys:
        keys.add((dk, dv), home.wait())
    if queries:
        queries.add((dq,), returning.wait())
    dsink = lse.new_empty(0)
    if sink is not None:
        delta = _delta(dout, out, lse, dlse)
        probability = (sink[:, None].to(lse.dtype) - lse).exp()
        dsink = -(probability * delta).sum((0, 2)).to(sink.dtype)
    pairs: Any = ((q, dq), (k, dk), (v, dv))
    dbias = lse.new_empty(0) if dbias is None else dbias
    return *(_laid_out(torch.empty_like(x), dx) for x, dx in pairs), dsink, dbias


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


def _of_guests(queries: Any, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Return packed units of dout, with LSE and delta, of the queries that travel."""
    pack = queries.outgoing.pack
    packed = pack(dout)
    delta = (packed.to(lse.dtype) * pack(out).to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta -= pack(dlse.unsqueeze(-1).to(lse.dtype)).squeeze(-1)
    numbers = torch.stack([pack(lse.unsqueeze(-1)).squeeze(-1), delta], -1)
    return torch.cat([packed, numbers.view(packed.dtype)], -1)


def _from_dtype(dtype: torch.dtype, x: Tensor) -> list[Tensor]:
    """Return numbers that were viewed as another dtype, as kernels read them."""
    return [t.contiguous() for t in x.contiguous().view(dtype).unbind(-1)]


def _with_numbers(units: Any, out: Tensor, lse: Tensor) -> Tensor:
    """Return units of out with the LSE behind it."""
    both = out, lse.unsqueeze(-1).view(out.dtype)  # the same bits
    return torch.cat([units.of(t).flatten(0, 2) for t in both], -1)


def _sum(x: Any, other: Tensor | None) -> Any:
    return x if other is None else x + other


def _rows(x: Tensor | None, rows: Any, beyond: int) -> Any:
    """Return the given tokens of x; all of them where rows is None, and 0 for so many beyond."""
    if x is None or rows is not None:
        return x if x is None else rows.take(x)
    return pad(x, (0, 0) * (x.ndim - 3) + (0, beyond)) if beyond else x


def _tokens(x: Tensor, q: Tensor, rows: Any) -> Tensor:
    """Return x without the tokens beyond those of q."""
    return x[:, :, : q.shape[2]] if rows is None else x


def _rowwise(x: Tensor) -> Tensor:
    """Return x with its rows contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


def _merge_results(out: Tensor, lse: Tensor, come: Tensor, queries: Any) -> tuple[Tensor, Tensor]:
    """Merge the results that the ranks sent home, rank by rank, always in the same order."""
    dim, wide, lse = out.shape[3], lse.dtype, lse.unsqueeze(-1)

    def merge(both: list[Tensor], part: Tensor) -> list[Tensor]:
        found = [both[0], both[1].squeeze(-1)]
        _merge_parts(found, part[..., :dim], _from_dtype(wide, part[..., dim:])[0])
        return [found[0], found[1].unsqueeze(-1)]

    queries.update((out, lse), come, merge)
    return out, lse.squeeze(-1)


@torch.library.register_fake("sparseflash::context_forward")
def _forward_fake(q, k, v, sink, bias, slopes, plan, *options):
    cp = PLANS[plan]
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
def _backward_fake(dout, dlse, q, k, v, out, lse, fetched, guests, sink, bias, *options):
    terms = (lse.new_empty(0) if t is None else torch.empty_like(t) for t in (sink, bias))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *terms


def _save(ctx, inputs, output):
    q, k, v, sink, bias, slopes, *ctx.options = inputs
    out, lse, fetched, guests = output
    ctx.mark_non_differentiable(fetched, guests)
    ctx.save_for_backward(q, k, v, out, lse, fetched, guests, sink, bias, slopes)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, *_):
    saved = ctx.saved_tensors
    out, (sink, bias) = saved[3], saved[7:9]
    dout = torch.zeros_like(out) if dout is None else dout
    *gradients, dsink, dbias = torch.ops.sparseflash.context_backward(
        dout, dlse, *saved, *ctx.options
    )
    gradients += [None if sink is None else dsink, None if bias is None else dbias, None]
    return *gradients, *(None for _ in ctx.options)


torch.library.register_autograd("sparseflash::context_forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::context_backward", refuse_second_derivative)
