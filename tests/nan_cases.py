"""Cases of NaN in what a call reads, and around it."""

import random
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparseflash
from sparseflash import select
from sparseflash.dropout import keep_mask, keep_scale
from tests.attention_cases import HEAD_DIMS, Case, build, draw, random_case, random_mask
from tests.decode_cases import Step, random_step
from tests.poison import surrounded

NAN, INF = float("nan"), float("inf")


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sink: Tensor | None


def random_nan_case(
    seed: int,
    lengths: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    head_dims: tuple[int, ...] = (16, 40, 64),
) -> Case:
    """Two batch entries, so that one stays clean; perhaps with a sink and a softcap."""
    rng = random.Random(seed)
    case = random_case(seed, lengths, head_dims, dtypes)
    case = replace(case, batch=2, lse_gradient=True, max_scores=rng.random() < 0.5)
    sink, softcap = rng.choice([(False, 0.0), (True, 0.0), (True, 1.5), (False, 1.5)])
    return replace(case, mask=random_mask(rng, case), sink=sink, softcap=softcap)


def poisoned(case: Case, device: str, value: float = NAN) -> Inputs:
    """Inputs with `value` in a few tokens of batch entry 0, or in the sink of the last head."""
    rng = random.Random(case.seed)
    (q, k, v), dout, dlse = draw(case, device)
    sink = torch.linspace(-1, 2, case.heads, device=device) if case.sink else None
    assert dlse is not None
    given = Inputs(q, k, v, dout, dlse, sink)
    names = rng.choice([["q"], ["k"], ["v"], ["k", "v"], ["q", "k", "v"], ["dout"], ["dlse"]])
    for name in names:
        t = getattr(given, name)
        head, token = rng.randrange(t.shape[1]), rng.randrange(t.shape[2])
        t[(0, head, token, *[rng.randrange(n) for n in t.shape[3:]])] = value
    if sink is not None and rng.random() < 0.5:
        sink[-1] = NAN
    return given


def exact(
    given: Inputs, seen: Tensor, scale: float, cap: float, keep: Tensor | None, dropout_p: float
) -> dict[str, Tensor]:
    """All results; a pair that is not `seen` (B, H, N_q, N_k) counts for nothing.

    The gradients are those of (out * dout).sum() + (lse * dlse).sum().
    """
    q, k, v, dout, dlse = (t.double().cpu() for t in given[:5])
    group, seen = q.shape[1] // k.shape[1], seen.cpu()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def times(weights: Tensor, seen: Tensor, x: Tensor) -> Tensor:
        bad = x.isnan()
        reached = seen.double() @ bad.double() > 0
        return (weights @ x.masked_fill(bad, 0.0)).masked_fill(reached, NAN)

    s, slope = q @ k.mT * scale, 1.0
    if cap:
        s = cap * (s / cap).tanh()
        slope = 1 - (s / cap).square()
    s = s.masked_fill(~seen, -INF)
    columns, sink = s, None
    if given.sink is not None:
        sink = given.sink.double().cpu()[:, None]
        columns = torch.cat([s, sink[..., None].expand(*s.shape[:3], 1)], -1)
    lse = columns.logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(~seen, 0.0)
    kept = seen if keep is None else seen & keep.cpu()
    factor = kept * keep_scale(dropout_p)
    dropped = p.masked_fill(~kept, 0.0) * factor
    # no key brings a NaN sink
    out = times(dropped, kept, v).masked_fill(lse.isnan()[..., None], NAN)
    dlse = dlse.masked_fill(lse == -INF, 0.0)
    delta = (out * dout).sum(-1) - dlse
    dp = (dout @ v.mT).masked_fill(~kept, 0.0) * factor
    ds = (p * (dp - delta[..., None]) * slope * scale).masked_fill(~seen, 0.0)
    dq, dk, dv = times(ds, seen, k), times(ds.mT, seen.mT, q), times(dropped.mT, kept.mT, dout)
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    found = {"out": out, "lse": lse, "max_scores": s.amax(-1), "dq": dq, "dk": dk, "dv": dv}
    if sink is not None:
        found["dsink"] = -((sink - lse).exp() * delta).sum((0, 2))
    return found


