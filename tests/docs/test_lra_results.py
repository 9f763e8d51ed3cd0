"""Published rows of the Long Range Arena: the table follows from them, and masks are named."""

import gzip
import json
import re
from itertools import product

import pytest

import masks
from experiments.common.provenance import CHANGES, ROOT, git, trace
from experiments.common.records import read
from experiments.lra.cells import Cell, make_cells
from experiments.lra.models.attention.flash import default_mask
from experiments.lra.published import ATTENTIONS, PAPER
from experiments.lra.run_files import read_runs
from experiments.lra.speed.rows import StepRow
from experiments.lra.table import Table, as_csv, as_markdown
from experiments.lra.training.result import SOURCES
from experiments.pathfinder.studies import cuts, shortcuts
from experiments.pathfinder.studies import masks as masks_study
from experiments.pathfinder.studies.rows import CutRow, ShortcutRow

RESULTS = ROOT / "docs" / "results" / "lra"
NAMES = ("source", "commit")
ARCHIVES = sorted(RESULTS.rglob("*.jsonl.gz"))


def test_the_table_follows_from_the_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    steps = read("docs/results/lra/speed.csv", StepRow)
    table = Table(read_runs("docs/results/lra/runs"), steps, whole=True)
    assert as_csv(table) == (RESULTS / "table.csv").read_text()
    assert as_markdown(table) == (RESULTS / "table.md").read_text()


def test_the_table_of_shortcuts_follows_from_the_rows():
    made = shortcuts.table(read(RESULTS / "shortcuts.csv", ShortcutRow)).strip().splitlines()
    assert (
        len(made) == 2 + 12
        and "\n".join(made[2:]) in (RESULTS.parent / "pathfinder.md").read_text()
    )


def test_the_table_of_cuts_follows_from_the_rows():
    rows = read(RESULTS / "path_x" / "cuts.csv.gz", CutRow)
    text = (RESULTS.parent / "path_x.md").read_text()
    longer = [row for row in rows if "EPYC" in row.device]
    assert cuts.table(longer).strip() in text and len(longer) == 18
    rows = [row for row in rows if row not in longer]
    kinds = list(dict.fromkeys((row.run, row.paddles) for row in rows))
    assert len(kinds) == 10
    for kind in kinds:
        run, paddles = kind
        attention = "dense" if "flash" in run else "block-sparse"
        name = "pretrained" if "rotary" in run else f"{attention}, seed {run[-1]}"
        name += ", last" if "1280k" in run else ""
        chosen = [row for row in rows if (row.run, row.paddles) == kind]
        made = cuts.table(chosen).strip().splitlines()[2:]
        assert len(made) == 3
        assert "\n".join(f"| {name} | {paddles} {line}" for line in made) in text
        whole = [row for row in chosen if row.left_out == 0]
        right = sum(row.curve_probe + row.other - row.other_probe for row in whole)
        count = {1: "one paddle", 3: "three paddles"}[paddles]
        assert f"| shortcut: {count} at each mark | {right / 100:.1f} ± " in text


def test_the_table_of_cuts_of_a_pretrained_model_follows_from_the_rows():
    rows = read(RESULTS / "pathfinder_cuts.csv.gz", CutRow)
    text = (RESULTS.parent / "pathfinder.md").read_text()
    models = {
        "flash-c14-max": "dense",
        "sparse-c14-max": "block-sparse",
        "sparse-c14": "block-sparse, mean",
    }
    assert {row.run.split("/")[-2] for row in rows} == set(models)
    for folder, name in models.items():
        chosen = [row for row in rows if row.run.split("/")[-2] == folder]
        lines = cuts.table(chosen).strip().splitlines()[2:]
        assert len(lines) == 5 and all(f"| {name} {line}\n" in text for line in lines)
        right = []
        for n, place in ((0, "the middle"), *product((4, 8), ("the middle", "the marks"))):
            of = [row for row in chosen if (row.left_out, row.place) == (n, place)]
            count = sum(row.curve + row.other for row in of)
            right.append(sum(row.curve_yes + row.other - row.other_yes for row in of) / count)
        whole, four, marks, eight, more = (f"{100 * share:.1f}" for share in right)
        assert f"| {name} | {whole} | {four} | {eight} | {marks} | {more} |\n" in text


