"""The tables of the first page: what stands where, and rounds as one number."""

from dataclasses import replace

import pytest

from experiments.bench.cases import DENSE
from experiments.bench.reports.page import TABLES, by_density, by_mask, by_version, fill, speedups
from experiments.bench.reports.table import newest
from experiments.bench.rows import SpeedRow
from experiments.common.provenance import ROOT
from experiments.common.records import OK, read
from tests.experiments.bench.bench_cases import ROW

BASE = replace(ROW, device="a GPU", torch="2.9", triton="3.9", date="2026-01-02T03:04:05", n_q=512)


def row(provider, direction, tflops, mask=DENSE, density=1.0, **changes):
    changes = {"provider": provider, "direction": direction, "tflops": tflops} | changes
    return replace(BASE, mask=mask, density=density, ms_median=1.0, **changes)


RANDOM = {"mask": "random_blocks(0.5)", "density": 0.5}
ROWS = [
    row("hopper", "forward", 640.4, head_dim=128),
    row("hopper", "backward", 590.6, head_dim=128),
    row("fa4", "forward", 660, head_dim=128, version="4.0"),
    row("hopper", "forward", 460, head_dim=64),
    row("hopper", "forward", 630, head_dim=128, **RANDOM),
    row("hopper_deterministic", "backward", 500, head_dim=128, **RANDOM),
    row("hopper", "forward", 300, head_dim=128, mask="local(3) | causal()", density=0.125),
    row("fa4_window", "forward", 1.25, head_dim=128, mask="sliding(3)", density=0.1),
    row("hopper", "forward", 620, head_dim=128, layout="token_major"),
    row("hopper", "forward", None, head_dim=128, n_q=1024, status="failed: x"),
]


def beside(provider, forward, backward, **changes):
    changes = {"v_dim": changes["head_dim"]} | changes
    both = (("forward", forward), ("backward", backward))
    return [
        replace(row(provider, direction, 1000 / ms, **changes), ms_median=ms)
        for direction, ms in both
        if ms
    ]


BESIDE = [
    *beside("hopper", 2.0, 4.0, head_dim=128),
    *beside("fa4", 1.0, 5.0, head_dim=128),
    *beside("hopper", 2.0, 4.0, head_dim=64, v_dim=32, mask="causal()"),
    *beside("sdpa_cudnn", 3.0, None, head_dim=64, v_dim=32, mask="causal()"),
    *beside("hopper", 1.0, 1.0, head_dim=64, v_dim=32, **RANDOM, n_q=1024, kv_heads=1, heads=4),
]


def test_rates_and_ratios_stand_side_by_side_with_what_cases_differ_in():
    assert TABLES["rates"](BESIDE).partition("\n\n")[2].splitlines() == [
        "| head dim | mask | tokens | batch x heads | `hopper` | FlashAttention-4 | cuDNN, dense "
        "| FlashAttention-4, time / ours | cuDNN, dense, time / ours |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| 128 | none | 512 | 1 x 2 | 500 / 250 | 1000 / 200 |  | 0.50 / 1.25 |  |",
        "| 64, values of 32 | `causal()` | 512 | 1 x 2 | 500 / 250 |  | 333 (forward) |  "
        "| 1.50 (forward) |",
        "| 64, values of 32 | `random_blocks(0.5)` | 1,024 | 1 x 4, 1 of keys | 1000 / 1000 |  |  |"
        "  |  |",
    ]
    assert TABLES["rates"](BESIDE[2:4]) == ""


def test_rows_that_would_share_a_cell_are_refused():
    half = replace(ROWS[0], dtype="float16")
    differ = r"rows of hopper, dense, forward, differ in dtype \(float32, float16\) and would share"
    for name in ("density", "rates", "ratios", "versions"):
        with pytest.raises(ValueError, match=differ):
            TABLES[name]([ROWS[0], ROWS[2], half])
    with pytest.raises(ValueError, match=r"differ in block_k \(32, 64\)"):
        by_mask([ROWS[0], ROWS[6], replace(ROWS[6], block_k=64)])


