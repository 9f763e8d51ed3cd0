"""Comparisons of rows whose times follow from their work."""

from dataclasses import replace

import pytest

from experiments.bench.reports import compare
from tests.experiments.bench.bench_cases import ROW, made_up_rows


def test_it_compares_what_belongs_together(monkeypatch):
    rows = made_up_rows(monkeypatch)
    found = {}
    for score in compare.scores(rows, "cpu"):
        found.setdefault(score.comparison, []).append(score)
    assert {s.value for s in found["sdpa_cudnn time / cpu time"]} == {2.0}
    assert {s.value for s in found["ideal time / time"]} == {0.5}
    even = found["even time / uneven time, at one density"]
    assert all(s.value == pytest.approx(1) for s in even)
    assert any(s.case.startswith("bigbird") for s in even)
    dense = {round(s.value, 6) for s in found[compare.OWN_DENSE] if "16x16" not in s.case}
    assert dense == {1.0}  # times follow from the blocks
    small = found["time at 128 / time at smaller blocks"]
    assert {round(s.value, 6) for s in small} == {0.25, 1.0}
    assert all((s.value < 0.5) == ("16x16" in s.case) for s in small)
    text = compare.report(rows, "cpu")
    assert "summary (above 1 is better)" in text and "own dense x density" in text
    with pytest.raises(ValueError, match=r"own='hopper': choose from cpu, sdpa_cudnn"):
        compare.report(rows, "hopper")


def masked(mask, density, ms, block=32, **changes):
    blocks = {"block_q": block, "block_k": block}
    return replace(ROW, mask=mask, density=density, ms_median=ms, **blocks, **changes)


def test_masks_are_compared_at_nearly_one_density_alone():
    even, whole = masked("random_blocks(0.25)", 0.25, 2.0), "random_blocks(0.25, block=128)"
    uneven, other = masked("local(8)", 0.27, 3.0), masked("local(99)", 0.3, 3.0)

    def values(comparison, *rows):
        found = compare.scores(rows, "cpu")
        return [(s.case.split()[0], s.value) for s in found if s.comparison == comparison]

    expected = [("local(8)", pytest.approx((2 / 0.25) / (3 / 0.27)))]
    assert values(compare.UNEVEN, even, uneven, other) == expected
    assert values(compare.UNEVEN, masked("random_blocks(0.25)", 0.25, 2.0, 64), uneven) == []
    found = values(compare.SMALL, even, uneven, masked(whole, 0.251, 1.0, 128))
    assert found == [("random_blocks(0.25)", 0.5)]
    assert values(compare.SMALL, even, masked(whole, 0.26, 1.0, 128)) == []


@pytest.mark.parametrize("peer", ["flex", "sdpa"])
def test_the_summary_has_the_geometric_mean_and_the_worst(peer):
    """A peer that takes half the time of one case and eight times that of another."""
    first, second = masked("local(8)", 0.25, 2.0), masked("local(9)", 0.25, 1.0)
    theirs = [replace(r, provider=peer, ms_median=ms) for r, ms in ((first, 1.0), (second, 8.0))]
    text = compare.report([first, second, *theirs], "cpu")
    line = next(line for line in text.splitlines() if line.startswith(f"{peer} time / cpu time"))
    cells = line.removeprefix(f"{peer} time / cpu time").split(maxsplit=4)
    assert cells == ["forward", "2", "2.000", "0.500", "local(8) 32x32 N 256 D 16"]
    wider = replace(theirs[0], block_q=64)  # another case
    assert f"{peer} time" not in compare.report([first, wider], "cpu")


def test_a_mask_without_a_block_has_no_speed_to_compare():
    dense = replace(ROW, mask="dense", density=1.0)
    even = replace(ROW, mask="random_blocks(0.25)")
    rows = [dense, even, replace(ROW, mask="local(0) & ~local(0)", density=0.0, tflops=0.0)]
    found = [s.comparison for s in compare.scores(rows, "cpu") if s.case.startswith("local")]
    assert found == [compare.IDEAL]
    assert "nan" not in (text := compare.report(rows, "cpu")) and "inf" not in text
