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

from masks import BlockMask
from sparseflash.backends.protocol import empty_out
from sparseflash.ops.attention import refuse_second_derivative

PLANS: WeakValueDictionary[str, Any] = WeakValueDictionary()

OPTIONS = "str plan, float? scale, float softcap, bool deterministic, str backend"
torch.library.define(
    "sparseflash::context_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {OPTIONS})"
    " -> (Tensor out, Tensor lse, Tensor fetched, Tensor guests)",
)
torch.library.define(
    "sparseflash::context_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" Tensor fetched, Tensor guests, Tensor? sink, {OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
)


def _options(scale: Any, softcap: float, deterministic: bool, backend: str) -> tuple[Any, ...]:
    """Return what follows the mask in a call of our operators; without seed, sink and biases."""
    seed_and_terms = (None,) * 4
    return (None, None, *seed_and_terms, scale, 0.0, deterministic, backend, softcap, False, False)


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
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v in one part, from the results of all keys."""
    if mask is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    call = dout, dlse, q, k, v, out, lse, mask.key
    return torch.ops.sparseflash.backward(*call, *options)[:3]


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Tensor | None = None):
    """Merge the results of further keys into (out, LSE), in place; rows: which tokens they are."""
    if out.is_cuda and out.dtype != torch.float64:
        from sparseflash.kernels.tl.merge_rows import merge_rows

        return merge_rows(out, lse, other, other_lse, rows)
    at = (slice(None), slice(None), slice(None) if rows is None else rows)
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
def _forward(q, k, v, sink, plan, scale, softcap, deterministic, backend):
    cp = PLANS[plan]
    cp.agree(q, v, scale, softcap, deterministic)
    part, units, group = cp.part, cp.units, cp.group
    options = _options(scale, softcap, deterministic, backend)
    keys, queries = cp.transfers(q.device)
    fetched = guests = q.new_empty(0)
    if keys:
        coming = cp.count(keys.send([units.of(k), units.of(v)], group))
    if queries:
        visiting = cp.count(queries.send([units.of(q)], group))
    out, lse = _part(q, k, v, part.local, options)
    if queries:
        guests = queries.place(visiting.wait())
        found = _part(units.tensor(guests), k, v, part.guests, options)
        results = _with_numbers(units, found[0], found[1])
        home = cp.count(queries.send_back(results, group))
    if keys:
        fetched = keys.place(coming.wait())
        if part.remote is not None:
            far, rows = _fetched(units, fetched, q.shape[3]), cp.far(q.device)
            _merge(out, lse, *_part(_rows(q, rows), *far, part.remote, options), rows)
    if queries:
        out, lse = _merge_results(units, out, lse, home.by_peer(), queries)
    if sink is not None:
        with_sink = torch.logaddexp(lse, sink[:, None].to(lse.dtype))
        out = out * (lse - with_sink).exp().unsqueeze(-1)
        lse = with_sink
    return _laid_out(empty_out(q, v), out), lse.contiguous(), fetched, guests


@torch.library.impl("sparseflash::context_backward", ("CPU", "CUDA"))
def _backward(
    dout, dlse, q, k, v, out, lse, fetched, guests, sink, plan, scale, softcap, deterministic,
    backend,
):  # fmt: skip
    cp = PLANS[plan]
    part, units, group = cp.part, cp.units, cp.group
    options = _options(scale, softcap, deterministic, backend)
    keys, queries = cp.transfers(q.device)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    whole = dout, dlse
    if queries:
        delta = _delta(dout, out, lse, dlse)
        views = [units.of(t) for t in (dout, *_as_dtype(q.dtype, lse, delta))]
        visiting = cp.count(queries.send(views, group))
    if keys:
        far, rows = _fetched(units, fetched, q.shape[3]), cp.far(q.device)
        call = [_rows(t, rows) for t in (*whole, q, out, lse)]
        dq2, *far = _part_backward(*call[:3], *far, *call[3:], part.remote, options)
        far = torch.cat([units.of(t).flatten(0, 2) for t in far], -1)
        home = cp.count(keys.send_back(far, group))
    if queries:
        come = units.tensor(queries.place(visiting.wait()))
        gdout = come[..., : v.shape[3]].contiguous()
        glse, gdelta = _from_dtype(lse.dtype, come[..., v.shape[3] :])
        gq = units.tensor(guests)
        zero = torch.zeros_like(gdout)  # delta comes in as -dlse
        call = gdout, -gdelta, gq, k, v, zero, glse, part.guests, options
        gdq, dk2, dv2 = _part_backward(*call)
        returning = cp.count(queries.send_back(units.of(gdq).flatten(0, 2), group))
    dq, dk, dv = _part_backward(*whole, q, k, v, out, lse, part.local, options)
    if queries:
        dk, dv = dk + dk2, dv + dv2
    if keys:
        if rows is None:
            dq = dq + dq2
        else:
            dq[:, :, rows] += dq2
        dk, dv = _add(units, home.by_peer(), keys, dk, dv)
    if queries:
        (dq,) = _add(units, returning.by_peer(), queries, dq)
    dsink = lse.new_empty(0)
    if sink is not None:
        delta = _delta(dout, out, lse, dlse)
        probability = (sink[:, None].to(lse.dtype) - lse).exp()
        dsink = -(probability * delta).sum((0, 2)).to(sink.dtype)
    pairs = (q, dq), (k, dk), (v, dv)
    return *(_laid_out(torch.empty_like(x), dx) for x, dx in pairs), dsink


def _laid_out(result: Tensor, x: Tensor) -> Tensor:
    """Return x in the dtype and the layout of `result`, which a compiler has been told."""
    same = x.dtype == result.dtype and x.stride() == result.stride()
    return x if same else result.copy_(x)


def _fetched(units: Any, fetched: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values that came."""
    return units.tensor(fetched[..., :dim]), units.tensor(fetched[..., dim:])


def _as_dtype(dtype: torch.dtype, *numbers: Tensor) -> list[Tensor]:
    """Return float32 (B, H, N) as (B, H, N, 1 or 2) of a dtype: the same bits."""
    return [x.contiguous().unsqueeze(-1).view(dtype) for x in numbers]


def _from_dtype(dtype: torch.dtype, x: Tensor) -> list[Tensor]:
    """Return the numbers that `_as_dtype` laid out side by side."""
    return list(x.contiguous().view(dtype).unbind(-1))


def _with_numbers(units: Any, out: Tensor, lse: Tensor) -> Tensor:
    """Return units of out with the LSE behind it."""
    both = (out, *_as_dtype(out.dtype, lse))
    return torch.cat([units.of(t).flatten(0, 2) for t in both], -1)


def _rows(x: Tensor | None, rows: Tensor | None) -> Any:
    """Return the given tokens of x; all of them where rows is None."""
    return x if x is None or rows is None else x.index_select(2, rows)


def _delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


def _merge_results(units, out, lse, parts, queries):
    """Merge the results that the ranks sent home, rank by rank, always in the same order."""
    dim, tokens = out.shape[3], out.shape[2]

    def merge(both, come):
        found = [both[0], both[1].squeeze(-1)]
        _merge_parts(found, come[..., :dim], _from_dtype(lse.dtype, come[..., dim:])[0])
        both[:] = found[0], found[1].unsqueeze(-1)

    views = [units.of(out), units.of(lse.unsqueeze(-1))]
    queries.update(views, parts, merge)
    out, lse = (units.whole(x, tokens) for x in views)
    return out, lse.squeeze(-1)


def _add(units, parts, transfer, *tensors):
    """Add the gradients that came home, rank by rank, in float32."""
    widths = [t.shape[3] for t in tensors]

    def add(totals, come):
        for total, x in zip(totals, come.split(widths, -1), strict=True):
            total += x

    views = [units.of(t) for t in tensors]
    transfer.update(views, parts, add)
    return [units.whole(t, tensors[0].shape[2]) for t in views]


@torch.library.register_fake("sparseflash::context_forward")
def _forward_fake(q, k, v, sink, plan, scale, softcap, deterministic, backend):
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
def _backward_fake(dout, dlse, q, k, v, out, lse, fetched, guests, sink, *options):
    dsink = lse.new_empty(0) if sink is None else torch.empty_like(sink)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsink


def _save(ctx, inputs, output):
    q, k, v, sink, *ctx.options = inputs
    out, lse, fetched, guests = output
    ctx.mark_non_differentiable(fetched, guests)
    ctx.save_for_backward(q, k, v, out, lse, fetched, guests, sink)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, *_):
    *saved, sink = ctx.saved_tensors
    out = saved[3]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsink = torch.ops.sparseflash.context_backward(
        dout, dlse, *saved, sink, *ctx.options
    )
    return dq, dk, dv, None if sink is None else dsink, *(None for _ in ctx.options)


torch.library.register_autograd("sparseflash::context_forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::context_backward", refuse_second_derivative)
