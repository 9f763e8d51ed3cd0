"""Published rows of the Long Range Arena: the table follows from them, and masks are named."""

import gzip
import json
import re

import numpy as np
import pytest

import masks
from experiments.common.provenance import CHANGES, ROOT, git, trace
from experiments.common.records import read
from experiments.lra.cells import Cell, make_cells
from experiments.lra.models.attention.flash import default_mask
from experiments.lra.published import ATTENTIONS, PAPER
from experiments.lra.run_files import read_runs
from experiments.lra.speed.rows import StepRow
from experiments.lra.statistics import difference
from experiments.lra.table import Table, as_csv, as_markdown
from experiments.lra.tasks.listops_trees import CHUNK, OPERATOR, OPERATORS, _chunk
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
    table = Table(read_runs("docs/results/lra/runs"), steps)
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
    assert len(kinds) == 8
    for kind in kinds:
        run, paddles = kind
        attention = "dense" if "flash" in run else "block-sparse"
        name = "pretrained" if "rotary" in run else f"{attention}, seed {run[-1]}"
        chosen = [row for row in rows if (row.run, row.paddles) == kind]
        made = cuts.table(chosen).strip().splitlines()[2:]
        assert len(made) == 3
        assert "\n".join(f"| {name} | {paddles} {line}" for line in made) in text
        whole = [row for row in chosen if row.left_out == 0]
        right = sum(row.curve_probe + row.other - row.other_probe for row in whole)
        count = {1: "one paddle", 3: "three paddles"}[paddles]
        assert f"| shortcut: {count} at each mark | {right / 100:.1f} ± " in text


def test_the_table_of_cuts_of_a_pretrained_model_follows_from_the_rows():
    made = cuts.table(read(RESULTS / "pathfinder_cuts.csv.gz", CutRow)).strip().splitlines()[2:]
    assert len(made) == 5
    assert "\n".join(made) in (RESULTS.parent / "pathfinder.md").read_text()


@pytest.fixture(scope="module")
def pretrained():
    """The runs of self-pretraining by folder, without its seed."""
    runs = read_runs(str(RESULTS / "spt.jsonl.gz"))
    assert len(runs) == 32
    return {run.place.rpartition("runs/train/")[2].removesuffix("/seed0"): run for run in runs}


# folder of the runs, density, and whether the times of a step are shown, by page
SPT = {
    "image": ("image-rotary", "59.4", False),
    "text": ("text4k-rotary", "21.7", True),
    "listops": ("listops-rotary", "36.7", True),
}


@pytest.mark.parametrize("page", SPT)
def test_the_tables_of_self_pretraining_follow_from_the_rows(pretrained, page):
    text = section(page, "Self-pretraining")
    folder, density, timed = SPT[page]
    kinds = (f"{folder}/%s-scratch", f"{folder}/%s", f"{folder}-masked/%s")
    flash, sparse = ([pretrained[kind % name] for kind in kinds] for name in ("flash", "sparse"))
    for runs, name in ((flash, "FlashAttention |"), (sparse, f"block-sparse | {density}")):
        scratch, trained, tokens = (run.accuracy for run in runs)
        shown = f"{scratch:.1f} | {trained:.1f} | {trained - scratch:+.1f} | {tokens:.1f} |"
        shown += f" {runs[1].ms_per_step:.1f} |" if timed else ""
        assert f"| {name} | {shown}\n" in text
    shown = " | ".join(map(interval, sparse[:2], flash[:2]))
    last = f"{sparse[2].accuracy - flash[2].accuracy:+.1f} |"
    last += f" {sparse[1].ms_per_step - flash[1].ms_per_step:+.1f} |" if timed else ""
    assert f"| block-sparse less FlashAttention | | {shown} | | {last}\n" in text


