"""Score functions, written so that tensors run through them as well as symbols, and an oracle."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparseflash
from sparseflash.dropout import keep_mask
from sparseflash.testing import logits, make_qkv, oracle

W = 4  # of a window of 2-D positions
INTEGERS = {"place": 7, "time": 2**40}  # tables of integers below these


class Case(NamedTuple):
    fn: Callable[..., Any]
    shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]]  # of B, H, N_q, N_k
    reach: tuple[str, ...] = ()  # of the reads


def _none(b, h, n_q, n_k):
    return {}


def _both(s, b, h, q, k, t, slopes, bias):
    near = bias[h, q // W - k // W + 160, q % W - k % W + W - 1]
    return 5 * torch.tanh(s * torch.exp(t[b]) / 5) + near - slopes[h] * torch.sqrt(abs(q - k) + 1.0)


def _gated(s, h, q, k, gate, floor):
    return torch.where(q >= k, torch.maximum(s * gate[q], floor[h] - s), torch.minimum(s, floor[h]))


CASES = {
    "softcap": Case(lambda s: 5 * torch.tanh(s / 5), _none),
    "clipped": Case(lambda s: s.clip(-1.0, 1.0), _none),
    "alibi": Case(
        lambda s, h, q, k, slopes: s - slopes[h] * abs(k - q), lambda b, h, n, m: {"slopes": (h,)},
        ("bh",),
    ),
    "relative": Case(
        lambda s, h, q, k, bias: s + bias[h, k - q + 700], lambda b, h, n, m: {"bias": (h, 1400)},
        ("d",),
    ),
    "buckets": Case(
        lambda s, h, q, k, place, bias: s + bias[place[(k - q) // 3 + 250], h],
        lambda b, h, n, m: {"place": (500,), "bias": (7, h)}, ("d",),
    ),
    "folded": Case(
        lambda s, h, q, k, bias: s + bias[h, (k - 8 * q) // 8 % 7],
        lambda b, h, n, m: {"bias": (h, 7)}, ("qk",),
    ),
    "large integers": Case(
        lambda s, q, k, time, t, bias: (
            s - t * torch.log(1 + abs(time[k] - time[q])) + bias[k - q + 700, k * 1_000_003_000 % 7]
        ),
        lambda b, h, n, m: {"time": (max(n, m),), "t": (), "bias": (1400, 7)}, ("bh", "qk"),
    ),
    "swin": Case(
        lambda s, h, q, k, bias: s + bias[h, q // W - k // W + 160, q % W - k % W + W - 1],
        lambda b, h, n, m: {"bias": (h, 321, 2 * W - 1)}, ("qk",),
    ),
    "pair": Case(
        lambda s, b, h, q, k, bias: s + bias[b, h, q, k],
        lambda b, h, n, m: {"bias": (b, h, n, m)}, ("qk",),
    ),
    "shared pair": Case(
        lambda s, q, k, bias: s + bias[q, k], lambda b, h, n, m: {"bias": (n, m)}, ("qk",)
    ),
    "temperature": Case(
        lambda s, b, h, t: s * torch.exp(t[b, h]), lambda b, h, n, m: {"t": (b, h)}, ("bh",)
    ),
    "number": Case(
        lambda s, t: s / torch.sqrt(1 + t * t) - torch.log(2 + t), lambda *sizes: {"t": ()},
        ("bh",),
    ),
    "key bias": Case(
        lambda s, b, k, bias: s + bias[b, k], lambda b, h, n, m: {"bias": (b, m)}, ("k",)
    ),
    "query gate": Case(
        lambda s, h, q, gate: s * torch.sigmoid(gate[h, q]), lambda b, h, n, m: {"gate": (h, n)},
        ("q",),
    ),
    "all": Case(
        _both, lambda b, h, n, m: {"t": (b,), "slopes": (h,), "bias": (h, 321, 7)},
        ("bh", "bh", "qk"),
    ),
    "distance from 0": Case(lambda s, t: abs(s + t), lambda b, h, n, m: {"t": ()}, ("bh",)),
    "branches": Case(
        _gated, lambda b, h, n, m: {"gate": (n,), "floor": (h,)}, ("q", "bh")
    ),
}  # fmt: skip


def tables_of(case: Case, sizes: tuple[int, int, int, int], dtype=torch.float64, seed: int = 0):
    """Random tables by name; those that index others are integers."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in case.shapes(*sizes).items():
        if name in INTEGERS:
            made[name] = torch.randint(INTEGERS[name], shape, generator=generator)
        else:
            t = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            made[name] = t.to(dtype).requires_grad_()
    return made


