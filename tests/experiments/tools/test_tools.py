"""Pages and the gallery."""

from pathlib import Path

import numpy as np
import pytest

from experiments.tools import gallery, pages
from experiments.tools.pages import columns, lines

TABLE = "| a | b | c |\n| --- | ---: | --- |\n| x | 1 | p\\|q |\n| y | 2 | r |"


def test_columns_and_lines_choose_parts_of_a_table():
    assert columns(TABLE, "c", mean="b").splitlines()[::2] == ["| c | mean |", "| p\\|q | 1 |"]
    assert lines(TABLE, "^. y").splitlines()[2:] == ["| y | 2 | r |"]
    with pytest.raises(ValueError, match="d"):
        columns(TABLE, "d")


def test_a_table_replaces_a_table_alone(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "none")
    monkeypatch.setattr(pages, "TEMPLATES", tmp_path / "none")
    head = '<!-- {{ "| new |" }} -->\n\n'
    for old, wanted in {
        "| old |\n| 1 |\n\nText.\n": "| new |\n\nText.\n",
        "Text.\nMore.\n": "| new |\n\nText.\nMore.\n",
    }.items():
        page.write_text(head + old)
        assert pages.pages()[page] == head + wanted


EXAMPLES = [example for examples in gallery.sections().values() for example in examples]
DOCS = Path(__file__).parents[3] / "docs"


def test_writes_page_and_pictures(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    page, *pictures, overview = gallery.write(tmp_path)
    assert len(pictures) == len(set(pictures)) == len(EXAMPLES)
    assert page.read_text() == (DOCS / "gallery.md").read_text()  # write it again when masks change
    assert overview == tmp_path / "figures/masks.png"
    causal = np.asarray(image.open(tmp_path / "figures/gallery/causal.png").convert("RGB"))
    assert causal.shape == (256, 256, 3)
    background = causal[0, -1]
    assert np.array_equal((causal != background).any(2), np.tri(256, dtype=bool))
