"""The program that times packed masks: its rows, and that both ways make the same mask."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from experiments.bench.timing import Times
from experiments.common.records import read
from experiments.papers import packed_masks
from experiments.papers.packed_kinds import KINDS
from experiments.papers.rows import PackedRow
from sparseflash.schedule import Schedule

SIZES = {"documents": 3, "batch": 1, "heads": 1, "head_dim": 16}
CPU = torch.device("cpu")


def rows(kind="documents", compiled=True):
    return packed_masks.rows(kind, 200, SIZES, "float32", CPU, 0.01, "a command", compiled)


def test_rows(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    attention, *masks = rows()
    assert attention.share is None and len(masks) == 4
    assert attention.ms_median
    assert all(row.share == (row.ms_median or 0) / attention.ms_median > 0 for row in masks)


def test_attention_goes_backward_and_masks_are_planned_and_compiled(monkeypatch):
    results = []

    def measure(call, device, seconds):
        results.append(call())
        return Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(packed_masks, "measure", measure)
    monkeypatch.setattr(torch, "compile", lambda make: lambda given: ("compiled", make(given)))
    found = rows()
    gradients, ours, compiled, theirs, _ = results
    assert len(gradients) == 3 and isinstance(ours, Schedule) and isinstance(theirs, BlockMask)
    assert [type(r) is tuple and r[0] == "compiled" for r in results[1:]] == [False, True] * 2
    assert isinstance(compiled[1], Schedule)
    assert {row.density for row in found} == {found[0].density} and 0 < (found[0].density or 0) < 1


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


def test_program(tmp_path, run_program):
    csv = tmp_path / "rows.csv"
    words = "seq_lens=[256] heads=1 head_dim=16 documents=5 compiled=[] device=cpu seconds=1e-3"
    status, printed, error = run_program("papers.packed_masks", *words.split(), f"csv={csv}")
    assert status == 0, error
    found = read(csv, PackedRow)
    assert [row.mask for row in found[::3]] == [kind.text for kind in KINDS.values()]
    assert all(row.step in printed for row in found)
    assert all(row.command.startswith(f"{PackedRow.COMMAND} ") for row in found)


def test_other_blocks_are_not_timed(monkeypatch):
    monkeypatch.setattr(packed_masks, "flex_blocks", lambda mask: 7)
    with pytest.raises(ValueError, match="blocks here, 7 of create_block_mask"):
        rows()
