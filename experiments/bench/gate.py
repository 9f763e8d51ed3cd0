"""The correctness gate: a provider is timed only after it agreed with float64.

Both directions are computed in float64 for a sample of query rows and all their keys, so the gate
fits at any length. In the backward, the incoming gradient is zero outside the sampled rows. These
rows alone then determine dq, and all of dk and dv.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.bench.cases import Case
from sparseflash.testing import relative_error

LIMIT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
ROWS = 64


class WrongResult(Exception):
    """A result beyond its limit: the text is the status of the row, and `error` a field."""

    def __init__(self, error: float, limit: float):
        super().__init__(f"wrong result: error {error:.3g}, limit {limit:.3g}")
        self.error = error


def checked(error: float, limit: float) -> float:
    """Return the error. Raise WrongResult if it is beyond the limit, or NaN."""
    if not error <= limit:
        raise WrongResult(error, limit)
    return error


@dataclass(frozen=True, eq=False)
class Gate:
    """The expected values of one case for inputs q, k, v, computed once for all providers.

    rule: a function (s, b, h, q, k, *tables) of the scaled scores and their numbers, before the
        mask. sink: whether the table is a logit of each head that joins the denominator.
    seen: a function (batch, head, rows) in place of `Case.allowed`, for what is no mask.
    lengths: of the sequences, where keys end; queries beyond one of them are not sampled.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    rule: Callable[..., Tensor] | None = field(default=None, kw_only=True)
    tables: tuple[Tensor, ...] = field(default=(), kw_only=True)
    sink: bool = field(default=False, kw_only=True)
    seen: Callable[[int, int, np.ndarray], np.ndarray] | None = field(default=None, kw_only=True)
    lengths: tuple[int, ...] = field(default=(), kw_only=True)

    @cached_property
    def rows(self) -> Tensor:
        """Sampled queries: the first, the last, and one out of each stretch between them."""
        n, group = self.case.n_q, self.case.heads // self.case.kv_heads
        count = min(n, max(8, min(ROWS, 2**24 // (self.case.n_k * group))))
        edges = np.linspace(0, n, count + 1).astype(int)
        rows = np.random.default_rng(0).integers(edges[:-1], np.maximum(edges[1:], edges[:-1] + 1))
        rows = np.unique([0, *rows, n - 1])
        return torch.from_numpy(rows[rows < min(self.lengths, default=n)]).to(self.q.device)

    @cached_property
    def samples(self) -> list[tuple[int, slice, int]]:
        """The first and the last slice: batch, the heads that share a kv head, the kv head."""
        group = self.case.heads // self.case.kv_heads
        slices = dict.fromkeys([(0, 0), (self.case.batch - 1, self.case.kv_heads - 1)])
        return [(b, slice(g * group, (g + 1) * group), g) for b, g in slices]

    @cached_property
    def dout(self) -> Tensor:
        """Gradient like out, zero outside the sample."""
        dout = self.q.new_zeros(*self.q.shape[:3], self.case.value_dim)
        generator = torch.Generator().manual_seed(1)
        for b, heads, _ in self.samples:
            shape = (heads.stop - heads.start, len(self.rows), self.case.value_dim)
            dout[b, heads, self.rows] = torch.randn(shape, generator=generator).to(dout)
        return dout

    @cached_property
    def expected(self) -> list[tuple[Tensor, ...]]:
        """Per sampled slice in float64: out, dq (group, rows, D), dk, dv (n_k, D), and the
        gradients of the tables, or of the sink.
        """
        return [self._slice(*sample) for sample in self.samples]

    def forward_error(self, out: Tensor) -> float:
        """Return the largest relative error of `out` (B, H, n_q, D) over the sampled slices."""
        return max(
            relative_error(out[b, heads, self.rows], expected[0])
            for (b, heads, _), expected in zip(self.samples, self.expected, strict=True)
        )

    def backward_error(self, dq: Tensor, dk: Tensor, dv: Tensor, *tables: Tensor) -> float:
        """Return the largest relative error of the gradients that belong to `self.dout`; a quarter
        of that of tables, which are sums of roundings that cancel.
        """
        errors = []
        for (b, heads, g), expected in zip(self.samples, self.expected, strict=True):
            all_dq = torch.zeros_like(dq[b, heads], dtype=torch.float64)
            all_dq[:, self.rows] = expected[1]
            pairs = ((dq[b, heads], all_dq), (dk[b, g], expected[2]), (dv[b, g], expected[3]))
            errors += [relative_error(actual, wanted) for actual, wanted in pairs]
        for i, found in enumerate(tables):
            first, *others = (expected[4 + i] for expected in self.expected)
            errors.append(relative_error(found, sum(others, first)) / 4)
        return max(errors)

    def passed(self, error: float) -> float:
        """Return the error, `checked` by the limit of the dtype."""
        return checked(error, LIMIT[self.q.dtype])

    @torch.enable_grad()
    def _slice(self, b: int, heads: slice, g: int) -> tuple[Tensor, ...]:
        # [1, group, rows, D] and [1, 1, n_k, D] in float64; what the queries see of the keys
        q = self.q.detach()[b, heads, self.rows].double()[None].requires_grad_()
        k, v = (t.detach()[b, g].double()[None, None].requires_grad_() for t in (self.k, self.v))
        seen, rows = self.seen or self.case.allowed, self.rows.cpu().numpy()
        of_heads = np.stack([seen(b, h, rows) for h in range(heads.start, heads.stop)])
        if self.lengths:
            of_heads &= np.arange(self.case.n_k) < self.lengths[b]
        allowed = torch.from_numpy(of_heads).to(q.device)[None]
        tables = [
            t.double() if t.is_floating_point() else t for t in map(Tensor.detach, self.tables)
        ]
        learned = [t.requires_grad_() for t in tables if t.is_floating_point()]
        s = q @ k.mT * q.shape[-1] ** -0.5  # [1, group, rows, n_k]
        if self.rule is not None:
            head = torch.arange(heads.start, heads.stop, device=s.device)[:, None, None]
            key = torch.arange(self.case.n_k, device=s.device)
            batch = torch.full((), b, device=s.device)
            s = self.rule(s, batch, head, self.rows[:, None], key, *tables)
        values = v
        if self.sink:  # one more key, whose value is 0
            s = torch.cat([s, tables[0][heads, None, None].expand(1, -1, len(self.rows), 1)], -1)
            values, allowed = F.pad(v, (0, 0, 0, 1)), F.pad(allowed, (0, 1), value=True)
        empty = ~allowed.any(-1, keepdim=True)  # an empty row has the output 0
        s = s.masked_fill(~allowed, -torch.inf).masked_fill(empty, 0.0)
        out = s.softmax(-1).masked_fill(empty, 0.0) @ values
        dout = self.dout[b, heads, self.rows].double()[None]
        dq, dk, dv, *of_tables = torch.autograd.grad(out, (q, k, v, *learned), dout)
        return (out[0].detach(), dq[0], dk[0, 0], dv[0, 0], *of_tables)
