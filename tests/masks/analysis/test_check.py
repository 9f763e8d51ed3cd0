"""Wrong masks, and what is said of them; right ones, of which nothing is said."""

import re

import numpy as np
import pytest

import masks
from masks import Mask
from masks.analysis.check import Report, check

BUTTERFLY = masks.butterfly(128)
CAUSAL = masks.causal()


def said(report: Report) -> str:
    return " ".join(report.problems)


@pytest.mark.parametrize(
    ("mask", "layers"),
    [
        (masks.dense(), 1),
        (CAUSAL, 1),
        (masks.local(256) | BUTTERFLY | masks.global_tokens(64), 2),
        ((masks.local(256) | BUTTERFLY) & CAUSAL, 6),
        (masks.heads(masks.local(16), BUTTERFLY), 6),
        (masks.layers(masks.local(64), BUTTERFLY), 8),
    ],
    ids=str,
)
def test_nothing_is_wrong(mask: Mask, layers: int):
    report = check(mask, 4096, layers)
    assert report.ok and not report.problems, str(report)
    assert "no problem" in str(report)
    assert f"seen after {report.reach.depth[6:]}" in " ".join(report.notes)


def test_causal_butterfly():
    report = check(BUTTERFLY & CAUSAL, 128 * 256, layers=12, causal=True)
    assert len(report.problems) == 1 and not report.ok
    text = said(report)
    assert "a query can see at most 19.9 % of the keys before it, at any depth" in text
    assert "like a causal butterfly, a layer only clears bits of the block number" in text
    assert "queries 30720-30847 never see keys 128-2047" in text
    assert "Add local(128, 0): everything is then seen after 13 layers" in text
    assert check((BUTTERFLY & CAUSAL) | masks.local(128, 0), 128 * 256, 13, True).ok


def test_every_named_depth_is_true():
    """What a remedy promises holds when it is taken."""
    wrong = [BUTTERFLY & CAUSAL, masks.local(16), masks.butterfly(128, 2), masks.sliding(64)]
    for mask in wrong:
        text = said(check(mask, 2048, layers=4))
        remedy, depth = re.findall(r"Add (.+?): everything is then seen after (\d+) layer", text)[0]
        better = mask | masks.parse(remedy)
        found = better.build(2048).reach(causal=better.build(2048).stats().causal, exact=True)
        assert found.at_least == int(depth), (mask, remedy)


def test_not_enough_layers():
    text = said(check((BUTTERFLY | masks.local(128)) & CAUSAL, 4096, layers=4))
    assert re.search(
        r"^4 layers are not enough: a query has seen [\d.]+ % of the keys before", text
    )
    assert "all of it is seen after 7 layers" in text
    text = said(check(masks.sliding(4096), 65536, layers=12))
    assert "at most 93.8 %" in text and "after 16 to 17 layers" in text
    assert said(check(masks.local(1), 256, 1, block_size=16)).startswith("1 layer is not enough")


def test_looks_ahead():
    mask = BUTTERFLY | masks.local(128) & CAUSAL  # binds as butterfly | (local & causal)
    report = check(mask, 1024, causal=True)
    ahead = np.triu(mask.build(1024).to_dense()[0, 0], 1).sum()
    assert f"{ahead} allowed pairs have k > q, by up to 639 tokens" in said(report)
    assert f"Take {mask & CAUSAL}." in said(report)
    leaky, causal = (m.build(4096).reach(causal=True, exact=True) for m in (mask, mask & CAUSAL))
    report = check(mask, 4096, causal=True)
    assert report.reach.upper == causal.upper != leaky.upper  # what looks ahead is no help
    note = " ".join(check(mask, 1024).notes)
    assert "The part local(128) & causal() is causal, yet the mask allows keys after" in note
    past = masks.where(lambda q, k: k <= q)  # the same by another name
    note = " ".join(check(BUTTERFLY | masks.local(128) & past, 1024).notes)
    assert "is causal, yet the mask allows keys after the query" in note
    for other in (mask & CAUSAL, BUTTERFLY | masks.local(128, 0), BUTTERFLY | masks.local(128)):
        assert "yet the mask" not in " ".join(check(other, 1024).notes)


def test_queries_and_keys_without_each_other():
    text = said(check(CAUSAL - masks.local(10), 512))
    assert "11 queries see nothing (0-10): attention gives them 0" in text
    assert "11 keys are seen by no query (501-511)" in text
    one = np.ones((64, 64), bool)
    one[5], one[:, 7] = False, False
    text = said(check(masks.mask_from(one), 64, block_size=16))
    assert "1 query sees nothing (5): attention gives it 0" in text
    assert "1 key is seen by no query (7)" in text


def test_nothing_allowed():
    report = check(masks.local(0) - masks.dense(), 256, 4)
    assert report.problems == ("Nothing is allowed at 256 tokens: every output is 0.",)


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (lambda q, k: (q - k) % 4 == 0, r"4 groups .* token i is in group i mod 4\."),
        (lambda q, k: q // 64 == k // 64, r"4 groups .* each is a stretch of 64 neighbours\."),
        (lambda q, k: q == k, r"256 groups .*: every token is alone\."),
        (lambda q, k: (q < 100) == (k < 100), r"2 groups .* the tokens 0-99, 100-255\."),
        (lambda q, k: (q % 8 > 0) & (k % 8 > 0) | (q == k), r"33 groups .* 32 tokens are alone"),
    ],
)
def test_groups(allowed, words: str):
    q, k = np.arange(256)[:, None], np.arange(256)
    report = check(masks.mask_from(allowed(q, k)), 256, block_size=64)
    assert len(report.problems) == 1 and re.search(words, said(report)), said(report)
    assert "never see each other, at any depth" in said(report)
    assert "everything is then seen after" in said(report)