def test_ratios_are_those_of_one_length():
    assert TABLES["ratios"](BESIDE).splitlines() == [
        "| head dim | mask | FlashAttention-4 | cuDNN, dense |",
        "| --- | --- | ---: | ---: |",
        "| 128 | none | 0.50 / 1.25 |  |",
        "| 64, values of 32 | `causal()` |  | 1.50 (forward) |",
    ]
    assert TABLES["ratios"](BESIDE[:2]) == ""


def test_the_table_by_density_has_a_line_a_density_and_the_providers_of_each_head_dim():
    about, _, table = by_density(ROWS).partition("\n\n")
    assert about.startswith("One a GPU, float32, 512 tokens. TFLOP/s of the computed blocks")
    assert about.endswith("torch 2.9, Triton 3.9, flash-attn-4 4.0, 2026-01-02, one round.")
    assert table.splitlines() == [
        "| density | `hopper`, D 128 | FlashAttention-4 | `hopper`, D 64 |",
        "| --- | --- | --- | --- |",
        "| no mask | 640 / 591 | 660 (forward) | 460 (forward) |",
        "| 0.5 | 630 (forward) |  |  |",
    ]


def test_the_line_above_a_table_names_every_device_and_dtype():
    other = row("cpu", "forward", 7, head_dim=64, device="a CPU", dtype="float16")
    assert by_density([ROWS[0], other]).startswith("One a CPU, a GPU, float16, float32, 512 tokens")


def test_versions_of_peers_have_the_name_of_their_package():
    peers = [
        row(f"cudnn_{form}", "forward", 600, **RANDOM, version="1.3") for form in ("blocks", "flex")
    ]
    about, _, table = by_density([*ROWS, *peers]).partition("\n\n")
    assert ", Triton 3.9, flash-attn-4 4.0, nvidia-cudnn-frontend 1.3, 2026" in about
    assert "| cuDNN Frontend |" in table


def test_a_head_dim_has_a_table_with_all_providers():
    assert TABLES["density_128"](ROWS).splitlines()[3:] == [
        "| density | `hopper`, D 128 | deterministic | FlashAttention-4 |",
        "| --- | --- | --- | --- |",
        "| no mask | 640 / 591 |  | 660 (forward) |",
        "| 0.5 | 630 (forward) | 500 (backward) |  |",
    ]
    assert TABLES["density_64"]([r for r in ROWS if r.head_dim == 128]) == ""


def test_other_masks_and_layouts_have_a_table_of_their_own():
    lines = by_mask(ROWS).splitlines()[3:]
    assert lines == [
        "| mask | tokens | head dim | layout | density | `hopper` | its window |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| `local(3) \\| causal()` | 512 | 128 | B, H, N, D | 0.125 | 300 (forward) |  |",
        "| `sliding(3)` | 512 | 128 | B, H, N, D | 0.1 |  | 1.2 (forward) |",
        "| none | 512 | 128 | B, N, H, D | 1 | 620 (forward) |  |",
    ]
    assert by_mask(ROWS[:6]) == ""


def test_rounds_are_their_median_with_the_range():
    times = {1: 4.0, 2: 2.0, 3: 2.5}
    rounds = [
        replace(row("hopper", "forward", 1000 / ms), ms_median=ms, round=number)
        for number, ms in times.items()
    ]
    text = by_density(rounds)
    assert "| 400 (forward) |" in text and "medians of 3 rounds, range 80.0 % at most" in text
    assert "medians of 1 to 3 rounds, " in by_density([*rounds, row("fa4", "forward", 1)])
    failed = replace(rounds[1], ms_median=None, tflops=None, status="failed: x")
    assert "medians of 2 rounds, " in by_density([rounds[0], failed, rounds[2]])


def test_a_page_is_filled_between_its_marks_and_nowhere_else():
    page = "a\n<!-- rows: density -->\nold\n<!-- end -->\nb\n"
    filled = fill(page, ROWS)
    assert filled == f"a\n<!-- rows: density -->\n{by_density(ROWS)}\n<!-- end -->\nb\n"
    assert fill(filled, ROWS) == filled


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("no table", "the page has no line <!-- rows: NAME -->"),
        ("<!-- rows: speed -->\n<!-- end -->", "rows: speed -->: choose from density, density_128"),
        ("<!-- rows: masks -->\n<!-- end -->", "no row belongs to <!-- rows: masks -->: measure"),
    ],
)
def test_what_cannot_be_filled_is_an_error(page, error):
    with pytest.raises(ValueError, match=error):
        fill(page, ROWS[:1])


