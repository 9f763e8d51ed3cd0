"""Wrong masks, and what is said of them; right ones, of which nothing is said."""

import re

import numpy as np
import pytest

import masks
from masks import Mask
from masks.analysis.check import Report, check
from tests.masks.helpers import mask_of, rows

BUTTERFLY = masks.butterfly(128)
CAUSAL = masks.causal()


def said(report: Report) -> str:
    return " ".join(report.problems)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (masks.dense(), (4096, 1)),
        (CAUSAL, (4096, 1)),
        (CAUSAL, (512,)),
        (CAUSAL, (512, None, True)),
        (masks.local(256) | BUTTERFLY | masks.global_tokens(64), (4096, 2)),
        (masks.local(256) | BUTTERFLY | masks.global_tokens(64), (1 << 17, 12)),
        ((masks.local(256) | BUTTERFLY) & CAUSAL, (4096, 6)),
        ((BUTTERFLY & CAUSAL) | masks.local(128, 0), (128 * 256, 13, True)),
        (masks.heads(masks.local(16), BUTTERFLY), (4096, 6)),
        (masks.layers(masks.local(64), BUTTERFLY), (4096, 8)),
        (masks.layers(masks.butterfly(64, levels=0), masks.butterfly(64)), (1024, 8)),
    ],
    ids=str,
)
def test_nothing_is_wrong(mask: Mask, options: tuple):
    report = check(mask, *options)
    assert report.ok and not report.problems, str(report)
    assert report.reach.exact == (options[0] <= 4096)
    assert "no problem" in str(report)
    assert f"seen after {report.reach.depth[6:]}" in " ".join(report.notes)


# A mask, what `check` is given, and what a problem (!) or a note (-) says.
SAID = r"""
butterfly(128) & causal()  =>  128 * 256, layers=12, causal=True
    =>  ! a query can see at most 19\.9 % of the keys before it, at any depth;
    =>  ! queries 30720-30847 never see keys 128-2047
    =>  ! Add local\(128, 0\): everything is then seen after 13 layers
(local(0) | keys_at(range(0, 128 * 64, 512))) & causal()  =>  128 * 64, 12, True
    =>  ! With causal, a query can see at most [\d.]+ % of the keys before it, at any depth
(butterfly(128) | local(128)) & causal()  =>  4096, 4
    =>  !^4 layers are not enough: a query has seen [\d.]+ % of the keys before
    =>  ! all of it is seen after 7 layers
sliding(4096)  =>  65536, 12  =>  ! at most 93\.8 %  =>  ! after 16 to 17 layers
local(1)  =>  256, 1, block_size=16  =>  !^1 layer is not enough
local(1)  =>  256, block_size=16
    =>  - After 64 layers a query has seen [\d.]+ % of the keys, and more later
butterfly(128) | local(128) & causal()  =>  1024
    =>  - The part local\(128\) & causal\(\) is causal, yet the mask allows keys after
butterfly(128) | local(128) & where(lambda q, k: k <= q)  =>  1024
    =>  - is causal, yet the mask allows keys after the query
causal() - local(10)  =>  512
    =>  ! 11 queries see nothing \(0-10\): attention gives them 0
    =>  ! 11 keys are seen by no query \(501-511\)
local(0) - dense()  =>  256, 4  =>  !^Nothing is allowed at 256 tokens: every output is 0\.$
causal()  =>  512, causal=False  =>  ! can see only 50\.1 % of the keys, at any depth
butterfly(64, levels=0)  =>  1024, 4  =>  ! can see only 6\.25 % of the keys, at any depth
layers(dense(), causal() - local(0))  =>  64, 4, False, block_size=16
    =>  ! Layer 1: 1 query sees nothing \(0\)
local(16)  =>  2048, 64
    =>  - only [\d.]+ % are allowed \(waste 1[12][\d.]*, blocks of 128 x 128\)
    =>  - Blocks of 32 x 32 compute 4\.64 % of all pairs, not 18
global_tokens(64)  =>  4096
    =>  - The busiest query block has 32 non-empty blocks, 16\.3 times the mean
    =>  - The busiest key block
local(256) | butterfly(128) | global_tokens(64)  =>  1 << 17, 12  =>  - \(bounds by blocks\)
local(256) | butterfly(128) | global_tokens(64)  =>  1 << 17, 3
    =>  - is open: by blocks, everything is seen after 2 to
dilated(512, 4)  =>  2048, 6  =>  ! can see only 25 % of the keys, at any depth
dilated(512, 4) & causal()  =>  2048, causal=True  =>  ! only 25 % of the keys before it
where(lambda q, k: (q - k) % 4 == 0)  =>  256, block_size=64
    =>  ! query 0 never sees keys 1-3, 5-7, 9-11 and 61 more ranges
    =>  ! everything is then seen after
local(0)  =>  256  =>  ! query 255 never sees keys 0-254
"""


@pytest.mark.parametrize(("mask", "options", "words"), [(a, b, c) for a, b, *c in rows(SAID)])
def test_what_is_said(mask: str, options: str, words: list[str]):
    report = eval(f"mask.check({options})", {"mask": mask_of(mask)})
    for word in words:
        found = said(report) if word[0] == "!" else " ".join(report.notes)
        assert re.search(word[1:] if word[1] == "^" else word[2:], found), (word, str(report))