def on_tensors(
    fn: Callable[..., Tensor], places: list[str], tables: dict[str, Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return the function of all scores at once, in float64."""

    def logits_of(s: Tensor) -> Tensor:
        given = {name: t.double() if t.is_floating_point() else t for name, t in tables.items()}
        for dim, name in enumerate("bhqk"):
            if name in places:
                given[name] = torch.arange(s.shape[dim]).view(-1, *[1] * (3 - dim))
        torch.set_default_dtype(torch.float64)  # of integers beside reals
        try:
            return fn(s=s, **given)
        finally:
            torch.set_default_dtype(torch.float32)

    return logits_of


def results(
    case: Case, sizes: tuple[int, int, int, int], mask: Any = None, backends: Any = ("cpu",), *,
    dtype: torch.dtype = torch.float64, tables: torch.dtype | None = None, seed: int = 0,
    kv_heads: int | None = None, head_dim: int = 8, v_head_dim: int | None = None,
    sink: bool = False, device: str = "cpu", **options: Any,
) -> list[tuple[list[Tensor], list[Tensor]]]:  # fmt: skip
    """Return the results of a call and all its gradients by each backend, and those of the oracle.

    tables: their dtype, by default that of q.
    """
    b, h, n, m = sizes
    q, k, v = make_qkv(
        b, h, n, m, head_dim, kv_heads=kv_heads, v_head_dim=v_head_dim, dtype=dtype, device=device,
        requires_grad=True,
    )  # fmt: skip
    given, score = tables_of(case, sizes, tables or dtype, seed), sparseflash.score(case.fn)
    moved = {
        name: t.detach().to(device).requires_grad_(t.requires_grad) for name, t in given.items()
    }
    sinks = torch.randn(h, device=device).requires_grad_() if sink else None
    options = {"return_lse": True, "seed": seed} | options
    found = [
        sparseflash.attention(
            q, k, v, mask, score=score(**moved), backend=backend, sink=sinks, **options
        )
        for backend in backends
    ]
    copies = [None if t is None else t.detach().cpu().requires_grad_() for t in (q, k, v, sinks)]
    allowed, keep, p = None, None, options.get("dropout_p", 0.0)
    if mask is not None:
        allowed = torch.from_numpy(mask.build(n, m, 16, heads=h, batch=b).to_dense())
    if p:
        keep = keep_mask(torch.tensor([seed]), b, h, n, m, p)
    of_scores = on_tensors(case.fn, score.places, given)
    exact = list(oracle(*copies[:3], allowed, None, keep, p, copies[3], of_scores))
    if options.get("return_max_scores"):
        exact.append(logits(*copies[:2], allowed, None, of_scores).amax(-1))
    inputs, of_oracle = (
        [t for t in tensors if t is not None and t.requires_grad]
        for tensors in ((q, k, v, sinks, *moved.values()), (*copies, *given.values()))
    )
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype).double()
        for t in (x.detach().cpu() for x in found[0][:2])
    ]

    def with_gradients(outs: Any, xs: list[Tensor], loss: Any = 0.0) -> list[Tensor]:
        for w, x in zip(weights, outs, strict=False):
            loss = loss + (w.to(x.device) * x.double().masked_fill(x.isinf(), 0.0)).sum()
        return [*outs, *torch.autograd.grad(loss, xs, retain_graph=True)]

    made = []
    for outs in found:
        # A backward reads the output as it is stored: its rounding enters every row's delta, and
        # that of a sum over many pairs can exceed the sum. The oracle's delta has it too: the
        # gradient of the LSE is P.
        rounding = (weights[0] * (outs[0].detach().cpu().double() - exact[0].detach())).sum(-1)
        late = -(rounding * exact[1].masked_fill(exact[1].isinf(), 0.0)).sum()
        made.append((with_gradients(outs, inputs), with_gradients(exact, of_oracle, late)))
    return made


def check(case: Case, *call: Any, limit: float = 1e-12, **options: Any) -> None:
    """Compare `results`: the errors, in the norm of what is right or of 1, are below `limit`."""
    for backend, (found, wanted) in enumerate(results(case, *call, **options)):
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            x, y = x.detach().cpu().double(), y.detach().double()
            same = x == y  # infinite ones as well
            error = (x - y).masked_fill(same, 0.0).norm()  # NaN is no smaller than any limit
            most = limit * max(1.0, float(y.masked_fill(y.isinf(), 0.0).norm()))
            assert error <= most, f"result {i} of backend {backend}: {error:.3g} above {most:.3g}"
