"""Rules computed by torch, for any numbers of queries and keys that broadcast."""

import torch
from torch import Tensor

from masks.predicate.expression import BOOL, INT, REAL, Expression
from sparseflash.score.rule import OPERATIONS, Rule, operands


class Scored:
    """The logits of some scores, and what follows from their gradients.

    Args:
        rule: from `rule_of`.
        tables: those of the call.
        s: the scores scale q k^T.
        numbers: int64 tensors that broadcast to s, by name: b, h, q and k.
        n_q, n_k: how many queries and keys the call has.
    """

    def __init__(
        self, rule: Rule, tables: tuple[Tensor, ...], s: Tensor, n_q: int, n_k: int,
        **numbers: Tensor,
    ):  # fmt: skip
        self.rule, self.tables = rule, tables
        counts = (torch.full((), n, device=s.device) for n in (n_q, n_k))
        self.given = {"s": s, **numbers, **dict(zip(("n_q", "n_k"), counts, strict=True))}
        self.real, self.device = s.dtype, s.device
        self._known: dict[Expression, Tensor] = {}

    def logits(self) -> Tensor:
        """Return the logits; s itself where that is all of them."""
        return self.value(self.rule.logits)

    def differentiate(self, g: Tensor, hidden: Tensor, into: list[Tensor | None]) -> Tensor:
        """Return the gradient of s from that of the logits, and add to those of the tables.

        hidden: True for pairs with the logit -inf, which have no gradients, whatever their
            derivatives are.
        """
        self.given["g"] = g
        for read in self.rule.reads:
            total = into[read.table]
            assert total is not None
            part = self.value(read.grad).masked_fill(hidden, 0.0)
            gather(total, self.place(read.node), part)
        return self.value(self.rule.ds).masked_fill(hidden, 0.0)

    def value(self, node: Expression) -> Tensor:
        """Return the values of an expression, each computed once."""
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = self._value(node)
        return found

    def place(self, load: Expression) -> Tensor:
        """Return the number of the entry that is read, in its table made flat."""
        at = torch.zeros((), dtype=torch.int64, device=self.device)
        for i, size in zip(load.args, self.tables[load.data].shape, strict=True):
            number = self.value(i)
            if number.is_floating_point():  # which may be infinite; NaN reads the first entry
                number = number.nan_to_num(0.0).clamp(0, size)
            at = at * size + number.to(torch.int64).clamp(0, size - 1)
        return at

    def _value(self, node: Expression) -> Tensor:
        if node.op in self.given:
            return self.given[node.op]
        if node.op in ("float", "truth"):
            dtype = self.real if node.kind == REAL else torch.bool
            return torch.full((), node.data, dtype=dtype, device=self.device)
        if node.op == "sum":
            total, factors = node.data
            for arg, factor in zip(node.args, factors, strict=True):
                part = self.value(arg)
                total = part * factor + total if factor != 1 else part + total
            if not isinstance(total, Tensor):
                total = torch.full((), total, device=self.device)
            return total
        if node.op == "load":
            found = self.tables[node.data].reshape(-1)[self.place(node)]
            return found.to({REAL: self.real, INT: torch.int64, BOOL: torch.bool}[node.kind])
        values = [self.value(arg) for arg in operands(node)]
        if node.kind == REAL or any(arg.kind == REAL for arg in node.args):
            values = [v if v.dtype == torch.bool else v.to(self.real) for v in values]
        return OPERATIONS[node.op].torch(*values)


def gather(total: Tensor, place: Tensor, part: Tensor, alone: bool = False) -> None:
    """Add the gradients of pairs to those of the entries, in an order that is always the same.

    alone: whether no two places are the same.
    """
    part = part.expand(torch.broadcast_shapes(part.shape, place.shape))
    part = part.sum_to_size(place.shape)  # pairs that share the entry for certain
    place, part, total = place.flatten(), part.flatten().to(total.dtype), total.view(-1)
    if total.is_cuda and not alone:  # where index_add_ has atomics
        total.index_put_((place,), part, accumulate=True)
    else:
        total.index_add_(0, place, part)


def empty_totals(rule: Rule, tables: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor | None]:
    """Return zeros for the gradients of the tables that want one, in at least `dtype`."""
    return [
        torch.zeros(t.shape, dtype=dtype, device=t.device) if kind.wanted else None
        for t, kind in zip(tables, rule.kinds, strict=True)
    ]


def as_tables(totals: list[Tensor | None], tables: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients in the dtypes of the tables."""
    return tuple(None if d is None else d.to(t.dtype) for d, t in zip(totals, tables, strict=True))
