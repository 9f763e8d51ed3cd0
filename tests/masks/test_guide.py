"""Every code block of the guides runs, in order, in one namespace a guide."""

import re
from pathlib import Path

import pytest

from masks.spec import PATTERNS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("guide", "blocks"),
    [
        ("masks.md", 12),
        ("own_mask.md", 10),
        ("mask_internals.md", 1),
        ("interop.md", 6),
        ("selectors.md", 6),
    ],
)
def test_the_guide_runs(guide: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for needed in ("matplotlib", "scipy", "torch"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("masks.spec.PATTERNS", dict(PATTERNS))  # the guides add some
    text = (DOCS / guide).read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(found) >= blocks
    namespace: dict = {"__name__": guide}
    for block in found:
        exec(compile(block, guide, "exec"), namespace)
