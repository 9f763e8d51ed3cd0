"""Published rows come from commits of the history, or say that they cannot be traced."""

import gzip
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from experiments.common.provenance import ROOT, UNTRACED, git, trace
from experiments.common.records import Row, columns, read

RESULTS = ROOT / "docs" / "results"


def kinds() -> Iterator[type[Row]]:
    """Every kind of row: they are defined in files named rows.py or *_rows.py."""
    for path in (ROOT / "experiments").rglob("*rows.py"):
        names = vars(import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))
        yield from (k for k in names.values() if isinstance(k, type) and issubclass(k, Row))


KINDS = {columns(kind): kind for kind in kinds()}


def kind_of(names: tuple[str, ...]) -> type[Row]:
    """The kind of row with these columns; a file of before the newest, `calls`, has one less."""
    return KINDS.get(names) or next(
        kind for known, kind in KINDS.items() if names == tuple(x for x in known if x != "calls")
    )


def files() -> list[Path]:
    """The CSV files that hold measurements; tables that are derived from them name no source."""
    found = sorted([*RESULTS.rglob("*.csv"), *RESULTS.rglob("*.csv.gz")])
    return [path for path in found if {"source", "commit"} <= set(head(path))]


def head(path: Path) -> tuple[str, ...]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return tuple(file.readline().strip().split(","))


@pytest.fixture(scope="module", autouse=True)
def history():
    """Skips where the history is not there: a tarball, or a shallow clone."""
    try:
        shallow = git("rev-parse", "--is-shallow-repository").strip()
    except ValueError:
        pytest.skip("no git history here: this is not a clone")
    if shallow == "true":
        pytest.skip("the history is shallow: git fetch --unshallow")


def test_there_are_measurements():
    assert len(files()) >= 8 and all(map(kind_of, map(head, files())))


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_every_row_names_the_commit_it_was_measured_at(path: Path):
    kind = kind_of(head(path))
    for source, commit in {(row.source, row.commit) for row in read(path, kind)}:
        if commit != UNTRACED:
            found = trace(source, kind.SOURCES, commit)
            assert found is not None, f"no commit of the history has the source digest {source}"
            assert found.startswith(commit), f"{source} is the source of {found[:12]}, not {commit}"


def rows_of_text() -> list[Path]:
    kinds = ("*.csv", "*.csv.gz", "*.jsonl", "*.jsonl.gz")
    return sorted(path for kind in kinds for path in RESULTS.rglob(kind))


@pytest.mark.parametrize(
    "path", rows_of_text(), ids=lambda path: path.relative_to(RESULTS).as_posix()
)
def test_no_row_names_a_folder_of_one_machine(path: Path):
    """Its command is one that another machine can run: all paths are relative."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        found = re.findall(r"\b[A-Za-z_]\w*\"?[=:]\"?/\w[^\s\",]*", file.read())
    assert not found, sorted(set(found))[:5]
