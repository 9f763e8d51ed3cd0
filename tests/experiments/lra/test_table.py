"""The LRA table: figures worked out by hand, missing and cut-short cells, data kept apart."""

import pytest

from experiments.common.rows import frame
from experiments.lra import published as lra
from experiments.lra.cells import Column, RowKey, average, mean_speedup, speedup
from experiments.lra.runs import read_runs
from experiments.lra.table import Table, tables
from tests.experiments.lra.made_runs import write_run
from tests.experiments.lra.test_cells import STEP

STANDARD, FLASH = RowKey("standard", "", ""), RowKey("flash", "", "")
LISTOPS = Column("listops", "generated", 2048)
CIFAR = "CIFAR-10 (gray), 44,849 + 9,966 examples"


def run(attention="standard", task="listops", **options):
    """What the fixture `table` takes."""
    return attention, task, options


@pytest.fixture
def table(tmp_path):
    """The table of made-up runs, which lie in tmp_path/00, tmp_path/01, ..."""

    def made(*runs, steps=None):
        for number, (attention, task, options) in enumerate(runs):
            write_run(tmp_path / f"{number:02}", task, attention, **options)
        return Table(read_runs(str(tmp_path)), steps, whole=True)

    return made


def line(found, first):
    """The cells of the first table's line that begins with a text."""
    return next(cells for cells in found.sections["accuracy"][0] if cells[0] == first)


def numbers(found):
    """The rows of the CSV by attention and task."""
    return {(row["attention"], row["task"]): row for row in found.frame().to_dict("records")}


def test_the_papers_averages_follow_from_its_cells():
    stated = (59.3, 59.8, 59.6, 54.9, 59.6, 58.9, 56.0, 57.6, 57.9)
    for name, mean in zip(lra.ATTENTIONS, stated, strict=True):
        accuracies = [lra.PAPER[name, task] for task in lra.AVERAGED]
        assert sum(accuracies) / 5 == pytest.approx(mean, abs=0.16), name


# Runs of ListOps; each attention shows one thing.
ACCURACIES = [
    *(run(seed=seed, accuracy=x) for seed, x in enumerate((0.36, 0.37, 0.41))),
    run("flash", accuracy=0.361),
    run("linformer", steps=400, accuracy=0.25),
    *(run("linear", accuracy=0.36, **more) for more in ({}, {"seed": 1, "steps": 100})),
    *(run("performer", seed=seed, accuracy=0.37) for seed in (0, 1)),
    run("performer", seed=2, accuracy=0.10, settings={"lr": 1.0}),
    *(run("local", accuracy=x, date=f"2026-0{10 * x:.0f}-01") for x in (0.3, 0.4)),
    run("reformer", accuracy=0.361, commit="0123456789ab+changes"),
    run("smyrf", accuracy=0.37, commit=""),
]
CELLS = {  # worked out by hand
    "Transformer": "38.0 ± 2.6 (3) [36.0]",  # the mean, and the root of (4 + 1 + 9) / (3 - 1)
    "FlashAttention": "36.1 [37.6]",  # a single seed
    "Linformer": "25.0† [35.6]",  # cut short
    "linear attention": "36.0 [38.8]",  # cut runs are left out where a seed is complete
    "Performer": "37.0 ± 0.0 (2) [36.8]",  # runs of other settings are not averaged
    "local attention": "40.0 [36.1]",  # of the same seed twice the newest counts
    "Reformer": "36.1§ [36.5]",  # of changed code
    "Smyrf": "37.0§ [36.1]",  # of no commit
}


def test_accuracies_are_marked_and_what_is_left_out_is_named(table):
    found = table(*ACCURACIES)
    assert {name: line(found, name)[1] for name in CELLS} == CELLS
    assert line(found, "Linformer")[6:8] == ["25.0† (1 of 5) [35.6]", "1.00x [2.5x]"]
    ends = ("seed1, cut short", "seed2, other settings", "seed0, seed 0 again")
    assert all(note.endswith(end) for note, end in zip(found.notes, ends, strict=True))
    notes = "\n".join(found.footnotes())
    assert "seed0: 400 of 1000 steps" in notes and "\n§ untraced" in notes
    rows = numbers(found)
    for name in ("flash", "linformer", "reformer", "smyrf"):
        row, cell = rows[name, "listops"], CELLS[lra.ATTENTIONS[name]]
        assert row["traced"] == ("§" not in cell) and row["complete"] == ("†" not in cell)


