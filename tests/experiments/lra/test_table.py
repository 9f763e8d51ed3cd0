"""The LRA table: figures worked out by hand, missing and cut-short cells, data kept apart."""

import csv
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lra import published as lra
from experiments.lra.cells import Column, RowKey, average, make_cells, mean_speedup, speedup
from experiments.lra.run_files import read_runs
from experiments.lra.table import Table, as_csv, as_markdown, as_text
from tests.experiments.lra.made_runs import write_run
from tests.experiments.lra.speed.made_rows import ROW

ROOT = Path(__file__).resolve().parents[3]
STANDARD, FLASH = RowKey("standard", "", ""), RowKey("flash", "", "")
LISTOPS, TEXT = Column("listops", "generated", 2048), Column("text", "generated", 2048)


def table(root):
    return Table(read_runs(str(root)))


def line(found, first):
    """The cells of the first table's line that begins with a text."""
    return next(cells for cells in found.sections()[0].lines if cells[0] == first)


def test_the_papers_averages_follow_from_its_cells():
    rows = {name: [lra.PAPER[name, task] for task in lra.AVERAGED] for name in lra.ATTENTIONS}
    stated = dict(
        zip(lra.ATTENTIONS, (59.3, 59.8, 59.6, 54.9, 59.6, 58.9, 56.0, 57.6, 57.9), strict=True)
    )
    for name, accuracies in rows.items():
        assert sum(accuracies) / 5 == pytest.approx(stated[name], abs=0.16), name


def test_mean_spread_and_count_of_three_seeds(tmp_path):
    for seed, accuracy in enumerate((0.36, 0.37, 0.41)):
        write_run(tmp_path, "listops", "standard", seed, accuracy=accuracy)
    cell = table(tmp_path).cells[STANDARD, LISTOPS]
    assert cell.accuracy == pytest.approx(38.0)
    assert cell.spread == pytest.approx(7**0.5)  # (4 + 1 + 9) / (3 - 1)
    assert line(table(tmp_path), "Transformer")[1] == "38.0 ± 2.6 (3) [36.0]"


def test_a_single_seed_has_no_spread(tmp_path):
    write_run(tmp_path, "listops", "standard", accuracy=0.361)
    assert line(table(tmp_path), "Transformer")[1] == "36.1 [36.0]"


def test_the_speed_up_is_a_geometric_mean_over_tasks_of_one_device(tmp_path):
    write_run(tmp_path, "listops", "standard", ms=12.0)
    write_run(tmp_path, "listops", "flash", ms=6.0)  # 2x
    write_run(tmp_path, "text", "standard", ms=32.0)
    write_run(tmp_path, "text", "flash", ms=4.0)  # 8x
    write_run(tmp_path, "image", "standard", ms=5.0)
    write_run(tmp_path, "image", "flash", ms=1.0, device="GPU B")  # not comparable
    found = table(tmp_path)
    assert speedup(found.cells, FLASH, LISTOPS) == pytest.approx(2.0)
    assert speedup(found.cells, FLASH, Column("image", "generated", 2048)) is None
    assert mean_speedup(found.cells, FLASH, found.columns) == (pytest.approx(4.0), 2)
    assert line(found, "FlashAttention")[-2] == "4.00x (2 of 3) [2.4x]"
    assert line(found, "Transformer")[-2] == "1.00x [1.0x]"


def test_times_come_from_measured_steps_where_they_are_given(tmp_path):
    write_run(tmp_path, "listops", "standard", ms=99.0)
    write_run(tmp_path, "listops", "flash", ms=98.0)
    write_run(tmp_path, "listops", "local", ms=97.0)
    steps = [
        replace(ROW, ms_median=99.0, date="2025"),  # measured again
        ROW,
        replace(ROW, attention="flash", ms_median=4.0, peak_mib=500.0),
        replace(ROW, attention="sparse", ms_median=1.0),  # not run
        replace(ROW, attention="local", length=1024),  # of another length
    ]
    found = Table(read_runs(str(tmp_path)), steps)
    assert line(found, "FlashAttention")[-2:] == ["2.00x [2.4x]", "500"]
    assert line(found, "local attention")[-2:] == ["– [1.7x]", "–"]
    assert line(Table(read_runs(str(tmp_path))), "FlashAttention")[-2].startswith("1.01x")


