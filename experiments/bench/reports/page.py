"""Tables of speed in Markdown, for the pages that show them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from experiments.bench.cases import DENSE, LAYOUTS
from experiments.bench.reports.columns import (
    COLUMNS,
    about,
    both,
    by_direction,
    layout_text,
    measured,
    rate,
)
from experiments.bench.reports.peers import against_peers, peer_counts, rates, ratios
from experiments.bench.reports.plot import PROVIDERS
from experiments.bench.reports.table import best_dense, grouped, shape_of
from experiments.bench.rows import SpeedRow
from experiments.common import text_table

MAIN = ("hopper", "cpu", "fa4", "cudnn_blocks", "sdpa_cudnn", "sdpa")  # of the table by density


def fill(text: str, rows: Sequence[SpeedRow], file: str = "") -> str:
    """A page with every table between `<!-- rows: NAME -->` and `<!-- end -->` made of these rows.

    file: that of the rows. Where the page has lines `<!-- rows: NAME PATH -->` with the end of its
    path, those are made alone.

    Raises ValueError for a name that is no table, and for a page without one.
    """

    def table(name: str) -> str:
        lines = TABLES[name](rows)
        if not lines:
            raise ValueError(f"no row belongs to <!-- rows: {name} -->: measure it first")
        return lines

    end = "/".join(Path(file).parts[-2:])
    end = end if f" {end} -->" in text else ""
    return text_table.fill(text, {name: partial(table, name) for name in TABLES}, end)


def by_density(
    rows: Sequence[SpeedRow], providers: Sequence[str] = MAIN, head_dim: int | None = None
) -> str:
    """TFLOP/s by density of random masks, each head dim (or this one) with its providers."""
    rows = [r for r in measured(rows) if r.provider in providers]
    chosen = [r for r in rows if _regular(r, rows[0]) and head_dim in (None, r.head_dim)]
    if not chosen:
        return ""
    dims = sorted({r.head_dim for r in chosen}, reverse=True)
    columns = [(d, p) for d in dims for p in COLUMNS if _at(chosen, d, p)]
    lines = [["density", *(_title(d, p) for d, p in columns)]]
    for same in grouped(chosen, lambda r: (r.mask == DENSE, r.density)):
        name = "no mask" if same[0].mask == DENSE else f"{same[0].density:.5g}"
        lines.append([name, *(_rates(_at(same, d, p)) for d, p in columns)])
    return about(chosen) + "\n\n" + text_table.markdown(lines, left=range(len(lines[0])))


def by_mask(rows: Sequence[SpeedRow]) -> str:
    """TFLOP/s of all other cases, each peer with its own kernel for a mask where it has one.

    Empty where there are none.
    """
    rows = measured(rows)
    chosen = [r for r in rows if not _regular(r, rows[0])]
    if not chosen:
        return ""
    providers = [p for p in COLUMNS if any(r.provider == p for r in chosen)]
    lines = [["mask", "tokens", "head dim", "layout", "density", *(COLUMNS[p] for p in providers)]]
    for same in grouped(chosen, lambda r: (r.mask, r.n_q, r.head_dim, r.layout)):
        first = same[0]
        mask = "none" if first.mask == DENSE else f"`{first.mask}`"
        case = mask, str(first.n_q), str(first.head_dim), layout_text(first), f"{first.density:.3g}"
        lines.append([*case, *(_rates([r for r in same if r.provider == p]) for p in providers)])
    return about(chosen) + "\n\n" + text_table.markdown(lines, left=range(len(lines[0])))


def by_version(rows: Sequence[SpeedRow]) -> str:
    """TFLOP/s of the Hopper kernels with each version of Triton, and the least over the best.

    Empty where there are none.
    """
    rows = [row for row in rows if row.provider == "hopper"]
    chosen = [r for same in grouped(rows, lambda r: r.triton) for r in measured(same)]
    if not chosen:
        return ""
    tritons = sorted({row.triton for row in chosen})
    lines = [["head dim", "density", *(f"Triton {t}" for t in tritons), "least / best"]]
    for same in grouped(chosen, lambda r: (r.head_dim, r.mask)):
        first = same[0]
        density = "no mask" if first.mask == DENSE else f"{first.density:.5g}"
        rates = [_rates([r for r in same if r.triton == t]) for t in tritons]
        shares = [
            f"{min(found) / max(found):.2f}"
            for direction in ("forward", "backward")
            if (found := [r.tflops for r in same if r.direction == direction and r.tflops])
        ]
        lines.append([str(first.head_dim), density, *rates, " / ".join(shares)])
    return about(chosen) + "\n\n" + text_table.markdown(lines, left=range(len(lines[0])))


def speedups(rows: Sequence[SpeedRow], density: float = 0.125, head_dim: int = 128) -> str:
    """One sentence: how much faster random blocks of this density are than the fastest dense."""
    chosen = [r for r in measured(rows) if r.head_dim == head_dim and r.layout == LAYOUTS[0]]
    found = {
        r.direction: r
        for r in chosen
        if r.own and r.random and r.density == density and r.provider in MAIN
    }
    dense = best_dense(chosen)
    if len(found) != 2:
        return ""
    row = found["forward"]
    times = {d: f"{dense[shape_of(r)].ms / r.ms:.1f}" for d, r in found.items()}
    names = {PROVIDERS[dense[shape_of(r)].provider][0] for r in found.values()}
    return (
        f"On one {row.device}, at {row.n_q} tokens and head dim {head_dim} in {row.dtype}, a mask"
        f" that skips {100 * (1 - density):g} % of the blocks runs {times['forward']} times as fast"
        f" as the fastest dense attention ({' or '.join(sorted(names))}) in the forward and"
        f" {times['backward']} times in the backward (torch {row.torch}, {row.date[:10]})."
    )


TABLES: dict[str, Callable[[Sequence[SpeedRow]], str]] = {
    "density": by_density,
    "density_128": partial(by_density, providers=tuple(COLUMNS), head_dim=128),
    "density_64": partial(by_density, providers=tuple(COLUMNS), head_dim=64),
    "masks": by_mask,
    "speedups": speedups,
    "versions": by_version,
    "peers": against_peers,
    "peer_counts": peer_counts,
    "rates": rates,
    "ratios": ratios,
}


def _regular(row: SpeedRow, first: SpeedRow) -> bool:
    """Whether a row belongs to the table by density, of which the first measured row is one."""
    plain = row.random or row.mask == DENSE
    return plain and (row.n_q, row.layout) == (first.n_q, first.layout)


def _at(rows: Sequence[SpeedRow], head_dim: int, provider: str) -> list[SpeedRow]:
    return [r for r in rows if r.head_dim == head_dim and r.provider == provider]


def _title(head_dim: int, provider: str) -> str:
    name = COLUMNS[provider]
    return f"{name}, D {head_dim}" if name.startswith("`") else name


def _rates(rows: Sequence[SpeedRow]) -> str:
    return both({d: rate(row.tflops) for d, row in by_direction(rows).items() if row.tflops})
