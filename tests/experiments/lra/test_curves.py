"""Figures of training runs, from journals alone."""

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.common.figures import MAX_ENTRIES, style
from experiments.lra.cells import RowKey, make_cells, speedup
from experiments.lra.curves import _smoothed, draw_all, draw_curves
from experiments.lra.figures import (
    by_contour,
    groups,
    pattern_names,
    row_labels,
)
from experiments.lra.published import STYLES
from experiments.lra.runs import read_runs
from tests.experiments.lra.made_runs import write_run
from tests.experiments.lra.test_cells import STEP


def drawn(root, out):
    paths = draw_all(read_runs(str(root)), out)
    assert all(path.stat().st_size > 1000 for path in paths)
    assert {path.suffix for path in paths} == {".png", ".svg"}
    return {path.stem: path.with_suffix(".svg").read_text() for path in paths}


def test_curves_of_each_task_and_accuracy_against_speed(tmp_path):
    for task in ("listops", "pathfinder128"):
        write_run(tmp_path, task, "standard", accuracy=0.6, ms=40.0)
        for seed in (0, 1):
            write_run(tmp_path, task, "flash", seed, accuracy=0.61 + 0.01 * seed, ms=10.0)
        write_run(tmp_path, task, "sparse", mask="butterfly", accuracy=0.58, ms=8.0, steps=500)
        write_run(tmp_path, task, "sparse", mask="local:256", accuracy=0.5, ms=7.0)
    found = drawn(tmp_path, tmp_path / "plots")
    assert set(found) == {
        "curves-listops-generated-2k", "curves-path-x-generated-2k", "accuracy-speed",
    }  # fmt: skip
    for text in ("block-sparse, butterfly", "shortcut: root operator", "wall time (s)"):
        assert text in found["curves-listops-generated-2k"]
    assert "training speed-up" in found["accuracy-speed"]
    assert "bars: standard deviation of the seeds; no bar: a single run" in found["accuracy-speed"]
    assert "open: cut short" in found["accuracy-speed"]


def test_measured_steps_replace_the_times_of_runs_that_shared_a_gpu(tmp_path):
    write_run(tmp_path, "listops", "standard", ms=40.0)
    write_run(tmp_path, "listops", "flash", ms=40.0)
    steps = [STEP, STEP | {"attention": "flash", "ms_median": 2.0}]
    cells, _ = make_cells(read_runs(str(tmp_path)), steps)
    factors = {row.attention: speedup(cells, row, column) for row, column in cells}
    assert factors == {"standard": 1, "flash": pytest.approx(4)}
    looks = {row.name: (cell, STYLES["flash"]) for (row, _), cell in cells.items()}
    with style():
        figure = draw_curves("", looks)
    ends = {line.get_label(): line.get_xdata()[-1] for line in figure.axes[1].lines}
    assert figure.axes[3].get_xlabel() == "steps alone on GPU A (s)"
    assert ends["FlashAttention"] == pytest.approx(2)  # of 1,000 steps, in seconds
    plt.close(figure)


@pytest.mark.parametrize(
    ("ms", "end", "unit"), [(100.0, 100, "s"), (600.0, 10, "min"), (9e3, 2.5, "h")]
)
def test_axes_have_percent_and_the_unit_of_a_time_as_long(tmp_path, ms, end, unit):
    write_run(tmp_path, "listops", "standard", ms=ms)
    ((_, cell),) = make_cells(read_runs(str(tmp_path)))[0].items()
    with style():
        figure = draw_curves("", {"one": (cell, STYLES["flash"])})
    found = [axes.lines[1].get_xydata()[-1] for axes in figure.axes]  # of the validation
    share = 0.4 * (1 - np.exp(-4))
    y = 100 * share, 2.3 * (1 - share)
    assert np.concatenate(found) == pytest.approx([1000, y[0], end, y[0], 1000, y[1], end, y[1]])
    assert figure.axes[3].get_xlabel() == f"wall time ({unit})"
    plt.close(figure)