def test_the_table_of_pathfinder_at_once_follows_from_the_rows(pretrained):
    text = section("pathfinder", "Contours of 14 at once")
    for attention in ("flash", "sparse"):
        tokens, run = (pretrained[f"pathfinder32-rotary{x}/{attention}"] for x in ("-masked", ""))
        assert not run.complete and run.accuracy is None
        shown = f"{run.steps:,} of {run.planned_steps:,}† | {run.val_accuracy:.1f} |"
        assert f"| {tokens.accuracy:.1f} | {shown}" in text


CONTOURS = {"c6": 6, "c9": 9, "c14": 14}


@pytest.fixture(scope="module")
def growing(pretrained):
    """The runs of contours that grow, by attention and stage: ("flash", "c6-scratch")."""
    names = (f"{stage}{start}" for stage in CONTOURS for start in ("", "-scratch"))
    pairs = [(attention, name) for name in names for attention in ("flash", "sparse")]
    found = {
        (attention, name): pretrained[folder]
        for attention, name in pairs
        if (folder := f"pathfinder32-rotary/{attention}-{name}") in pretrained
    }
    assert len(found) == 10 and all(run.complete for run in found.values())
    for (_, name), run in found.items():
        assert (run.config["task"]["difficulty"] or 14) == CONTOURS[name.partition("-")[0]]
    return found


def test_the_tables_of_contours_that_grow_follow_from_the_rows(pretrained, growing):
    text = section("pathfinder", "Self-pretraining")
    for attention, name in (("flash", "FlashAttention"), ("sparse", "block-sparse")):
        density = "59.4" if attention == "sparse" else ""
        tokens = pretrained[f"pathfinder32-rotary-masked/{attention}"]
        runs = [growing[attention, stage] for stage in CONTOURS]
        shown = " | ".join(f"{run.accuracy:.1f}" for run in runs)
        last = f"{tokens.accuracy:.1f} | {runs[-1].ms_per_step:.2f} |"
        assert f"| {name}, pretrained | {density} | {shown} | {last}\n".replace("  ", " ") in text
        steps = " | ".join(f"{run.steps:,}" for run in runs)
        assert f"| {name}, pretrained | {steps} |\n" in text
        scratch = [growing[attention, f"{stage}-scratch"] for stage in ("c6", "c9")]
        shown = " | ".join(f"{run.accuracy:.1f}" for run in scratch)
        line = f"| {name}, from scratch | {density} | {shown} | not run | | |\n"
        assert line.replace("  ", " ") in text
        steps = " | ".join(f"{run.steps:,}" for run in scratch)
        assert f"| {name}, from scratch | {steps} | |\n" in text
    pairs = [(growing["sparse", stage], growing["flash", stage]) for stage in CONTOURS]
    shown = " | ".join(interval(*pair) for pair in pairs)
    faster = f"{pairs[-1][0].ms_per_step - pairs[-1][1].ms_per_step:+.2f}"
    line = f"| block-sparse less FlashAttention, pretrained | | {shown} | | {faster} |\n"
    assert line in text
    shown = " | ".join(f"{run.baselines['majority']:.1f}" for run, _ in pairs)
    assert f"| shortcut: majority | | {shown} | | |\n" in text


def test_runs_at_chance_answer_the_same_for_every_image(growing):
    """Seven runs, as the page says; those of one contour also log the same late in training."""
    chance = {key: run for key, run in growing.items() if run.accuracy < 60}
    assert len(chance) == 7
    for run in chance.values():
        majority = run.baselines["majority"]
        assert min(abs(run.accuracy - x) for x in (majority, 100 - majority)) < 1e-6
    for stage, start, same in (("c6", 3500, ("c6-scratch",)), ("c9", 5000, ("c9", "c9-scratch"))):
        runs = {key: run for key, run in chance.items() if key[1].startswith(stage)}
        assert len(runs) == 3 and len({tuple(run.correct) for run in runs.values()}) == 1
        late = {
            tuple(line["accuracy"] for line in run.of("train") if line["step"] >= start)
            for (_, name), run in runs.items()
            if name in same
        }
        assert len(late) == 1