def test_layers_join_what_one_keeps_apart():
    apart = masks.butterfly(64, levels=0)
    assert "16 groups" in said(check(apart, 1024, 4))
    assert check(masks.layers(apart, masks.butterfly(64)), 1024, 8).ok
    with pytest.raises(ValueError, match="differs from layer to layer: give layers="):
        check(masks.layers(apart, masks.dense()), 1024)
    holes = masks.layers(masks.dense(), CAUSAL - masks.local(0))
    assert "Layer 1: 1 query sees nothing (0)" in said(check(holes, 64, 4, False, block_size=16))


def test_waste_and_smaller_blocks():
    notes = " ".join(check(masks.local(16), 2048, 64).notes)
    assert re.search(r"only [\d.]+ % are allowed \(waste 1[12][\d.]*, blocks of 128 x 128\)", notes)
    assert "Blocks of 32 x 32 would waste 2.89" in notes
    assert not any("waste" in note for note in check(masks.local(16), 2048, block_size=16).notes)


def test_imbalance():
    notes = check(masks.global_tokens(64), 4096).notes
    assert "The busiest query block has 32 non-empty blocks, 16.3 times the mean" in notes[0]
    assert "key block" in notes[1]


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


def test_a_causal_mask_that_should_not_be():
    assert "can see only 50.1 % of the keys, at any depth" in said(check(CAUSAL, 512, causal=False))
    assert check(CAUSAL, 512).ok and check(CAUSAL, 512, causal=True).ok


def test_long_sequences_are_bounded():
    report = check(masks.local(256) | BUTTERFLY | masks.global_tokens(64), 1 << 17, layers=12)
    assert report.ok and not report.reach.exact
    assert "(bounds by blocks)" in " ".join(report.notes)
    open_end = check(masks.local(256) | BUTTERFLY | masks.global_tokens(64), 1 << 17, layers=3)
    assert "is open: by blocks, everything is seen after 2 to" in " ".join(open_end.notes)


def test_bad_arguments():
    with pytest.raises(ValueError, match="layers is 0"):
        check(CAUSAL, 64, 0)
    with pytest.raises(ValueError, match="causal is 1: give True or False"):
        check(CAUSAL, 64, causal=1)  # type: ignore[arg-type]


def test_groups_of_tokens_bound_what_is_seen_where_blocks_do_not():
    report = masks.dilated(512, 4).check(8192, layers=6)
    assert "sees at most 25 % of the keys." in report.problems[0]
    report = (masks.dilated(512, 4) & masks.causal()).check(8192, causal=True)
    assert "sees at most 25 % of the keys before it." in report.problems[0]


def test_a_mask_counts_by_what_it_allows_and_not_by_its_name():
    def clears_a_bit(q, k):
        i, j = q // 128, k // 128
        return (i == j) | ((i ^ j) & ((i ^ j) - 1) == 0)

    def butterfly_of_documents(q, k):
        return (q - k) % 128 == 0

    blocks = 128 * 64
    same = check(masks.where(clears_a_bit) & CAUSAL, blocks, 12, True)
    assert same.problems == check(BUTTERFLY & CAUSAL, blocks, 12, True).problems
    assert "only clears bits" in said(same)
    other = check(masks.where(butterfly_of_documents) & CAUSAL, blocks, 12, True)
    assert "128 groups" in said(other) and "clears bits" not in said(other)
    wide = masks.local(0) | masks.keys_at(range(0, blocks, 512))
    assert "no path leads there" in said(check(wide & CAUSAL, blocks, 12, True))
    finer = check(masks.butterfly(256) & CAUSAL, blocks, 12, True)
    assert "only clears bits" in said(finer)  # of larger blocks than those of the mask


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents((200, 312)),
        masks.documents((200, 312)) & masks.local(30),
        masks.documents((200, 312)) & CAUSAL | masks.local(0),
        masks.heads(masks.documents((200, 312)), masks.documents((200, 312)) & CAUSAL),
        masks.local(64) >> masks.packed((200, 312)),
        masks.block_diagonal(256),
    ],
    ids=str,
)
def test_documents_are_kept_apart_on_purpose(mask: Mask):
    report = check(mask, 512, 512)
    assert report.ok
    words = r"fall into 2 groups .* what (.* >> )?(documents|packed|block_diagonal)\(.* is for\.$"
    assert any(re.search(words, note) for note in report.notes), report.notes


def test_what_documents_alone_do_not_keep_apart_is_a_problem():
    docs = masks.documents((200, 312))
    array = masks.mask_from(docs.build(512).to_dense())
    for mask in (array, docs & masks.local(0), docs & masks.dilated(512, 2), docs & array):
        report = check(mask, 512, 8)
        ok = mask == docs & array  # the documents explain all of it
        assert report.ok == ok, str(report)


def test_a_canvas_in_another_order():
    image = masks.neighborhood((64, 64), 13)
    notes = " ".join(check(image, 4096, block_size=64).notes)
    found = re.findall(r"reordered with >> (hilbert\(\(64, 64\)\)) would waste (\d+\.\d+)", notes)
    better = (image >> masks.hilbert((64, 64))).stats(4096, block_size=64)
    assert float(found[0][1]) == pytest.approx(better.waste, rel=0.01)
    assert "canvas" not in " ".join(check(image >> masks.hilbert((64, 64)), 4096).notes)
