"""The gallery has everything, and its counts are those of the masks."""

import re
from pathlib import Path

import numpy as np
import pytest

from experiments import gallery
from experiments.bench.gallery_entries import SECTIONS, Entry
from masks.spec import PATTERNS, TRANSFORMS

ENTRIES = [entry for entries in SECTIONS.values() for entry in entries]
DOCS = Path(__file__).parents[2] / "docs"
PLAIN = {"dense"}  # nothing to see


def test_every_name_is_shown():
    shown = {name for entry in ENTRIES for name in re.findall(r"\w+", entry.code)}
    registered = {f.__name__: f for f in (PATTERNS | TRANSFORMS).values()}
    ours = {name for name, f in registered.items() if f.__module__.startswith("masks.")}
    other_texts = {"documents_from_offsets", "documents_from_ids", "bigbird_compat", "lra_strided"}
    assert ours - shown - PLAIN - other_texts == set()
    assert all(gallery.exists(entry) for entry in ENTRIES)


def test_writes_page_and_pictures(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    page, *pictures = gallery.write(tmp_path)
    assert len(pictures) == len(set(pictures)) == len(ENTRIES)
    assert page.read_text() == (DOCS / "gallery.md").read_text()  # made anew when masks change
    assert all(path.stat().st_size < 15_000 for path in pictures)
    causal = np.asarray(image.open(tmp_path / "figures/gallery/causal.png").convert("RGB"))
    assert causal.shape == (256, 256, 3)
    background = causal[0, -1]
    assert np.array_equal((causal != background).any(2), np.tri(256, dtype=bool))


def test_a_wrong_count_is_noticed():
    entry = Entry("causal()", "", "N*(N - 1)/2")
    with pytest.raises(ValueError, match=r"causal\(\) allows 32896 pairs, and not"):
        gallery.verify(entry, gallery.build(entry))
    assert not gallery.exists(Entry("unheard_of(3)", ""))