def test_losses_and_aims_of_self_pretraining_on_listops_follow_from_the_rows(pretrained):
    text = section("listops", "Self-pretraining")
    flash, sparse = (pretrained[f"listops-rotary/{name}"] for name in ("flash", "sparse"))
    result = f"{flash.accuracy:.1f} % dense, {sparse.accuracy:.1f} % block-sparse"
    assert f"| 60 % with pretraining | {result} | no |\n" in text
    assert f"| {sparse.accuracy - flash.accuracy:.1f} points above |" in text
    assert f"| {100 * sparse.ms_per_step / flash.ms_per_step:.0f} % of its time | no |\n" in text
    for name, shortcut in (
        ("first operator alone", "root operator"),
        ("most frequent digit", "majority"),
    ):
        shown = f"{flash.baselines[shortcut]:.1f}"
        assert f"| shortcut: {name} | | {shown} | {shown} | | | |\n" in text
    for attention, name in (("flash", "FlashAttention"), ("sparse", "block-sparse")):
        runs = (pretrained[f"listops-rotary/{attention}{x}"] for x in ("-scratch", ""))
        shown = " | ".join(f"{run.of('val')[-1]['loss']:.2f}" for run in runs)
        assert f"| {name} | {shown} |\n" in text


def test_accuracies_by_the_first_operator_follow_from_the_rows(pretrained):
    first, last = 98_000 // CHUNK, 100_000 // CHUNK  # the chunks with the test split
    chunks = [_chunk(0, i) for i in range(first, last + 1)]
    roots = np.concatenate([flat[np.cumsum(n) - n] for (flat, n), _ in chunks])
    test = slice(98_000 - first * CHUNK, 100_000 - first * CHUNK)
    roots, labels = roots[test], np.concatenate([labels for _, labels in chunks])[test]
    text = section("listops", "Self-pretraining")

    def shown(right):
        each = [100 * right[roots == OPERATOR + i].mean() for i in range(len(OPERATORS))]
        return " | ".join(f"{accuracy:.1f}" for accuracy in each)

    rule = np.array([0, 9, 4, 8])[roots - OPERATOR] == labels  # most frequent values in training
    run = pretrained["listops-rotary/flash"]
    assert 100 * rule.mean() == pytest.approx(run.baselines["root operator"])
    assert f"| shortcut: first operator alone | {shown(rule)} |\n" in text
    for attention, name in (("flash", "FlashAttention"), ("sparse", "block-sparse")):
        for start, how in (("-scratch", "from scratch"), ("", "pretrained")):
            right = pretrained[f"listops-rotary/{attention}{start}"].correct
            assert f"| {name}, {how} | {shown(right)} |\n" in text


def section(page, heading):
    """The text of a page from a heading on."""
    return (RESULTS.parent / f"{page}.md").read_text().split(f"# {heading}\n")[1]


def interval(ours, other):
    """The difference in points, and its 95 % interval."""
    found = difference([ours], [other])
    return f"{found.value:+.1f} ± {found.half:.1f}"


def test_the_table_of_masks_follows_from_the_rows():
    for page, name, label, cells in (
        ("pathfinder", "path_masks", "masks", 25),
        ("path_x", "path_x_masks", "path_x_masks", 13),
    ):
        found = masks_study.points(read_runs(str(RESULTS / f"{name}.jsonl.gz")), label)
        text = (RESULTS.parent / f"{page}.md").read_text()
        assert len(found) == cells and masks_study.table(found).strip() in text


@pytest.mark.parametrize("name", ["path_x", "path_256"])
def test_stages_of_the_curricula_are_those_of_the_runs(name):
    page = (RESULTS.parent / f"{name}.md").read_text()
    runs = read_runs(str(RESULTS / name))
    assert len(runs) >= 9
    for run in runs:
        accuracy = re.escape(f"{run.accuracy + 1e-6:.1f}")  # halves go up
        assert re.search(rf"\| {run.steps:,}†? \| [\d.]+ \| (\*\*)?{accuracy}\b", page), run.place
    for run in runs if name == "path_x" else ():
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
    assert len(runs) == 120 and sum(run.reconstructed for run in runs) == 1
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