def test_validation_accuracies_are_not_drawn_against_speed(tmp_path):
    for name in ("standard", "flash"):
        write_run(tmp_path, "listops", name, accuracy=None)
    assert set(drawn(tmp_path, tmp_path / "plots")) == {"curves-listops-generated-2k"}


def test_many_attentions_take_several_figures_with_the_transformer_in_each(tmp_path):
    for name in STYLES:
        write_run(tmp_path, "listops", name)
    found = drawn(tmp_path, tmp_path / "plots")
    first, second = (found[f"curves-listops-generated-2k{more}"] for more in ("", "-2"))
    assert "Transformer" in first and "Transformer" in second
    assert ("FlashAttention" in first, "FlashAttention" in second) == (True, False)
    assert ("Smyrf" in first, "Smyrf" in second) == (False, True)


def test_groups_fit_a_legend_and_leave_nothing_out():
    for count in range(1, 30):
        found = groups(list(range(count)), other_entries=2)
        assert all(len(part) + 2 <= MAX_ENTRIES and part[0] == 0 for part in found), count
        assert [item for part in found for item in part[1:]] == list(range(1, count)), count


def test_rows_that_do_not_fit_a_legend_are_divided_by_their_contours():
    labels = ("rotary", "rotary, contour 6", "rotary, contour 6, scratch", "rotary, contour 9")
    rows = [RowKey(name, "", label) for name in ("flash", "sparse") for label in labels]
    assert by_contour(rows) == {"": rows}
    found = by_contour(rows, other_entries=1)
    assert {name: len(part) for name, part in found.items()} == {
        "contour 14": 2, "contour 6": 4, "contour 9": 2,
    }  # fmt: skip
    assert all(row.label.startswith("rotary, contour 6") for row in found["contour 6"])
    nine = [RowKey(name, "", "") for name in STYLES]
    assert by_contour(nine, other_entries=2) == {"": nine}


def test_names_of_rows_leave_out_what_all_share():
    mask = "(butterfly:64|local:64>>snap:64)|global:1"
    assert pattern_names(mask) == "butterfly + local + global"
    assert pattern_names("block_diagonal(256)") == "block diagonal"
    google = [RowKey("flash", "", "google"), RowKey("sparse", mask, "google")]
    assert list(row_labels(google).values()) == ["FlashAttention", "block-sparse"]
    path = [RowKey("sparse", mask, "row, contour 9"), RowKey("sparse", mask, "row")]
    assert list(row_labels(path).values()) == ["contour 9", "contour 14"]
    masks = [RowKey("sparse", text, "") for text in ("", "local:64", "local:128", "strided:4")]
    assert len(set(row_labels(masks).values())) == 4
    assert row_labels(masks)[masks[3]] == "block-sparse, strided"


def test_a_run_that_has_just_begun_is_refused(tmp_path):
    (write_run(tmp_path, "text", "linear", result=False) / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match="no run has a measurement yet"):
        draw_all(read_runs(str(tmp_path)), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_smoothing_averages_and_keeps_the_ends():
    y = np.array([0.0, 3.0, 0.0, 3.0, 9.0])
    np.testing.assert_allclose(_smoothed(y, 0.4), [1.5, 1.0, 2.0, 4.0, 6.0])
    np.testing.assert_array_equal(_smoothed(y, 0.0), y)


def test_pre_training_has_curves_of_its_own(tmp_path):
    write_run(tmp_path, "image", "flash", length=1024)
    masked = {"pretrain": "masked"}
    write_run(tmp_path, "image", "flash", folder="pretrained", length=1024, settings=masked)
    found = drawn(tmp_path, tmp_path / "plots")
    assert set(found) == {"curves-image-generated-1k", "curves-image-generated-1k-pretraining"}
    shown = {name: "shortcut: majority" in text for name, text in found.items()}  # of classes
    assert shown == {
        "curves-image-generated-1k": True,
        "curves-image-generated-1k-pretraining": False,
    }