def test_every_named_depth_is_true():
    """What a remedy promises holds when it is taken."""
    wrong = [BUTTERFLY & CAUSAL, masks.local(16), masks.butterfly(128, 2), masks.sliding(64)]
    for mask in wrong:
        text = said(check(mask, 2048, layers=4))
        remedy, depth = re.findall(r"Add (.+?): everything is then seen after (\d+) layer", text)[0]
        better = (mask | masks.parse(remedy)).build(2048)
        found = better.reach(causal=better.stats().causal, exact=True)
        assert found.at_least == int(depth), (mask, remedy)


def test_looks_ahead():
    mask = BUTTERFLY | masks.local(128) & CAUSAL  # binds as butterfly | (local & causal)
    report = check(mask, 1024, causal=True)
    ahead = np.triu(mask.build(1024).to_dense()[0, 0], 1).sum()
    assert f"{ahead} allowed pairs have k > q, by up to 639 tokens" in said(report)
    assert f"Take {mask & CAUSAL}." in said(report)
    leaky, causal = (m.build(4096).reach(causal=True, exact=True) for m in (mask, mask & CAUSAL))
    report = check(mask, 4096, causal=True)
    assert report.reach.upper == causal.upper != leaky.upper  # what looks ahead is no help
    for other in (mask & CAUSAL, BUTTERFLY | masks.local(128, 0), BUTTERFLY | masks.local(128)):
        assert "yet the mask" not in " ".join(check(other, 1024).notes)


def test_heads():
    lone = np.zeros((2, 64, 64), bool)
    lone[0], lone[1, :8] = np.eye(64), True
    report = check(masks.mask_from(lone), 64, block_size=16)
    notes = " ".join(report.notes)
    assert "see nothing in head 1, but do in another head" in notes
    assert "head 0 allows 1.56 % of the pairs, head 1 12.5 %" in notes
    assert "see nothing" not in said(report)
    lone[:] = np.arange(64)[:, None] != 5  # query 5 sees nothing in either
    report = check(masks.mask_from(lone), 64, block_size=16)
    assert "1 query sees nothing in any head (5)" in said(report)
    assert "another head" not in " ".join(report.notes)


def test_bad_arguments():
    with pytest.raises(ValueError, match="layers is 0"):
        check(CAUSAL, 64, 0)
    with pytest.raises(ValueError, match="causal is 1: give True or False"):
        check(CAUSAL, 64, causal=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differs from layer to layer: give layers="):
        check(masks.layers(BUTTERFLY, CAUSAL), 1024)


def test_a_mask_counts_by_what_it_allows_and_not_by_its_name():
    def clears_a_bit(q, k):
        i, j = q // 128, k // 128
        return (i == j) | ((i ^ j) & ((i ^ j) - 1) == 0)

    same = check(masks.where(clears_a_bit) & CAUSAL, 128 * 64, 12, True)
    assert same.problems == check(BUTTERFLY & CAUSAL, 128 * 64, 12, True).problems


def test_a_canvas_in_another_order():
    image = masks.neighborhood((64, 64), 13)
    notes = " ".join(check(image, 4096, block_size=64).notes)
    found = re.findall(r"mask >> (masks\.hilbert\(\(64, 64\)\)) computes (\d+\.\d+) %", notes)
    better = (image >> eval(found[0][0])).stats(4096, block_size=64)
    assert float(found[0][1]) == pytest.approx(100 * better.flop_density, rel=0.01)
    assert "mask >>" not in " ".join(check(image >> masks.hilbert((64, 64)), 4096).notes)
    with_class_token = masks.neighborhood((30, 45), 7) >> masks.shift(1) | masks.global_tokens(1)
    report = check(with_class_token, 30 * 45 + 1)  # the canvas is a part of the tokens
    assert report.ok and "waste" in report.notes[0] and "mask >>" not in report.notes[0]


def test_a_report_says_that_batch_entries_are_not_separated():
    """The second entry sees nothing, which the first one hides."""
    array = np.ones((2, 1, 64, 64), bool)
    array[1] = False
    assert (
        "The 2 batch entries have masks of their own" in check(masks.mask_from(array), 64).notes[0]
    )
    assert not any("batch" in note for note in check(masks.mask_from(array[:1]), 64).notes)
    stacked = masks.layers(masks.local(3), masks.mask_from(array))
    assert "The 2 batch entries have masks of their own" in check(stacked, 64, 2).notes[0]


def test_a_mask_that_computes_every_block_is_a_problem_with_a_remedy():
    """Smaller blocks compute what is said of them; else the tokens are to be reordered."""
    columns = masks.local(300) | masks.keys_at(range(50, 4096, 128))
    words = r"Every block .*?no faster than .*?Blocks of 32 x 32 compute ([\d.]+) %"
    share = re.findall(words, said(check(columns, 4096, 2)))[0]
    better = columns.stats(4096, block_size=32)
    assert better.flop_density == pytest.approx(float(share) / 100, abs=5e-4)
    stripes = masks.where(lambda q, k: (k % 7 == 0) | (abs(q - k) < 64))
    assert "Reorder the tokens" in said(check(stripes, 4096, 2))


def test_a_mask_that_computes_every_block_and_allows_most_pairs():
    report = check(masks.local(100), 128)
    assert report.ok and "Every block is computed" in report.notes[0]
    for dense in (masks.dense(), CAUSAL, masks.documents((128,))):
        assert "Every block" not in str(check(dense, 128))