def test_a_killed_run_shows_its_best_validation_accuracy_as_such(tmp_path):
    path = write_run(tmp_path, "listops", "standard", accuracy=0.4, steps=500, result=False)
    with open(path / "journal.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # half-written
    found = Table(read_runs(str(tmp_path)))
    assert line(found, "Transformer")[1] == "34.6†‡ [36.0]"  # 40 (1 - exp(-2))
    assert any("500 of 1000 steps" in note for note in found.footnotes())


def test_the_speed_up_is_a_geometric_mean_over_devices(table):
    places = ("GPU A", 12.0, 6.0), ("GPU B", 12.0, 1.5)  # 2x and 8x
    runs = [
        run(kind, seed=seed, ms=ms, device=device)
        for seed, (device, *times) in enumerate(places)
        for kind, ms in zip(("standard", "flash"), times, strict=True)
    ]
    assert speedup(table(*runs).cells, FLASH, LISTOPS) == pytest.approx(4.0)


def test_the_speed_up_is_a_geometric_mean_over_tasks_of_one_device(table):
    found = table(
        run(ms=12.0),
        run("flash", ms=6.0),  # 2x
        run(task="text", ms=32.0),
        run("flash", "text", ms=4.0),  # 8x
        run(task="image", ms=5.0),
        run("flash", "image", ms=1.0, device="GPU B"),  # not comparable
    )
    assert speedup(found.cells, FLASH, LISTOPS) == pytest.approx(2.0)
    assert speedup(found.cells, FLASH, Column("image", "generated", 2048)) is None
    assert mean_speedup(found.cells, FLASH, found.columns) == (pytest.approx(4.0), 2)
    assert line(found, "FlashAttention")[-2] == "4.00x (2 of 3) [2.4x]"
    assert line(found, "Transformer")[-2] == "1.00x [1.0x]"


GOOGLE = {"recipe": "google"}


@pytest.mark.parametrize(
    ("runs", "row", "factor"),
    [
        (  # of another size
            [run(ms=4.0), run("flash", settings=GOOGLE | {"scale": "small"})],
            RowKey("flash", "", "google, small"),
            None,
        ),
        (  # a run with a name: the Transformer of its recipe
            [run(ms=4.0), run(ms=9.0, settings=GOOGLE),
             run("performer", ms=3.0, settings=GOOGLE, name="relu")],
            RowKey("performer", "", "google, relu"),
            3.0,
        ),
        (  # of two of the same size, that of the same name
            [run(ms=4.0), run(ms=9.0, name="own"), run("flash", ms=3.0, name="own")],
            RowKey("flash", "", "own"),
            3.0,
        ),
        (  # a run from before an option existed
            [run(ms=4.0, settings={"model": {"dim": 64}}),
             run("flash", ms=1.0, settings={"model": {"dim": 64, "rotary": None}})],
            FLASH,
            4.0,
        ),
    ],
)  # fmt: skip
def test_speed_ups_are_of_the_same_work(table, runs, row, factor):
    assert speedup(table(*runs).cells, row, LISTOPS) == pytest.approx(factor)


def test_times_come_from_measured_steps_where_they_are_given(table, tmp_path):
    steps = [
        STEP | {"ms_median": 99.0, "date": "2025"},  # measured again
        STEP,
        STEP | {"attention": "flash", "ms_median": 4.0, "peak_mib": 500.0},
        STEP | {"attention": "sparse", "ms_median": 1.0},  # not run
        STEP | {"attention": "local", "length": 1024},  # of another length
    ]
    found = table(run(ms=99.0), run("flash", ms=98.0), run("local", ms=97.0), steps=steps)
    assert line(found, "FlashAttention")[-2:] == ["2.00x [2.4x]", "500"]
    assert line(found, "local attention")[-2:] == ["– [1.7x]", "–"]
    assert line(Table(read_runs(str(tmp_path))), "FlashAttention")[-2].startswith("1.01x")


def test_path_tasks_stay_out_of_average_and_speed_up(table):
    sparse = {"ms": 5.0, "mask": "butterfly", "accuracy": 0.64}
    start = {"init_from": "runs/train/pathfinder64/flash/seed0"}  # the paper's recipe
    found = table(
        *(run(task=task, ms=ms) for task, ms in (("listops", 10.0), ("pathfinder128", 90.0))),
        *(run("sparse", task, **sparse) for task in ("listops", "pathfinder128")),
        run("flash", "pathfinder128", accuracy=0.61, settings=start),
    )
    row = RowKey("sparse", "butterfly", "")
    assert mean_speedup(found.cells, row, found.columns) == (pytest.approx(2.0), 1)
    assert line(found, "block-sparse, butterfly")[6] == "64.0 (1 of 5) [37.0]"
    paths, _ = found.sections["paths"]
    assert ["block-sparse, butterfly", "64.0 [56.0]"] in paths
    assert ["FlashAttention", "– [61.4]"] in paths
    assert ["FlashAttention, from another run", "61.0 [61.4]"] in paths


def test_an_average_compares_with_the_paper_over_the_same_tasks(table):
    tasks = {"listops": 0.37, "text": 0.65, "imdb_same_movie": 0.99}  # the last is not the paper's
    made = table(*(run(task=task, accuracy=accuracy) for task, accuracy in tasks.items()))
    found = average(made.cells, STANDARD, made.columns)
    assert found is not None
    assert (found.value, found.tasks) == (pytest.approx(51.0), 2)
    assert found.paper == pytest.approx((36.0 + 63.6) / 2)


def test_missing_tasks_count_as_chance_in_the_second_mean(table):
    tasks = {"listops": 0.37, "text": 0.65, "image": 0.42}
    made = table(*(run(task=task, accuracy=accuracy) for task, accuracy in tasks.items()))
    found = average(made.cells, STANDARD, made.columns)
    assert found is not None
    assert found.of_all == pytest.approx((37 + 65 + 50 + 42 + 50) / 5)
    assert line(made, "Transformer")[6:8] == ["48.0 (3 of 5) [47.3]", "48.8 [59.2]"]


def test_text_that_holds_out_a_validation_split_has_a_column_of_its_own(table):
    held_out = {"task": {"held_out": 0.1}}
    found = table(
        run(task="text", source="official", accuracy=0.65),
        run(task="text", source="official, 22,500 + 2,500 + 25,000 examples", accuracy=0.64,
            settings=held_out),
    )  # fmt: skip
    texts = [c.text for c in found.columns if c.task == "text"]
    assert texts == ["Text (official, 2k)", "Text (official, 10 % held out, 2k)"]
    assert [text.split()[0] for text in line(found, "Transformer")[2:4]] == ["65.0", "64.0"]
    mean = average(found.cells, STANDARD, found.columns)
    assert mean is not None and mean.value == pytest.approx(65.0)  # the official rule


def test_differences_are_paired_by_seed_in_the_same_recipe(table):
    seeds = enumerate(zip((0.36, 0.37, 0.38), (0.38, 0.38, 0.41), strict=True))
    pairs = [(seed, *accuracies) for seed, accuracies in seeds]
    found = table(
        *(run(seed=seed, accuracy=one) for seed, one, _ in pairs),
        *(run("sparse", seed=seed, accuracy=two) for seed, _, two in pairs),
        run("flash", accuracy=0.40, settings={"recipe": "google"}),
        run("linear", accuracy=0.34, steps=400),
    )
    assert "from_flash" not in found.sections
    assert found.sections["from_standard"][0][1:] == [
        ["block-sparse", "+2.0 ± 2.5 (3, s)", *["–"] * 4],
        ["linear attention", "-2.0 (1)†", *["–"] * 4],  # cut short
    ]
    row = numbers(found)["sparse", "listops"]
    assert row["from_standard"] == pytest.approx(2)
    assert row["from_standard_half"] == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert row["from_standard_covers"] == "s" and row["from_flash"] != row["from_flash"]


def test_sources_and_lengths_of_data_have_columns_of_their_own(table):
    found = table(
        run(accuracy=0.50),
        run(accuracy=0.30, source="official"),
        run(task="text", length=1024),
        run(task="text", length=4096),
        run(task="image", source=CIFAR),
    )
    assert [c.text for c in found.columns if c.task not in ("retrieval", "pathfinder32")] == [
        "ListOps (generated, 2k)", "ListOps (official, 2k)",
        "Text (generated, 1k)", "Text (generated, 4k)", "Image (CIFAR-10 gray, 2k)",
    ]  # fmt: skip
    assert [text.split()[0] for text in line(found, "Transformer")[1:3]] == ["50.0", "30.0"]
    mean = average(found.cells, STANDARD, found.columns[:2])
    assert mean is not None and mean.value == pytest.approx(30.0)  # the official one
    assert f"Image (CIFAR-10 gray, 2k): {CIFAR}" in found.footnotes()


def test_pre_training_enters_no_cell(table, tmp_path):
    found = table(run(), run(task="image", settings={"pretrain": "masked"}))
    assert [column.task for _, column in found.cells] == ["listops"]
    assert found.notes == [f"left out: {tmp_path}/01/image/standard/seed0, pre-training"]


def test_two_runs_are_two_rows_without_columns_of_dashes(tmp_path):
    for name in ("flash", "sparse"):
        write_run(tmp_path, "image", name)
    write_run(tmp_path, "pathfinder128", "local")
    found = Table(read_runs(str(tmp_path)))
    lines, _ = found.sections["accuracy"]
    assert [cells[0] for cells in lines[1:3]] == ["FlashAttention", "block-sparse"]
    assert len(lines) == 4 and "of all five" not in lines[0]
    assert not any(all(cell == "–" for cell in column[1:3]) for column in zip(*lines, strict=True))
    assert found.sections["paths"][0][1][0] == "local attention"


def test_tables_of_an_archive_are_those_of_its_runs(tmp_path, run_program):
    write_run(tmp_path / "runs", "listops", "standard")
    archive = tmp_path / "runs.jsonl"
    words = [f"runs={tmp_path}/runs", f"out={tmp_path}/table", f"archive={archive}"]
    assert run_program("table", *words)[0] == 0
    made = tables(frame(archive))
    text = (tmp_path / "table.md").read_text()
    assert "Transformer" in made["accuracy"] and all(table in text for table in made.values())
    assert "FlashAttention" in tables(frame(archive), frame([STEP]))["accuracy"]
