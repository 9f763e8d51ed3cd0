"""The support matrix and the changelog agree with the rows, the kernels and the version."""

import csv
import gzip
import re
import tomllib

from experiments.bench.compile_matrix.rows import CompileRow
from experiments.common.provenance import ROOT
from experiments.common.records import read
from sparseflash.kernels.versions import TESTED, release

RESULTS = ROOT / "docs" / "results"
PAGE = (ROOT / "docs" / "support.md").read_text()
COMPILED = read(RESULTS / "cpu" / "compile_matrix.csv.gz", CompileRow)


def measured(column: str) -> set[str]:
    """What the rows of a GPU name in a column."""
    found = set()
    for path in [*RESULTS.glob("h200/*.csv"), *RESULTS.glob("h200/*.csv.gz")]:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row.get("device", "") == "NVIDIA H200"]
            found |= {row[column] for row in rows if row.get(column)}
    return {each.partition("+")[0] for each in found}


def state(of: str) -> str:
    (line,) = re.findall(rf"^\| {re.escape(of)} \| (.*) \|$", PAGE, re.MULTILINE)
    return line.split(" | ")[0]


def test_every_compiled_gpu_and_no_other_is_listed():
    listed = re.findall(r"\b(?:sm_\d+a?|gfx\d+)\b", PAGE)
    assert set(listed) == {row.target for row in COMPILED}


def test_versions_are_those_of_the_rows_and_of_the_kernels():
    listed = re.findall(r"^\| Triton ([\d.]+) \|", PAGE, re.MULTILINE)
    assert set(listed) == {row.triton for row in COMPILED}
    assert {release(version) for version in listed} == set(TESTED)
    for name, versions in {"Triton": listed, "torch": re.findall(r"\| torch (\S+) ", PAGE)}.items():
        claimed = {each for each in versions if "measured" in state(f"{name} {each}")}
        assert claimed == measured(name.lower())


def test_the_changelog_begins_with_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## ([\d.]+)", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert first and first[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
