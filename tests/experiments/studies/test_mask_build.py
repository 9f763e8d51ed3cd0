"""The study of making masks: its builders, formulas and refusals."""

import numpy as np
import pytest
import torch

import masks
from experiments.common.rows import OK, frame
from experiments.studies import mask_builders
from experiments.studies.mask_build import tables
from masks.registry import PATTERNS

SMALL = ("mask=['local:256']", "lengths=[1024,2048]")


def test_builders_find_equally_many_blocks(measured):
    rows = measured("mask_build", *SMALL, "builders=[masks,where,flex,schedule]")
    assert {row.status for row in rows} == {OK} and len(rows) == 8
    for row in rows:
        blocks = masks.local(256).build(row.seq_len)
        assert (row.nnz, row.density) == (blocks.nnz, pytest.approx(blocks.density, 1e-5))
        assert 0 < row.ms_p20 <= row.ms_median <= row.ms_p80
        assert row.builder not in ("masks", "where") or row.peak_mib < 150  # without torch
    assert [row.version for row in rows[:4]] == [None, None, "", None]
    assert "| `local:256` | 1024 | 128 |" in tables(frame(rows))["builders"]


def test_what_cannot_be_measured_says_why(measured):
    rows = measured("mask_build", *SMALL, "builders=[flex]", "limit_gib=0.01")
    assert rows[0].status == "unsupported: about 0 GiB for all pairs"
    rows = measured("mask_build", *SMALL, "builders=[masks]", "block=64", "limit_s=0.01")
    assert [row.status for row in rows[-2:]] == [
        "unsupported: more than 0.01 s",
        "unsupported: more than 0.01 s for fewer tokens",
    ]
    rows = measured("mask_build", "mask=['local:64']", "lengths=[1024]", "builders=[where]")
    assert rows[-1].status.startswith("unsupported: no formula for local:64")
    assert "no formula" in tables(frame(rows))["not_measured"]


def test_a_mask_that_cannot_be_made_is_refused_first(study):
    with pytest.raises(ValueError, match="no square image"):
        study("mask_build", "mask=[neighborhood]", "lengths=[1000]").go()


@pytest.mark.parametrize("name", [*mask_builders.FORMULAS, "documents & causal", "neighborhood"])
def test_formulas(name):
    """The same of arrays, of tensors, and of masks.where."""
    n = 400
    q, k = np.arange(n)[:, None], np.arange(n)[None, :]
    allowed = mask_builders.formula(name, n, np.asarray, np.clip)(q, k)
    rule = mask_builders.formula(name, n, torch.tensor, torch.clamp)
    assert np.array_equal(rule(torch.tensor(q), torch.tensor(k)).numpy(), allowed)
    for mask in (
        mask_builders.make(name, n),
        masks.where(mask_builders.formula(name, n, masks.table, np.clip)),
    ):
        assert np.array_equal(mask.build(n).to_dense()[0, 0], allowed)


def test_the_gallery_has_every_name_at_sizes_of_use():
    names = [*mask_builders.GALLERY, *mask_builders.SIZED]
    assert all(isinstance(mask_builders.make(name, 16384), masks.Mask) for name in names)
    told = " ".join(names)
    missing = {name for name in PATTERNS if f"{name}(" not in told and name not in names}
    assert missing == {"where", "layers", "global", "random", "etc", "natten"}  # or by a synonym
