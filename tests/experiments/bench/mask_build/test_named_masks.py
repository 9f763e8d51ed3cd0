"""Masks by name, and their formulas."""

import numpy as np
import pytest
import torch

import masks
from experiments.bench.mask_build import named_masks
from masks.registry import PATTERNS, TRANSFORMS


def test_documents():
    lengths = named_masks.documents(1 << 20)
    assert sum(lengths) == 1 << 20 and min(lengths) > 0
    assert np.mean(lengths) == pytest.approx(2000, rel=0.1)
    assert named_masks.documents(1) == [1]


@pytest.mark.parametrize("name", [*named_masks.FORMULAS, *named_masks.NAMED])
def test_formulas(name: str):
    """The same of arrays, of tensors, and of masks.where."""
    n = 400
    q, k = np.arange(n)[:, None], np.arange(n)[None, :]
    allowed = named_masks.formula(name, n, np.asarray, np.clip)(q, k)
    rule = named_masks.formula(name, n, torch.tensor, torch.clamp)
    assert np.array_equal(rule(torch.tensor(q), torch.tensor(k)).numpy(), allowed)
    for mask in (
        named_masks.make(name, n),
        masks.where(named_masks.formula(name, n, masks.table, np.clip)),
    ):
        assert np.array_equal(mask.build(n).to_dense()[0, 0], allowed)


def test_every_name_of_the_gallery_is_measured():
    """`layers` returns one of its parts, so there is nothing to measure."""
    measured = " ".join([*named_masks.GALLERY, *named_masks.OF_LENGTH])
    entries = [entry.function for entry in (PATTERNS | TRANSFORMS).values() if entry.examples]
    names = {f.__name__ for f in entries if f.__module__.startswith("masks.")}
    assert {name for name in names if name not in measured} == {"layers"}


def test_cells_are_the_formula_of_their_mesh():
    cells, formula = (named_masks.make(name, 1024) for name in ("cells", "where: mesh"))
    assert cells.build(1024) == formula.build(1024)
