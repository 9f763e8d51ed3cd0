"""Commands in code blocks of the pages: Hydra can read their options."""

import re
import shlex
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_hydra_reads_the_options_of_every_command():
    parser, count = OverridesParser.create(), 0
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.search(r"-m experiments\.\S+ (.*)", line)
                words = shlex.split(command[1], comments=True) if command else []
                options = [word for word in words if re.match(r"[+~]{0,2}[\w.]+=", word)]
                parser.parse_overrides(options)
                count += len(options)
    assert count > 100
