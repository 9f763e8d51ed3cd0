"""The program that times masks of packed documents."""

import pytest
import torch

from experiments.papers import packed_masks

SIZES = {"documents": 3, "batch": 1, "heads": 1, "head_dim": 16}


def rows():
    return packed_masks.rows(200, SIZES, "float32", torch.device("cpu"), 0.01, "a command")


def test_rows(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    attention, *masks = rows()
    assert attention.share is None and len(masks) == 4
    assert attention.ms_median
    assert all(row.share == (row.ms_median or 0) / attention.ms_median > 0 for row in masks)


def test_other_blocks_are_not_timed(monkeypatch):
    monkeypatch.setattr(packed_masks, "flex_blocks", lambda mask: 7)
    with pytest.raises(ValueError, match="blocks here, 7 of create_block_mask"):
        rows()
