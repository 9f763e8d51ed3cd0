"""Time of functions of the scores, beside FlexAttention, FlashAttention-4 and a dense bias in SDPA.

Forward, backward, and backward with gradients of the tables, dense and on random masks; ours also
with a sink and with row maxima. Calls pass the float64 gate, with the gradients of their tables.
FlashAttention-4's functions have no backward. See docs/guide/scores.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import sparseflash
from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.bench.gate import Gate
from experiments.bench.peers.fa4 import score_mod
from experiments.bench.providers import PROVIDERS
from experiments.bench.step import Attend, Step, draw
from experiments.common.rows import OK, Row, last_versions
from experiments.common.tables import MISSING, markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid
from sparseflash import score_rules

KEY = "rule provider direction batch heads n_q head_dim dtype block_q round".split()
NONE, SINK, MAX = "none", "sink", "max"
RULES = (NONE, SINK, MAX, "softcap", "alibi", "relative", "t5", "swin", "pair")
OWN, PEERS = ("hopper", "triton", "cpu"), ("flex", "flex_flash", "fa4", "sdpa")
DIRECTIONS = ("forward", "backward", "backward, tables")  # the last with their gradients
RADIUS = 128  # longest distance with an entry of its own
# The cost over none that is allowed forward and backward; of others .15 and .3.
BARS = dict.fromkeys((SINK, MAX), (0.05, 0.05)) | dict.fromkeys(("relative", "t5"), (0.25, 0.4))


@dataclass(kw_only=True)
class Options(runner.Options):
    rules: list[str] = field(default_factory=lambda: [*RULES])
    providers: list[str] = both([*OWN[:2], *PEERS], ["cpu", "sdpa"])
    lengths: list[int] = both([2**i for i in range(10, 15)], [256])
    densities: list[float] = field(default_factory=lambda: [1.0, 0.25, 0.06])  # 1: no mask
    heads: int = both(8, 2)
    head_dims: list[int] = both([64, 128], [32])
    dtype: str = both("bfloat16", "float32")
    block: int = both(128, 32)  # tokens of a block of the masks
    rounds: int = both(3, 1)
    seconds: float = both(0.06, 0.1)


def rule_of(name: str, case: Case) -> tuple[Any, Callable[..., Any], tuple[int, ...]]:
    """Return our score of a table, the formula(math, s, b, h, q, k, table, buckets) of the peers
    and the gate, and the shape of the table: () for none.
    """
    heads, n, cap = case.heads, case.n_k, 15.0
    columns = 2 ** (int(math.log2(n)) // 2)  # of an image of n tokens
    rows, wide = -(-n // columns), 2 * columns - 1
    near = lambda m, q, k: m.clip(k - q + RADIUS, 0, 2 * RADIUS)  # noqa: E731
    down = lambda q, k: (q // columns - k // columns + rows - 1) * wide  # noqa: E731
    right = lambda q, k: q % columns - k % columns + columns - 1  # noqa: E731
    none = (lambda *t: None), (lambda m, s, *_: s), (heads,) if name == SINK else ()
    return {
        "softcap": (lambda: score_rules.softcap(cap), lambda m, s, *_: cap * m.tanh(s / cap), ()),
        "alibi": (lambda t: score_rules.alibi(slopes=t),
                  lambda m, s, b, h, q, k, t, p: s - t[h] * m.abs(k - q), (heads,)),
        "relative": (lambda t: score_rules.relative(RADIUS)(bias=t),
                     lambda m, s, b, h, q, k, t, p: s + t[h, near(m, q, k)],
                     (heads, 2 * RADIUS + 1)),
        "t5": (lambda t: score_rules.t5()(bias=t),
               lambda m, s, b, h, q, k, t, p: s + t[p[near(m, q, k)], h], (32, heads)),
        "swin": (lambda t: score_rules.swin(rows, columns)(bias=t),
                 lambda m, s, b, h, q, k, t, p: s + t[down(q, k) + right(q, k), h],
                 ((2 * rows - 1) * wide, heads)),
        "pair": (lambda t: score_rules.pair(bias=t),
                 lambda m, s, b, h, q, k, t, p: s + t[b, h, q, k], (case.batch, heads, n, n)),
    }.get(name, none)  # fmt: skip


def buckets(device: torch.device) -> Tensor:
    """Return the buckets of T5 for the distances -128 to 128 of key and query, int32."""
    d = torch.arange(-RADIUS, RADIUS + 1, device=device)
    far = (8 + (d.abs().clamp(min=8) / 8).log() * (8 / math.log(16)) + 1e-4).floor().clamp(max=15)
    return (torch.where(d.abs() < 8, d.abs(), far) + 16 * (d > 0)).int()


def cases(run: Run) -> list[Case]:
    o, made = run.options, []
    choices(o, rules=RULES, providers=(*OWN, *PEERS), dtype=DTYPES)
    for at in grid(n=sorted(o.lengths), dim=o.head_dims, density=o.densities):
        dense, sizes = at.density == 1, (1, o.heads, o.heads, at.n, at.n, at.dim, o.dtype)
        block, mask = 0 if dense else o.block, f"random_blocks({at.density}, block={o.block})"
        made.append(Case(DENSE if dense else mask, *sizes, block, block))
    return made


def ways(case: Case, run: Run) -> list[Row]:
    return [
        {"rule": rule, "provider": name, "direction": direction, **PROVIDERS[name].version()}
        for rule in run.options.rules
        for name in run.options.providers
        if name in OWN or rule not in (SINK, MAX)
        for direction in DIRECTIONS[: 3 if rule_of(rule, case)[2] else 2]
    ]


def opened(case: Case, run: Run) -> Callable[[Row], dict[str, Any]]:
    device = run.device
    qkv, places = draw(case, device), buckets(device)

    @cache
    def gated(rule: str) -> Gate:
        _, formula, shape = rule_of(rule, case)
        dtype = DTYPES[case.dtype] if rule == "pair" else torch.float32
        # slopes are small: the rounding of outputs enters their gradients times the distances
        largest = 16 / case.n_k if rule == "alibi" else 1.0
        tables = (torch.rand(shape, device=device, dtype=dtype) * largest, places) if shape else ()
        return Gate(case, *qkv, rule=partial(formula, torch), tables=tables, sink=rule == SINK)

    @cache
    def prepared(rule: str, name: str, wanted: bool) -> Step:
        given = gated(rule).tables
        tables = [t.detach().requires_grad_(wanted and t is not places) for t in given]
        return Step(attention(rule, name, case, device, *tables), qkv, (*tables[: int(wanted)],))

    def one(row: Row) -> dict[str, Any]:
        rule, name, (way, *wanted) = row["rule"], row["provider"], row["direction"].split(", ")
        if name != "sdpa" and (reason := PROVIDERS[name].unsupported(case, device, way)):
            raise ValueError(reason)
        if name == "fa4" and rule != NONE and way != "forward":
            raise ValueError("its functions of the scores have no backward")
        step = prepared(rule, name, bool(wanted))
        error = step.error(gated(rule), (way,))
        return {"error": error, **step.time(way, device, run.options.seconds)}

    return one


def attention(rule: str, name: str, case: Case, device: torch.device, *tables: Tensor) -> Attend:
    """Return attention with a rule by a provider."""
    (ours, formula, _), mod = rule_of(rule, case), {}
    if name in OWN:
        sink = tables[0] if rule == SINK else None
        how = {"sink": sink, "score": ours(*tables[:1]), "return_max_scores": rule == MAX}
        attend: Any = partial(sparseflash.attention, mask=case.blocks, backend=name, **how)
        return (lambda *qkv: attend(*qkv)[0]) if rule == MAX else attend
    if name.startswith("flex") and rule != NONE:
        mod = {"score_mod": lambda *numbers: formula(torch, *numbers, *tables)}
    elif name == "fa4" and rule != NONE:
        mod = {"score_mod": score_mod(formula), "aux_tensors": [*tables] or None}
    if name != "sdpa" or (rule == NONE and case.blocks is None):
        return PROVIDERS[name].prepare(case, device, **mod)
    if rule == "softcap":
        raise ValueError("no bias caps the scores")
    seen = torch.from_numpy(case.allowed(0, 0, np.arange(case.n_q))).to(device)
    sizes = (1, 1, 1, 1), (case.heads, 1, 1), (case.n_q, 1), (case.n_k,)
    numbers = [torch.arange(max(size), device=device).view(size) for size in sizes]

    def dense() -> Tensor:
        bias = formula(torch, torch.zeros(seen.shape, device=device), *numbers, *tables)
        return bias.masked_fill(~seen, -torch.inf).to(DTYPES[case.dtype])

    kept = None if any(t.requires_grad for t in tables) else dense()
    attend = F.scaled_dot_product_attention
    return lambda q, k, v: attend(q, k, v, dense() if kept is None else kept)


def tables(frame: Any) -> dict[str, str]:
    """Return terms, the cost of each rule over none in the same round in percent, ! above its bar;
    ms, providers across; and why others have none.
    """
    rows: Any = last_versions(frame[frame.status == OK], KEY)
    call = "provider mask n_q head_dim direction".split()
    same = [*call, "device", "round"]
    plain = rows.assign(direction=rows.direction.str.split(",").str[0])
    base = rows[rows.rule == NONE].drop_duplicates(same, keep="last").set_index(same).ms_median
    cost = rows.ms_median.to_numpy() / base.reindex(plain.set_index(same).index).to_numpy() - 1
    names = {"provider": "backend", "n_q": "N", "head_dim": "D", NONE: "ms"}
    ms = lambda g: f"{g.ms_median.median():.3f}"  # noqa: E731

    def cell(same: Any) -> str:
        rule, cost = same.rule.iloc[0], same.cost.median()
        bar = BARS.get(rule, (0.15, 0.3))[same.direction.iloc[0] != "forward"]
        above = " !" if cost > bar else ""
        return (
            ms(same) if rule == NONE else MISSING if cost != cost else f"{100 * cost:+.1f}{above}"
        )

    made = {"terms": pivot(rows.assign(cost=cost), call, "rule", cell)}
    made["ms"] = pivot(rows, ["rule", *call[1:]], "provider", ms)
    found = {n: markdown(t.rename(columns=names), left=(0, 1, 4)) for n, t in made.items()}
    without: Any = last_versions(frame, KEY)
    without = without[without.status != OK].drop_duplicates(["provider", "rule", "status"])
    if len(without):
        found["without"] = markdown(without[["provider", "rule", "direction", "status"]])
    return found
