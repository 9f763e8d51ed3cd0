"""Packed masks: their rows, and that both ways make the same mask."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from experiments.bench.step import Times
from experiments.common.rows import frame
from experiments.studies import packed_masks
from experiments.studies.packed_masks import ATTENTION, KINDS, tables
from sparseflash.schedule.blocks import Schedule
from tests.experiments.studies.conftest import ok

SMALL = ["lengths=[256]", "heads=1", "head_dim=16", "documents=5"]


def test_rows_of_every_kind(measured):
    rows = measured("packed_masks", *SMALL, "compiled=[]")
    assert [row["mask"] for row in rows[::3]] == [kind.text for kind in KINDS.values()]
    assert ok(rows) and all(0 < row.density <= 1 for row in rows)
    table = tables(frame(rows))["packed"]
    assert table.count("\n") == 1 + len(KINDS)
    share = f"{100 * rows[1].ms_median / rows[0].ms_median:.1f}"
    assert f"| 256 | `documents & causal` | {rows[0].ms_median:.2f} |" in table and share in table


def test_attention_goes_backward_and_masks_are_planned_and_compiled(study, one, monkeypatch):
    results = []

    def measure(call, device, seconds):
        results.append(call())
        return Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(packed_masks, "measure", measure)
    monkeypatch.setattr(torch, "compile", lambda make: lambda given: ("compiled", make(given)))
    run = study("packed_masks", *SMALL, "kinds=[documents]")
    found = one(run, run.study.cases(run)[0])
    gradients, ours, compiled, theirs, _ = results
    assert len(gradients) == 3 and isinstance(ours, Schedule) and isinstance(theirs, BlockMask)
    assert [type(r) is tuple and r[0] == "compiled" for r in results[1:]] == [False, True] * 2
    assert isinstance(compiled[1], Schedule) and found[0].step == ATTENTION
    assert tables(frame(found))["packed"].count("100.0") >= 2
    monkeypatch.setattr(packed_masks, "flex_blocks", lambda mask: 7)
    refused = one(run, run.study.cases(run)[0])
    assert all("7 of create_block_mask: they must agree" in row.status for row in refused)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_make_the_same_mask(kind):
    """Pair by pair, for some lengths and numbers of documents."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        n, documents = 2 * int(rng.integers(64, 900)), int(rng.integers(1, 30))
        given = torch.tensor(KINDS[kind].given(n, documents, rng), dtype=torch.int32)
        token = torch.arange(n)
        none = torch.zeros(1, dtype=torch.int32)
        seen = KINDS[kind].theirs(given, n)(none, none, token[:, None], token)
        found = KINDS[kind].ours(given, n).to_block_mask().to_dense()[0, 0]
        assert np.array_equal(found, seen.numpy())


def test_refusals(study):
    for words, message in (
        ("kinds=[trees]", "did you mean tree"),
        ("lengths=[129]", "even numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            study("packed_masks", words).go()
