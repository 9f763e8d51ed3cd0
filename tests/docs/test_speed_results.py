"""Tables of speed on the pages of results follow from the rows."""

import re

import pytest

from experiments.bench.cases import DENSE
from experiments.bench.reports.columns import both, measured, rate
from experiments.bench.rows import SpeedRow
from experiments.common.provenance import ROOT
from experiments.common.records import read
from experiments.lm.report import filled_page
from experiments.lm.rows import ModelRow

RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("plan", ["same", "contexts", "masks", "equal_time"])
def test_tables_of_language_models_follow_from_the_rows(plan):
    page = (RESULTS / "language_models.md").read_text()
    rows = read(RESULTS / "language_models" / "results.csv.gz", ModelRow)
    assert filled_page(page, plan, [row for row in rows if row.plan == plan]) == page


def test_steps_of_the_long_range_arena_are_those_of_their_tables():
    """Tables that experiments.lra_speed wrote from its rows."""
    pages = [path.read_text() for path in (RESULTS / "lra").glob("speed*.md")]
    known = {line for page in pages for line in page.splitlines()}
    shown = (RESULTS / "lra_speed.md").read_text().splitlines()
    steps = [
        line for line in shown if re.match(r"\| [\w ]+[\w-]* \| [\d.]+ \([\d.]+x\) \d+ ", line)
    ]
    assert len(steps) >= 15 and set(steps) <= known


def test_the_table_of_the_portable_kernels_follows_from_the_rows():
    page = (RESULTS / "portable.md").read_text()
    rows = [
        r for r in measured(read(RESULTS / "h200" / "triton.csv.gz", SpeedRow)) if r.n_q == 16384
    ]

    def cells(head_dim: int, mask: str) -> list[str]:
        found = {
            p: {
                r.direction: r
                for r in rows
                if (r.provider, r.head_dim, r.mask) == (p, head_dim, mask)
            }
            for p in ("triton", "flex")
        }
        rates = [both({d: rate(r.tflops or 0) for d, r in by.items()}) for by in found.values()]
        ours, flex = found.values()
        return [*rates, both({d: f"{flex[d].ms / ours[d].ms:.2f}" for d in ours})]

    for density in (None, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125):
        mask = f"random_blocks({density})" if density else DENSE
        name = "no mask" if density is None else f"{density:g}"
        line = " | ".join([name, *cells(128, mask), *cells(64, mask)])
        assert f"| {line} |" in page
