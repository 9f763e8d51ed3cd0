"""Every code block of the guide runs, in order, in one namespace."""

import re
from pathlib import Path

import pytest

from masks.spec import PATTERNS

GUIDE = Path(__file__).parents[2] / "docs" / "masks.md"


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("masks.spec.PATTERNS", dict(PATTERNS))  # the guide adds one
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), namespace)
