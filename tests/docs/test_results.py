"""Published rows say where they come from, and name nothing of one machine."""

import gzip
import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LOCAL = re.compile(r"\b[A-Za-z_]\w*\"?[=:]\"?/\w[^\s\",]*")


def text(path: Path) -> str:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return file.read()


def test_published_rows_hold_no_absolute_path():
    """A command in a row runs on another machine too."""
    for path in [p for p in RESULTS.rglob("*") if re.search(r"\.(csv|jsonl)(\.gz)?$", p.name)]:
        assert not LOCAL.findall(text(path)), path


def test_published_rows_name_their_commit():
    for path in [p for p in RESULTS.rglob("*") if re.search(r"\.jsonl(\.gz)?$", p.name)]:
        rows = [json.loads(line) for line in text(path).splitlines()]
        for row in [row for row in rows if "source" in row and "device" in row]:
            assert row["commit"] and row["date"], path
