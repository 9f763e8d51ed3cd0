"""Which runs count in a cell of the table, which cells in its averages, and what is compared."""

import pytest

from experiments.lra.cells import (
    Column,
    RowKey,
    average,
    make_cells,
    mean_speedup,
    paper_value,
    preferred,
)
from experiments.lra.runs import PRETRAINED, read_runs
from experiments.lra.table import Table
from tests.experiments.lra.made_runs import write_run


@pytest.fixture
def cell(tmp_path):
    """The only cell of made-up runs of ListOps."""

    def made(*runs):
        for number, options in enumerate(runs):
            write_run(tmp_path / f"{number:02}", "listops", "standard", **options)
        cells, _ = make_cells(read_runs(str(tmp_path)))
        (found,) = cells.values()
        return found

    return made


# A measured training step of ListOps.
STEP = {"task": "listops", "attention": "standard", "option": "", "length": 2048, "pair": 1}
STEP |= {"batch": 32, "layers": 2, "dim": 64, "heads": 2, "precision": "bf16"}
STEP |= {"device": "GPU A", "ms_median": 8.0, "peak_mib": 600.0, "status": "ok"}
OLD, NEW = "2026-01-01", "2026-02-01"
SLOW, FAST = {"lr": 1e-4}, {"lr": 1e-3}


@pytest.mark.parametrize(
    ("runs", "accuracy"),
    [
        (  # the settings with more seeds, though others are newer
            [*({"seed": s, "date": OLD, "settings": SLOW, "accuracy": 0.3} for s in (0, 1)),
             {"date": NEW, "settings": FAST, "accuracy": 0.4}],
            30,
        ),
        (  # of as many seeds the newer
            [{"date": OLD, "settings": SLOW, "accuracy": 0.3},
             {"date": NEW, "settings": FAST, "accuracy": 0.4}],
            40,
        ),
        (  # of a seed the complete run, though another is newer
            [{"date": OLD, "accuracy": 0.3}, {"date": NEW, "accuracy": 0.4, "steps": 400}],
            30,
        ),
    ],
)  # fmt: skip
def test_the_runs_that_count(cell, runs, accuracy):
    assert cell(*runs).accuracy == pytest.approx(accuracy)


def test_accuracies_are_all_of_the_test_or_all_of_the_validation_split(cell):
    cut = {"steps": 500, "accuracy": 0.4}
    found = cell({**cut, "accuracy": 0.3}, {**cut, "seed": 1, "result": False})
    assert not found.tested
    assert found.accuracies == pytest.approx([30, 34.6], abs=0.1)  # the second as in its journal


def test_the_time_of_a_step_is_the_median_of_the_runs(cell):
    found = cell(*({"seed": seed, "ms": ms} for seed, ms in enumerate((12.0, 10.0, 30.0))))
    assert list(found.ms_by_place.values()) == [12]


def test_an_average_is_marked_where_one_of_its_cells_is(tmp_path):
    write_run(tmp_path, "listops", "standard", accuracy=0.4)
    write_run(tmp_path, "text", "standard", accuracy=0.6, steps=500, result=False)
    found = Table(read_runs(str(tmp_path)), whole=True)
    (line,) = [cells for cells in found.sections["accuracy"][0] if cells[0] == "Transformer"]
    assert line[6].split()[0] == "45.9†‡"  # of 40 and 60 (1 - exp(-2))


def test_averages_of_another_recipe_are_not_those_of_the_paper(tmp_path):
    write_run(tmp_path, "listops", "standard", settings={"recipe": "google"})
    cells, _ = make_cells(read_runs(str(tmp_path)))
    ((row, column),) = cells
    found = average(cells, row, [column])
    assert row.label == "google" and found is not None
    assert (found.paper, found.paper_of_all) == (None, None)


def test_averages_prefer_the_official_rule_then_official_data_then_short_sequences():
    wanted = [
        Column("text", "official", 1024),
        Column("text", "official", 4096),
        Column("text", "other", 1024),
        Column("text", "official", 1024, 0.1),
    ]
    assert preferred([*wanted[::-1], Column("files", "")]) == wanted


# ---- what is compared