def test_path_tasks_stay_out_of_average_and_speed_up(tmp_path):
    for task, base in (("listops", 10.0), ("pathfinder128", 90.0)):
        write_run(tmp_path, task, "standard", ms=base, accuracy=0.6)
        write_run(tmp_path, task, "sparse", ms=5.0, mask="butterfly", accuracy=0.64)
    found = table(tmp_path)
    row = RowKey("sparse", "butterfly", "")
    assert mean_speedup(found.cells, row, found.columns) == (pytest.approx(2.0), 1)
    assert line(found, "block-sparse, butterfly")[6] == "64.0 (1 of 5) [37.0]"
    paths = found.sections()[1]
    assert ["block-sparse, butterfly", "64.0 [56.0]"] in paths.lines
    assert ["FlashAttention", "– [61.4]"] in paths.lines


def test_an_average_compares_with_the_paper_over_the_same_tasks(tmp_path):
    write_run(tmp_path, "listops", "standard", accuracy=0.37)
    write_run(tmp_path, "text", "standard", accuracy=0.65)
    write_run(tmp_path, "imdb_same_movie", "standard", accuracy=0.99)  # no task of the paper's
    found = average(table(tmp_path).cells, STANDARD, table(tmp_path).columns)
    assert found is not None
    assert (found.value, found.tasks) == (pytest.approx(51.0), 2)
    assert found.paper == pytest.approx((36.0 + 63.6) / 2)


def test_official_and_generated_data_have_columns_of_their_own(tmp_path):
    write_run(tmp_path, "listops", "standard", accuracy=0.50)
    write_run(tmp_path / "more", "listops", "standard", accuracy=0.30, source="official")
    found = table(tmp_path)
    assert [c.text for c in found.columns[:2]] == [
        "ListOps (generated, 2k)",
        "ListOps (official, 2k)",
    ]
    assert [text.split()[0] for text in line(found, "Transformer")[1:3]] == ["50.0", "30.0"]
    mean = average(found.cells, STANDARD, found.columns)
    assert mean is not None and mean.value == pytest.approx(30.0)  # the official one


def test_missing_cells_are_shown_and_have_empty_cells_in_the_csv(tmp_path):
    write_run(tmp_path, "listops", "standard")
    found = table(tmp_path)
    assert [cells[0] for cells in found.sections()[0].lines[1:10]] == list(lra.ATTENTIONS.values())
    assert line(found, "Reformer")[1:] == [
        "– [36.5]", "– [63.8]", "– [78.5]", "– [39.6]", "– [69.4]", "–", "– [1.3x]", "–",
    ]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert len(rows) == 9 * 5
    missing = next(r for r in rows if (r["attention"], r["task"]) == ("smyrf", "image"))
    assert (missing["accuracy"], missing["complete"], missing["paper"]) == ("", "", "39.6")
    assert missing["runs"] == "0"


def test_a_run_that_was_cut_short_is_marked_with_its_steps(tmp_path):
    write_run(tmp_path, "listops", "standard", steps=400, planned=1000, accuracy=0.25)
    found = table(tmp_path)
    assert line(found, "Transformer")[1] == "25.0† [36.0]"
    assert line(found, "Transformer")[6] == "25.0† (1 of 5) [36.0]"
    assert any("seed0: 400 of 1000 steps" in note for note in found.footnotes())
    assert "False" in as_csv(found)


