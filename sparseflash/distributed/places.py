"""Where the tokens and the heads of a part stand in the whole call.

Dropout and score functions go by the numbers of heads, queries and keys. A part of a call has its
own numbers from 0, so it takes the keys of dropout as a table, and a score that looks its numbers
up in tables. No kernel knows of parts.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks.predicate.expression import (
    INT,
    Expression,
    add,
    atom,
    floor_divide,
    lift,
    remainder,
    walk,
)  # fmt: skip
from masks.runs import Ints
from sparseflash.distributed.route import Part
from sparseflash.dropout import key_table
from sparseflash.score.function import Bound, placed
from sparseflash.score.rule import Kind, node_of, rule_of, substituted, text_of

RUN = 16  # tokens that follow one another: those of the smallest block


class Places(NamedTuple):
    """Where a part stands: its heads, and the first token of each 16.

    Attributes:
        number: (H,) int64, its query heads.
        heads: query heads of the whole call.
        q, k: int32 (batch entries, heads, tokens / 16), one for those that do not differ.
        n: int32 (), tokens of the whole sequence.
    """

    number: Tensor
    heads: int
    q: Tensor
    k: Tensor
    n: Tensor

    def keys(self, seed: Tensor, batch: int) -> Tensor:
        """Return the `key_table` of the part, which drops what `seed` drops in the whole call."""
        number = torch.arange(batch, device=seed.device)[:, None] * self.heads + self.number
        rest = ((batch // len(x), len(self.number) // x.shape[1]) for x in (self.q, self.k))
        expanded = (
            x if x.shape[:2] == (1, 1) else x.repeat_interleave(b, 0).repeat_interleave(h, 1)
            for x, (b, h) in zip((self.q, self.k), rest, strict=True)
        )  # fmt: skip
        return key_table(seed, number, *expanded)

    def rule(self, text: str) -> str:
        """Return the rule of the part, which has `tables` behind those of the rule of `text`."""
        return _rule(text, len(self.number), self.q.shape[:2], self.k.shape[:2])

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.number, self.q, self.k, self.n

    def score(self, score: Bound, *, whole: bool = False) -> Bound:
        """Return the score function of the part; whole: it has all tokens in their order."""
        if whole:
            return placed(score, _rule(score.key(), len(self.number)), self.tables[:1])
        return placed(score, self.rule(score.key()), self.tables)


@lru_cache(maxsize=512)
def _rule(text: str, heads: int, *slices: tuple[int, int]) -> str:
    rule = rule_of(text)
    first = len(rule.kinds)
    b, h = atom("b"), atom("h")
    new = {"h": node_of("load", INT, (h,), first)}
    if slices:
        new |= dict.fromkeys(("n_q", "n_k"), node_of("load", INT, (), first + 3))
    for i, (name, shape) in enumerate(zip("qk", slices, strict=False)):
        entry = b if shape[0] > 1 else lift(0)
        slice_ = floor_divide(h, heads // shape[1]) if shape[1] > 1 else lift(0)
        run, rest = (split(atom(name), RUN) for split in (floor_divide, remainder))
        new[name] = add(node_of("load", INT, (entry, slice_, run), first + 1 + i), rest)
    known: dict[Expression, Expression] = {
        node: new[node.op] for node in walk(rule.logits) if node.op in new
    }
    kinds = ((1, "int64"), (3, "int32"), (3, "int32"), (0, "int32"))[: 4 if slices else 1]
    tables = (Kind(*kind, False, False) for kind in kinds)
    return text_of(substituted(rule.logits, known), (*rule.kinds, *tables))


def runs(blocks: Tensor, size: int) -> Tensor:
    """Return where each 16 tokens of blocks (.., blocks) begin."""
    run = torch.arange(0, size, RUN, device=blocks.device)
    return (blocks.unsqueeze(-1) * size + run).flatten(-2).int()


class PartPlaces(NamedTuple):
    """Those of the three masks of a `Part`."""

    local: Places
    remote: Places
    guests: Places


def places_of_part(
    part: Part, size: int, n: int, number: Ints, heads: int, device: Any
) -> PartPlaces:
    """Return where the masks of a part stand; size: tokens of a block, number: of its heads."""
    count = part.slices[0] * part.slices[1]
    come = []
    for exchange in (part.keys, part.queries):
        blocks = np.zeros((count, exchange.blocks), np.int64)
        blocks[: len(exchange.number)] = exchange.number  # the last slices may have none
        come.append(blocks.reshape(*part.slices, -1))
    own = part.own[None, None]
    far = own if part.far is None else own[..., part.far]
    keys = own
    if part.together:
        keys = np.concatenate([np.broadcast_to(own, (*part.slices, own.shape[2])), come[0]], 2)
    own, far, keys, fetched, guests = (
        runs(torch.from_numpy(x).to(device), size) for x in (own, far, keys, *come)
    )
    numbers = torch.from_numpy(number).to(device)
    whole = torch.tensor(n, dtype=torch.int32, device=device)
    parts = (own, keys), (far, fetched), (guests, own)
    return PartPlaces(*(Places(numbers, heads, q, k, whole) for q, k in parts))