def check(
    case: Case, backend: str, device: str = "cpu", value: float = NAN,
    lengths: list[int] | None = None, contained: bool = False,
) -> None:  # fmt: skip
    """Assert that NaN shows wherever a query may see it, and where it may not show.

    The scores of hidden keys never reach a row. Products of kernels go over whole tiles, where
    zero times NaN is NaN; so their gradients, and outputs where values are NaN, are compared
    in full only where a head has no NaN at all. contained: in full everywhere, but for dropout.
    value: what stands for NaN, but need not make one.
    """
    given = poisoned(case, device, value)
    blocks, seen = build(case, device)
    shape = case.batch, case.heads, case.n_q, case.n_k
    seen = torch.ones(shape, dtype=torch.bool) if seen is None else seen.clone().cpu()
    if lengths is not None:
        real = torch.arange(case.n_k) < torch.tensor(lengths)[:, None]
        seen &= real[:, None, None]
        if case.n_q == case.n_k:
            seen &= real[:, None, :, None]
    cap, scale = case.softcap, case.scale or case.head_dim**-0.5
    seed, keep = torch.tensor([case.seed], device=device), None
    if case.dropout_p:
        keep = keep_mask(seed, *shape, case.dropout_p)
    marked = Inputs(*(None if t is None else t.masked_fill(t == value, NAN) for t in given))  # pyright: ignore
    wanted = exact(marked, seen, scale, cap, keep, case.dropout_p)

    leaves = [t.detach().requires_grad_() for t in given[:3]]
    sink = None if given.sink is None else given.sink.requires_grad_()
    leaves += [] if sink is None else [sink]
    options: dict[str, Any] = {
        "scale": case.scale, "dropout_p": case.dropout_p, "seed": seed, "sink": sink,
        "score": case.score, "lengths": lengths, "return_lse": True,
        "return_max_scores": case.max_scores, "backend": backend,
    }  # fmt: skip
    q, k, v = leaves[:3]
    out, lse, *maxima = sparseflash.attention(q, k, v, blocks, **options)
    cotangents = given.dout, given.dlse.masked_fill(lse == -INF, 0.0).to(lse.dtype)
    dq, dk, dv, *dsink = torch.autograd.grad((out, lse), leaves, cotangents)
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    found |= dict(zip(["max_scores"], maxima, strict=False)) | dict(
        zip(["dsink"], dsink, strict=False)
    )
    clean_heads = wanted["lse"].isnan().flatten(2).any(2).logical_not()  # (B, H)
    for t in marked[:5]:
        bad = t.cpu().isnan().flatten(2).any(2)
        clean_heads &= ~bad.repeat_interleave(case.heads // t.shape[1], 1)
    clean_keys = clean_heads.unflatten(1, (case.kv_heads, -1)).all(-1)
    exact_names = {"lse", "max_scores"} | ({"out"} if not marked.v.isnan().any() else set())
    for name, got in found.items():
        want, got = wanted[name], got.detach().double().cpu()
        if value != value:
            lost = want.isnan() & ~got.isnan()
            assert not lost.any(), f"{name}: NaN is lost at {lost.nonzero()[:4].tolist()}"
        where = ~want.isnan()
        if name == "dsink":
            where &= clean_heads.all(0)
        elif name not in exact_names and (case.dropout_p or not contained):
            clean = clean_heads if name in ("out", "dq") else clean_keys
            where &= clean.view(*clean.shape, *[1] * (want.ndim - 2))
        agree(name, got, want, where, case.dtype)


def agree(name: str, got: Tensor, want: Tensor, where: Tensor, dtype: torch.dtype) -> None:
    """Assert that they are the same `where`, as far as the dtype goes; -inf is a number."""
    got, want = got[where], want[where]
    assert torch.equal(got == -INF, want == -INF), f"{name}: other rows are empty"
    got, want = (t.masked_fill(t == -INF, 0.0) for t in (got, want))
    assert got.isfinite().all(), f"{name}: {int((~got.isfinite()).sum())} numbers are not finite"
    limit = 6 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    error, size = (got - want).norm(), want.norm() + want.numel() ** 0.5
    assert error <= limit * size, f"{name}: error {error:.3g} of {size:.3g}"


class NanStep(Step):
    """A step of decoding with NaN in a token of the sequence 0 that some query may see."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        rng, tensors = random.Random(self.seed), super().tensors()
        for t in rng.choice([*((t,) for t in tensors), tensors[1:]]):
            token = rng.randrange(max(1, self.lengths[0])) if t.shape[2] == self.n else 0
            t[0, rng.randrange(t.shape[1]), token, rng.randrange(t.shape[3])] = NAN
        return tensors


def check_decode(seed: int, backend: str, device: str = "cpu", **options: Any) -> None:
    """Likewise, of a random step of decoding."""
    step = NanStep(**vars(random_step(seed, device=device, **options)))
    tensors = step.tensors()
    dlse = torch.zeros(tensors[0].shape[:3])
    inputs = Inputs(*tensors, dlse[..., None].expand(-1, -1, -1, tensors[2].shape[3]), dlse, None)
    seen = step.allowed().expand(-1, step.heads, -1, -1)
    wanted = exact(inputs, seen, step.scale or step.head_dim**-0.5, 0.0, None, 0.0)
    for name, got in zip(("out", "lse"), step.run(backend=backend), strict=True):
        want, got = wanted[name], got.double().cpu()
        assert not (want.isnan() & ~got.isnan()).any(), f"{name}: NaN is lost"
        where = ~want.isnan()
        if name == "out" and backend == "triton" and tensors[2][:1].isnan().any():
            where[0] = False  # see `check`
        agree(name, got, want, where, step.dtype)


EXTENTS = 1, 17, 32, 48, 64, 96, 100


def attention(
    seed: int, backend: str, device: str, dtypes: tuple[torch.dtype, ...],
    extents: tuple[int, ...] = EXTENTS, **options: Any,
) -> None:  # fmt: skip
    """Output, LSE and gradients of a random mask."""
    dims = HEAD_DIMS if backend == "triton" else tuple(d for d in HEAD_DIMS if d % 8 == 0)
    case = replace(random_case(seed, extents, dims, dtypes), dropout_p=0.0)
    qkv, dout, _ = draw(case, device)
    blocks, _ = build(case, device)
    _check(qkv, dout, blocks, backend, **options)


def picks(seed: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Likewise, of picks of blocks that the end of the keys may cut."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    block, dtype = rng.choice([16, 48, 64, 128, 256]), rng.choice(dtypes)
    n_q, n_k = rng.choice([5, 20]), rng.choice([48, 64, 128, 256, 300, 320])
    dim = rng.choice([16, 24])  # descriptors copy those of 16
    shapes = (1, 4, n_q, dim), (1, 2, n_k, dim), (1, 2, n_k, dim), (1, 4, n_q, dim)
    q, k, v, dout = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    count = -(-n_k // block)
    lists = torch.rand(1, 2, n_q, count, generator=generator).argsort(-1)[..., : rng.choice([1, 3])]
    chosen = select.Picks.of(lists.to(device), block, n_k, causal=rng.random() < 0.5)
    _check((q, k, v), dout, chosen, "triton")


def _check(
    qkv: tuple[Tensor, ...], dout: Tensor, mask: Any, backend: str, deterministic: bool = True
) -> None:
    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        options = {"return_lse": True, "backend": backend, "deterministic": deterministic}
        out, lse = sparseflash.attention(q, k, v, mask, **options)
        return out, lse, *torch.autograd.grad(out, (q, k, v), tensors[3])

    agree_nearly(run(*map(surrounded, (*qkv, dout))), run(*qkv, dout))


def decode(seed: int, device: str, dtype: torch.dtype) -> None:
    """Output and LSE of a random step; the cache has no tokens, heads or pages beside its own."""
    step = random_step(seed, device=device, dtype=dtype)
    (q, k, v), options = step.arguments()
    given = {"return_lse": True, "backend": "triton"} | options
    inside = (q, surrounded(k), surrounded(v))
    agree_nearly(*(sparseflash.decode(*t, step.mask, **given) for t in (inside, (q, k, v))))


def agree_nearly(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Assert equality, as far as another way to copy tiles leaves it."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