def test_a_killed_run_shows_its_best_validation_accuracy_as_such(tmp_path):
    path = write_run(tmp_path, "listops", "standard", accuracy=0.4, steps=500, result=False)
    with open(path / "journal.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # half-written
    found = table(tmp_path)
    assert line(found, "Transformer")[1] == "34.6†‡ [36.0]"  # 40 (1 - exp(-2))
    assert any("500 of 1000 steps" in note for note in found.footnotes())


def test_cut_runs_are_left_out_where_a_seed_is_complete_and_the_table_says_so(tmp_path):
    write_run(tmp_path, "listops", "standard", 0, accuracy=0.36)
    write_run(tmp_path, "listops", "standard", 1, accuracy=0.20, steps=100)
    found = table(tmp_path)
    assert line(found, "Transformer")[1] == "36.0 [36.0]"
    assert any("seed1, cut short" in note for note in found.notes)


def test_runs_of_other_settings_are_not_averaged_but_named(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a", "listops", "standard", seed, accuracy=0.36)
    write_run(tmp_path / "b", "listops", "standard", 2, accuracy=0.10, settings={"lr": 1.0})
    cells, notes = make_cells(read_runs(str(tmp_path)))
    assert cells[STANDARD, LISTOPS].accuracies == pytest.approx([36.0, 36.0])
    assert len(notes) == 1 and notes[0].endswith("other settings")


def test_the_same_seed_twice_counts_once(tmp_path):
    write_run(tmp_path / "a", "listops", "standard", accuracy=0.30, date="2026-01-01")
    write_run(tmp_path / "b", "listops", "standard", accuracy=0.40, date="2026-02-01")
    cells, notes = make_cells(read_runs(str(tmp_path)))
    assert cells[STANDARD, LISTOPS].accuracies == pytest.approx([40.0])
    assert len(notes) == 1 and notes[0].endswith("seed 0 again")


def test_each_mask_and_each_name_has_a_line_and_only_the_default_the_papers_values(tmp_path):
    write_run(tmp_path, "listops", "sparse", mask="butterfly")
    write_run(tmp_path, "listops", "sparse", mask="local:256")
    write_run(tmp_path, "listops", "standard", name="wide")
    found = table(tmp_path)
    assert line(found, "block-sparse, butterfly")[1] == "40.0 [37.0]"
    assert line(found, "block-sparse, local:256")[1] == "40.0 [37.0]"
    assert line(found, "Transformer, wide")[1] == "40.0"
    assert line(found, "Transformer, wide")[-2] == "1.00x"


def test_shortcuts_stand_below_their_tasks(tmp_path):
    write_run(tmp_path, "listops", "standard")
    write_run(tmp_path, "image", "standard")
    found = table(tmp_path)
    assert line(found, "shortcut: root operator")[1:6] == ["37.3", "", "", "", ""]
    assert line(found, "shortcut: majority")[1:6] == ["17.5", "", "", "17.5", ""]


def test_markdown_escapes_bars_and_holds_every_section(tmp_path):
    write_run(tmp_path, "listops", "sparse", mask="local(64) | butterfly(32)")
    text = as_markdown(table(tmp_path))
    assert "block-sparse, local(64) \\| butterfly(32)" in text
    heads = [cells for cells in text.splitlines() if cells.startswith("### ")]
    assert len(heads) == 3
    assert "† cut short" in as_text(table(tmp_path))


def test_the_program_writes_three_files_and_an_archive(tmp_path):
    write_run(tmp_path / "runs", "listops", "standard")
    command = [sys.executable, "-m", "experiments.table", f"runs={tmp_path / 'runs'}"]
    command += [f"out={tmp_path / 'new' / 'lra'}", f"archive={tmp_path / 'runs.jsonl'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Transformer" in done.stdout
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["lra.csv", "lra.md", "lra.txt"]
    assert [run.task for run in read_runs(str(tmp_path / "runs.jsonl"))] == ["listops"]


def test_lengths_of_one_task_have_columns_of_their_own(tmp_path):
    write_run(tmp_path / "a", "text", "standard", length=1024)
    write_run(tmp_path / "b", "text", "standard", length=4096)
    columns = [c.text for c in table(tmp_path).columns if c.task == "text"]
    assert columns == ["Text (generated, 1k)", "Text (generated, 4k)"]


def test_pre_training_enters_no_cell(tmp_path):
    write_run(tmp_path, "listops", "standard")
    path = write_run(tmp_path, "image", "standard", settings={"pretrain": "masked_pixels"})
    found = table(tmp_path)
    assert [column.task for _, column in found.cells] == ["listops"]
    assert found.notes == [f"left out: {path}, pre-training"]


def test_runs_off_the_reference_recipe_say_in_what(tmp_path):
    write_run(tmp_path, "listops", "standard", ms=4.0)
    options = {"scale": "small", "recipe": "google", "task": {"order": "hilbert"}}
    write_run(tmp_path, "listops", "flash", ms=1.0, settings=options)
    found = table(tmp_path)
    row = RowKey("flash", "", "google, small, hilbert")
    assert found.cells[row, LISTOPS].accuracy == pytest.approx(40.0)
    assert speedup(found.cells, row, LISTOPS) is None  # of another size
    assert line(found, "FlashAttention, google, small, hilbert")[1] == "40.0"


def test_a_run_with_a_name_is_compared_with_the_transformer_of_its_recipe(tmp_path):
    google = {"recipe": "google"}
    write_run(tmp_path, "listops", "standard", ms=4.0)
    write_run(tmp_path, "listops", "standard", ms=9.0, settings=google, folder="google")
    write_run(tmp_path, "listops", "performer", ms=3.0, settings=google, name="relu")
    cells = table(tmp_path).cells
    row = RowKey("performer", "", "google, relu")
    assert speedup(cells, row, LISTOPS) == pytest.approx(3.0)


def test_runs_from_before_an_option_existed_are_compared(tmp_path):
    write_run(tmp_path, "listops", "standard", ms=4.0, settings={"model": {"dim": 64}})
    settings = {"model": {"dim": 64, "rotary": None}}
    write_run(tmp_path, "listops", "flash", ms=1.0, settings=settings)
    assert speedup(table(tmp_path).cells, FLASH, LISTOPS) == pytest.approx(4.0)


def test_path_x_from_another_run_is_the_papers_recipe(tmp_path):
    start = {"init_from": "runs/train/pathfinder64/flash/seed0"}
    write_run(tmp_path, "pathfinder128", "flash", accuracy=0.61, settings=start)
    lines = table(tmp_path).sections()[1].lines
    assert ["FlashAttention, from another run", "61.0 [61.4]"] in lines


def test_untraced_runs_are_marked(tmp_path):
    write_run(tmp_path, "listops", "standard", accuracy=0.361, commit="0123456789ab+changes")
    write_run(tmp_path, "listops", "flash", accuracy=0.37, commit="")
    write_run(tmp_path, "listops", "linear", accuracy=0.38)
    found = table(tmp_path)
    assert line(found, "Transformer")[1] == "36.1§ [36.0]"
    assert line(found, "FlashAttention")[1] == "37.0§ [37.6]"
    assert line(found, "linear attention")[1] == "38.0 [38.8]"
    assert [r["traced"] for r in csv.DictReader(io.StringIO(as_csv(found)))][:3] == [
        "False", "False", "",
    ]  # fmt: skip
    assert any(note.startswith("§ untraced") for note in found.footnotes())


def test_block_sparse_rows_show_their_density_and_where_their_mask_comes_from(tmp_path):
    resolved = {"mask": "local:64", "density": 0.125}
    write_run(tmp_path, "listops", "sparse", more=resolved | {"mask_reconstructed": True})
    write_run(tmp_path, "text", "sparse", more=resolved | {"density": 0.25})
    write_run(tmp_path, "text", "flash")
    found = table(tmp_path)
    lines = found.sections()[0].lines
    row = [cells[0] for cells in lines].index("block-sparse")
    assert lines[row + 1][:3] == ["  density of its blocks (%)", "12.5*", "25.0"]
    assert sum("density" in cells[0] for cells in lines) == 1
    assert "* block-sparse on ListOps (generated, 2k): local:64" in found.footnotes()
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    listops = next(r for r in rows if (r["attention"], r["task"]) == ("sparse", "listops"))
    assert (listops["mask"], listops["resolved_mask"], listops["density"]) == (
        "",
        "local:64",
        "12.5",
    )


def test_a_long_source_is_a_footnote(tmp_path):
    write_run(tmp_path, "image", "standard", source="CIFAR-10 (gray), 44,849 + 9,966 examples")
    found = table(tmp_path)
    assert "Image (CIFAR-10 gray, 2k)" in found.sections()[0].lines[0]
    assert (
        "Image (CIFAR-10 gray, 2k): CIFAR-10 (gray), 44,849 + 9,966 examples" in found.footnotes()
    )