@pytest.mark.parametrize(
    "other",
    [{"batch": 16}, {"precision": "fp32"}, {"recipe": "google"}, {"scale": "small"},
     {"model": {"dim": 8}}],
)  # fmt: skip
def test_work_that_differs_is_not_compared(tmp_path, other):
    usual = {"batch": 32, "precision": "bf16", "recipe": "nystrom", "scale": "full"}
    for number, more in enumerate(({}, {"lr": 1.0}, other)):
        write_run(tmp_path / str(number), "text", "flash", settings=usual | more)
    first, same, different = read_runs(str(tmp_path))
    assert first.workload == same.workload != different.workload


def test_a_setting_that_older_runs_lack_counts_as_its_default(cell):
    """Two seeds, and a third from after a setting came, whose default it has."""
    usual = {"lr": 1e-3, "model": {"dim": 64}}
    newer = {"mask_share": 0.5, "model": {"dim": 64, "setting": "nystrom", "rotary": None}}
    runs = [{"seed": seed, "settings": usual} for seed in (0, 1)]
    assert len(cell(*runs, {"seed": 2, "settings": usual | newer}).runs) == 3


def test_a_setting_with_another_value_is_another_cell(cell):
    runs = [{"seed": seed, "settings": {"mask_share": x}} for seed, x in enumerate((0.5, 0.5, 0.2))]
    assert len(cell(*runs).runs) == 2


def test_the_papers_values_are_of_its_recipe():
    """On Path-X it starts from the weights of Pathfinder-64."""
    tasks = ("pathfinder128", 61.4), ("listops", None)
    for task, expected in tasks:
        assert paper_value(RowKey("flash", "", PRETRAINED), Column(task, "")) == expected
        assert paper_value(RowKey("flash", "", "google"), Column(task, "")) is None


def test_measured_steps_are_of_the_same_mask_and_of_the_usual_recipe(tmp_path):
    for mask in ("", "butterfly"):
        write_run(tmp_path, "listops", "sparse", mask=mask)
    write_run(tmp_path, "listops", "sparse", settings={"recipe": "google"}, folder="google")
    steps = [
        STEP | {"attention": "sparse", "option": option, "ms_median": ms}
        for option, ms in (("", 3.0), ("butterfly", 2.0))
    ]
    timed, _ = make_cells(read_runs(str(tmp_path)), steps)
    found = {row[1:]: list(cell.ms_by_place.values()) for (row, _), cell in timed.items()}
    assert found == {("", ""): [3], ("butterfly", ""): [2], ("", "google"): []}


@pytest.mark.parametrize(
    "settings", [{"batch": 64}, {"model": {"layers": 4}}, {"model": {"dim": 128}},
                 {"model": {"heads": 4}}, {"precision": "fp32"}], ids=str
)  # fmt: skip
def test_measured_steps_are_of_the_same_work(tmp_path, settings):
    write_run(tmp_path, "listops", "standard", settings=settings)
    runs, work = read_runs(str(tmp_path)), {**settings, **settings.get("model", {})}
    (other,), (same,) = (make_cells(runs, [STEP | w])[0].values() for w in ({}, work))
    assert not other.ms_by_place and same.ms_by_place


def test_the_mean_speed_up_is_of_the_tasks_that_the_paper_times(tmp_path):
    for task, ms in (("listops", 2.0), ("files", 1.0)):
        write_run(tmp_path, task, "standard", ms=8.0)
        write_run(tmp_path, task, "flash", ms=ms)
    cells, _ = make_cells(read_runs(str(tmp_path)))
    columns = [column for _, column in cells]
    flash = RowKey("flash", "", "")
    assert mean_speedup(cells, flash, dict.fromkeys(columns)) == (pytest.approx(4), 1)


def test_a_task_counts_once_in_the_mean_speed_up(tmp_path):
    for task, held_out, ms in (("listops", 0.0, 4.0), ("text", 0.0, 1.0), ("text", 0.1, 1.0)):
        for attention, time in (("standard", 4.0), ("flash", ms)):
            settings = {"task": {"held_out": held_out}}
            folder = f"{attention}-{held_out}"
            write_run(tmp_path, task, attention, ms=time, settings=settings, folder=folder)
    cells, _ = make_cells(read_runs(str(tmp_path)))
    columns = dict.fromkeys(column for _, column in cells)
    assert len(columns) == 3
    assert mean_speedup(cells, RowKey("flash", "", ""), columns) == (pytest.approx(2), 2)
