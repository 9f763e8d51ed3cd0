"""What the pages and the reference need: links that lead somewhere, and docstrings."""

import gzip
import inspect
import json
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^([a-z]+, )*[a-z_]+: .*\n {4}|^[qkv]: ", re.MULTILINE)
PACKAGES = [
    line.split()[1].removesuffix(".*")
    for page in (ROOT / "docs" / "api").glob("*.md")
    for line in page.read_text().splitlines()
    if line.startswith(":::")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_text_for_every_public_name(package: str):
    module = import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        members = vars(value).items() if inspect.isclass(value) else ()
        public = {f"{name}.{key}": each for key, each in members if key[0] != "_"}
        for path, each in {name: value, **public}.items():
            if callable(each) or isinstance(each, property | classmethod | staticmethod):
                text = inspect.getdoc(each)
                assert text, f"{package}.{path} has no docstring"
                assert not ENTRY.search(text), f"{package}.{path}: list arguments below Args:"


def test_the_changelog_and_the_citation_name_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## ([\d.]+)", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert first and first[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


# ---- published rows

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
