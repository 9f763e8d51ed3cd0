"""Published rows of the Long Range Arena: the table follows from them, and masks are named."""

import gzip
import json

import pytest

import masks
from experiments.common.provenance import CHANGES, ROOT, git, trace
from experiments.common.records import read
from experiments.lra.models.attention.flash import default_mask
from experiments.lra.run_files import read_runs
from experiments.lra.speed.rows import StepRow
from experiments.lra.table import Table, as_csv, as_markdown
from experiments.lra.training.result import SOURCES
from experiments.pathfinder.studies import shortcuts
from experiments.pathfinder.studies.rows import ShortcutRow

RESULTS = ROOT / "docs" / "results" / "lra"
NAMES = ("source", "commit")
ARCHIVES = sorted(RESULTS.rglob("*.jsonl.gz"))


def test_the_table_follows_from_the_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    steps = read("docs/results/lra/speed.csv", StepRow)
    table = Table(read_runs("docs/results/lra/runs"), steps)
    assert as_csv(table) == (RESULTS / "table.csv").read_text()
    assert as_markdown(table) == (RESULTS / "table.md").read_text()


def test_the_table_of_shortcuts_follows_from_the_rows():
    made = shortcuts.table(read(RESULTS / "shortcuts.csv", ShortcutRow)).strip().splitlines()
    assert (
        len(made) == 2 + 12
        and "\n".join(made[2:]) in (RESULTS.parent / "pathfinder.md").read_text()
    )


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_archived_runs_are_marked_as_untraced_where_they_are(path):
    packed = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    for line, run in zip(packed, read_runs(str(path)), strict=True):
        assert line["untraced"] == (not run.traced)
        assert run.versions["commit"].endswith(CHANGES) or run.traced


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_the_code_of_archived_runs_is_that_of_a_commit(path):
    try:
        shallow = git("rev-parse", "--is-shallow-repository").strip()
    except ValueError:
        pytest.skip("no git history here: this is not a clone")
    if shallow == "true":
        pytest.skip("the history is shallow: git fetch --unshallow")
    found = {(run.traced, *map(run.result["versions"].get, NAMES)) for run in read_runs(str(path))}
    for traced, source, commit in found:
        if traced:
            assert trace(source, SOURCES, commit) == commit
        else:  # their kernels are
            assert trace(source, ("masks", "sparseflash")) is not None


def test_block_sparse_runs_have_their_mask_and_its_density():
    runs = [run for path in ARCHIVES for run in read_runs(str(path)) if run.attention == "sparse"]
    assert len(runs) == 27 and sum(run.reconstructed for run in runs) == 3
    for run in runs:
        assert run.length and run.density
        n = run.length + (run.config["recipe"] == "google")  # a class token
        resolved = masks.parse(run.resolved_mask)
        assert run.reconstructed <= (not run.mask)
        assert resolved.key == (masks.parse(run.mask) if run.mask else default_mask(n)).key
        assert run.density == pytest.approx(100 * resolved.build(n).density, rel=1e-4)