def test_the_table_of_masks_follows_from_the_rows():
    for page, name, label, cells in (
        ("pathfinder", "path_masks", "masks", 25),
        ("path_x", "path_x_masks", "path_x_masks", 25),
    ):
        found = masks_study.points(read_runs(str(RESULTS / f"{name}.jsonl.gz")), label)
        text = (RESULTS.parent / f"{page}.md").read_text()
        assert len(found) == cells and masks_study.table(found).strip() in text


def test_figures_without_a_journal_are_those_that_were_printed():
    text = gzip.decompress((RESULTS / "printed.txt.gz").read_bytes()).decode()
    printed = dict(
        re.findall(r"^\[(.+?)\] runs/.*: (?:test accuracy|predicted tokens) ([\d.]+) %", text, re.M)
    )
    times = dict(re.findall(r"^\[(.+?)\] runs/.* ([\d.]+) ms a step$", text, re.M))
    page = {name: (RESULTS.parent / f"{name}.md").read_text() for name in ("text", "pathfinder")}
    dense, ours = (
        (printed[f"classes/{name}"], printed[f"tokens/{name}"], float(times[f"classes/{name}"]))
        for name in ("flash", "sparse")
    )
    shown = f"{dense[0]} % with dense and {ours[0]} % with block-sparse attention, with {dense[1]}"
    shown += f" and {ours[1]} % of the bytes and {dense[2]:.1f} and {ours[2]:.1f} ms a step."
    assert shown in page["text"]
    assert f"it [printed](lra/printed.txt.gz) {printed['tokens']} % too." in page["pathfinder"]


@pytest.mark.parametrize("name", ["path_x", "path_256"])
def test_stages_of_the_curricula_are_those_of_the_runs(name):
    page = (RESULTS.parent / f"{name}.md").read_text()
    runs = read_runs(str(RESULTS / name))
    assert len(runs) >= 9
    for run in runs:
        accuracy = re.escape(f"{run.accuracy + 1e-6:.1f}")  # halves go up
        assert re.search(rf"\| {run.steps:,}†? \| [\d.]+ \| (\*\*)?{accuracy}\b", page), run.place
    starts = tuple(str(run.config["init_from"]) for run in runs)
    last = [run for run in runs if not run.place.endswith(starts)]
    for run in last if name == "path_x" else ():
        if run.task == "pathfinder128" and run.config["task"]["difficulty"] == 14:
            attention = "dense" if run.attention == "flash" else "block-sparse"
            scratch = f"from scratch, seed {run.seed}"
            kind = "pretrained" if run.config["recipe"] == "rotary" else scratch
            shown = f"| {attention}, {kind} | {run.accuracy:.1f} ± "
            assert run.pretraining or shown in page


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
    found = {(run.traced, *map(run.versions.get, NAMES)) for run in read_runs(str(path))}
    for traced, source, commit in found:
        if traced:
            assert trace(source, SOURCES, commit) == commit
        else:  # their kernels are
            assert trace(source, ("masks", "sparseflash")) is not None


def test_block_sparse_runs_have_their_mask_and_its_density():
    runs = [run for path in ARCHIVES for run in read_runs(str(path)) if run.attention == "sparse"]
    assert len(runs) == 152 and sum(run.reconstructed for run in runs) == 1
    for run in runs:
        assert run.length and run.density
        n = run.length + (run.config["recipe"] == "google")  # a class token
        resolved = masks.parse(run.resolved_mask)
        assert run.reconstructed <= (not run.mask)
        assert resolved.key == (masks.parse(run.mask) if run.mask else default_mask(n)).key
        assert run.density == pytest.approx(100 * resolved.build(n).density, rel=1e-4)


