"""The gallery shows what is registered, and its counts are those of the masks."""

import re
from pathlib import Path

import numpy as np
import pytest

from experiments.common.figures import RC
from experiments.tools import gallery

EXAMPLES = [example for examples in gallery.sections().values() for example in examples]
DOCS = Path(__file__).parents[3] / "docs"


def test_writes_page_and_pictures(tmp_path: Path, coarse_figures, monkeypatch):
    monkeypatch.setitem(RC, "savefig.dpi", coarse_figures)  # sizes of files are looked at
    image = pytest.importorskip("PIL.Image")
    page, *pictures, overview = gallery.write(tmp_path)
    assert len(pictures) == len(set(pictures)) == len(EXAMPLES)
    assert page.read_text() == (DOCS / "gallery.md").read_text()  # write it again when masks change
    assert all(path.stat().st_size < 15_000 for path in pictures)
    assert overview == tmp_path / "figures/masks.png" and overview.stat().st_size > 20_000
    causal = np.asarray(image.open(tmp_path / "figures/gallery/causal.png").convert("RGB"))
    assert causal.shape == (256, 256, 3)
    background = causal[0, -1]
    assert np.array_equal((causal != background).any(2), np.tri(256, dtype=bool))


def test_the_overview_shows_different_patterns():
    kinds = {re.sub(r"[^a-z_]+", " ", text) for text in gallery.OVERVIEW}
    assert len(kinds) == len(gallery.OVERVIEW) >= 7


def test_options_and_other_folders_are_refused(tmp_path, run_program, monkeypatch):
    for words, where, error in (
        (["out=x"], DOCS.parent, "error: out=x: there are no options"),
        ([], tmp_path, "error: no folder docs here"),
    ):
        monkeypatch.chdir(where)
        assert run_program("tools.gallery", *words)[0].startswith(error)