def test_the_page_says_how_near_cudnn_is():
    rows = newest(read(ROOT / "docs/results/h100/published.csv.gz", SpeedRow))
    random = [r for r in rows if r.random and r.direction == "backward" and r.status == OK]
    times = {(r.mask, r.n_q, r.provider): r.ms for r in random}
    cases = [key[:2] for key in times if key[2] == "cudnn_blocks"]
    ratios = [times[*case, "cudnn_blocks"] / times[*case, "hopper"] for case in cases]
    said = f"from {1 - min(ratios):.0%} behind it to {max(ratios) - 1:.0%} ahead".replace("%", " %")
    assert len(cases) == 7 and said in (ROOT / "docs/results/published.md").read_text()


def test_versions_of_triton_stand_side_by_side():
    def rounds(triton, direction, *tflops):
        made = row("hopper", direction, 1.0, head_dim=64, triton=triton)
        return [replace(made, round=n, tflops=t, ms_median=1 / t) for n, t in enumerate(tflops, 1)]

    rows = [
        *rounds("3.7", "forward", 410, 400, 390),
        *rounds("3.6", "forward", 500),
        *rounds("3.6", "backward", 300),
        row("fa4", "forward", 600, head_dim=64, triton="3.7"),
    ]
    about, _, table = by_version(rows).partition("\n\n")
    assert "Triton 3.6, 3.7, 2026-01-02, medians of 1 to 3 rounds" in about
    assert table.splitlines()[::2] == [
        "| head dim | density | Triton 3.6 | Triton 3.7 | least / best |",
        "| 64 | no mask | 500 / 300 | 400 (forward) | 0.80 / 1.00 |",
    ]
    assert by_version(rows[-1:]) == ""


def test_a_page_may_have_tables_of_several_files():
    text = "<!-- rows: ratios -->\n<!-- end -->\n<!-- rows: rates a/b.csv -->\n<!-- end -->\n"
    own = fill(text, BESIDE, "somewhere/a/b.csv")
    assert own.startswith("<!-- rows: ratios -->\n<!-- end -->\n") and "time / ours" in own
    other = fill(text, BESIDE, "b.csv")
    assert other.endswith("<!-- rows: rates a/b.csv -->\n<!-- end -->\n") and "| none |" in other


def test_one_sentence_says_how_much_faster_half_of_the_blocks_are():
    times = {("none", "forward"): 4.0, ("none", "backward"): 9.0}
    times |= {("half", "forward"): 1.6, ("half", "backward"): 6.0}
    rows = [
        replace(ROWS[0], provider="cpu", direction=direction, ms_median=ms, head_dim=64, **what)
        for (name, direction), ms in times.items()
        for what in ({"mask": "dense", "density": 1.0} if name == "none" else RANDOM,)
    ]
    text = speedups(rows, 0.5, 64)
    assert "skips 50 % of the blocks runs 2.5 times" in text and "1.5 times in the backward" in text


@pytest.mark.parametrize(
    ("page", "rows"),
    [
        ("README.md", "h100/page.csv.gz"),
        ("docs/results/hopper.md", "h100/page.csv.gz"),
        ("docs/results/hopper.md", "h100/head_dims.csv.gz"),
        ("docs/results/hopper.md", "h100/shapes.csv.gz"),
        ("docs/results/hopper.md", "h100/small_blocks.csv.gz"),
        ("docs/results/triton_versions.md", "h200/tritons.csv.gz"),
        ("docs/results/published.md", "h100/published.csv.gz"),
    ],
)
def test_pages_show_their_rows(page, rows):
    text = (ROOT / page).read_text()
    found = read(ROOT / "docs/results" / rows, SpeedRow)
    assert fill(text, found, rows) == text
    slower = [
        replace(r, tflops=r.tflops / 2, ms_median=2 * r.ms) if r.own and r.tflops else r
        for r in found
    ]
    assert fill(text, slower, rows) != text  # the page has tables of this file