# A column of the first table of a page: page, header, task, recipe, held out.
COLUMNS = (
    ("listops", "test accuracy (%)", "listops", "", 0.0),
    ("text", "test accuracy (%)", "text", "", 0.0),
    ("text", "validated on 10 % of train", "text", "", 0.1),
    ("retrieval", "test accuracy (%)", "imdb_same_movie", "", 0.0),
    ("image", "the port's recipe", "image", "", 0.0),
    ("image", "google's recipe", "image", "google", 0.0),
    ("pathfinder", "test accuracy (%)", "pathfinder32", "", 0.0),
    ("lra", "ListOps", "listops", "", 0.0),
    ("lra", "Text", "text", "", 0.0),
    ("lra", "Image", "image", "", 0.0),
    ("lra", "Image, google's recipe", "image", "google", 0.0),
    ("lra", "Pathfinder", "pathfinder32", "", 0.0),
)
KEYS = {text: name for name, text in ATTENTIONS.items()}
VARIANTS = {  # rows of other settings, by what follows the name
    "dropout 0.3 and 0.2": "dropout",
    "features max(x, 0) + 0.001": "google, relu",
    "the port's form": "port",
}


@pytest.mark.parametrize(("page", "header", "task", "recipe", "held_out"), COLUMNS)
def test_accuracies_of_the_pages_are_those_of_the_runs(page, header, task, recipe, held_out):
    cells, _ = make_cells(read_runs(str(RESULTS / "runs")))
    found = {
        (row.name, row.label): cell
        for (row, column), cell in cells.items()
        if (column.task, column.held_out) == (task, held_out)
    }
    text = (RESULTS.parent / f"{page}.md").read_text()
    assert count_shown(text, header, found, task, recipe) > 1


def test_accuracies_on_images_of_version_1_are_those_of_the_runs():
    cells, _ = make_cells(read_runs(str(RESULTS / "pathfinder_v1.jsonl.gz")))
    assert {column.source for _, column in cells} == {"generated"}
    found = {(row.name, row.label): cell for (row, _), cell in cells.items()}
    text = (RESULTS.parent / "pathfinder.md").read_text()
    text = text[text.index("## Runs on images of version 1") :]
    assert count_shown(text, "test accuracy (%)", found, "pathfinder32", "") == len(found)


def count_shown(text, header, cells, task, recipe):
    """How many cells the first table shows under `header`, each of them with its accuracy."""
    lines = text[text.index("| |") :].split("\n\n")[0].split("\n")
    names, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    at = [re.sub(r"\[(.*)\]\(.*\)", r"\1", name) for name in names].index(header)
    seen = 0
    for row in rows:
        name, _, rest = row[1].partition(", ")
        if name not in KEYS:
            continue
        shown, _, paper = row[at].rstrip("]").partition(" [")
        assert not paper or float(paper) == PAPER[KEYS[name], task]
        cell = cells.get((name, VARIANTS.get(rest, recipe)))
        if shown != "–":
            assert cell is not None, f"no run of {row[1]}"
            assert shown == shown_accuracy(cell), row[1]
            seen += 1
    return seen


PAPERS = (  # the tables of papers.md: the heading they follow, recipe of Image
    ("### Long Range Arena in the paper", ""),
    ("## Long Range Arena\n", "google"),
)


@pytest.mark.parametrize(("heading", "recipe"), PAPERS)
def test_accuracies_beside_those_of_papers_are_those_of_the_runs(heading, recipe):
    text = (RESULTS.parent / "papers.md").read_text()
    lines = text[text.index(heading) :].split("| |", 1)[1].split("\n\n")[0].split("\n")[2:]
    cells, _ = make_cells(read_runs(str(RESULTS / "runs")))
    found = {
        (row.name, column.task): f"{cell.accuracy:.1f}"
        for (row, column), cell in cells.items()
        if not column.held_out and row.label == (recipe if column.task == "image" else "")
    }
    for line in lines:
        name, *values = [cell.strip() for cell in line.split("|")[1:-1]]
        for task, shown in zip(
            ("listops", "text", "image", "pathfinder32"), values[1::2], strict=False
        ):
            assert shown == found.get((name, task), "–"), (name, task)
    assert len(lines) >= 6


def shown_accuracy(cell: Cell) -> str:
    """As the pages write it."""
    spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
    count = " (two)" if len(cell.runs) == 2 else ""
    return f"{cell.accuracy:.1f}{spread}{count}{'' if cell.complete else '†'}"
