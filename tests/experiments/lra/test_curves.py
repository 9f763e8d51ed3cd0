"""Figures of training runs, from journals alone."""

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Text

from experiments.common.figures import MAX_ENTRIES, style
from experiments.lra.cells import RowKey, make_cells, speedup, with_times
from experiments.lra.curves import _smoothed, draw_accuracy_speed, draw_all, draw_curves
from experiments.lra.figures import (
    by_contour,
    groups,
    label_points,
    pattern_names,
    row_labels,
    row_styles,
)
from experiments.lra.published import STYLES
from experiments.lra.run_files import read_runs
from tests.experiments.lra.made_runs import write_run
from tests.experiments.lra.speed.made_rows import step_rows


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
    ms = {row.attention: row.ms for row in step_rows() if row.task == "listops"}
    cells = with_times(make_cells(read_runs(str(tmp_path)))[0], step_rows())
    for row, column in cells:
        faster = ms["standard"] / ms[row.attention]
        assert speedup(cells, row, column) == pytest.approx(faster)
    looks = {row.name: (cell, STYLES["flash"]) for (row, _), cell in cells.items()}
    with style():
        figure = draw_curves("", looks)
    ends = {line.get_label(): line.get_xdata()[-1] for line in figure.axes[1].lines}
    assert figure.axes[3].get_xlabel() == "steps alone on GPU A (s)"
    assert ends["FlashAttention"] == pytest.approx(ms["flash"])  # of 1,000 steps, in seconds
    assert ends["Transformer"] == pytest.approx(ms["standard"])
    plt.close(figure)
    plots = draw_all(read_runs(str(tmp_path)), tmp_path / "plots", steps=step_rows())
    assert "steps alone" in plots[1].with_suffix(".svg").read_text()


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


def test_single_runs_are_called_so_and_have_no_bars(tmp_path):
    write_run(tmp_path, "listops", "standard")
    write_run(tmp_path, "listops", "flash", steps=900)
    found = drawn(tmp_path, tmp_path / "plots")
    assert "single runs; open: cut short" in found["accuracy-speed"]
    assert "bars" not in found["accuracy-speed"]


def test_file_names_do_not_depend_on_the_number_of_examples(tmp_path):
    write_run(tmp_path, "image", "linear", source="CIFAR-10 (gray), 44,849 + 9,966 examples")
    assert set(drawn(tmp_path, tmp_path / "plots")) == {"curves-image-cifar-10-gray-2k"}


def test_data_of_two_sizes_have_a_figure_each(tmp_path):
    for number in (100, 200):
        source = f"generated, {number} + 50 + 50 examples"
        write_run(tmp_path / str(number), "listops", "standard", source=source)
    found = drawn(tmp_path, tmp_path / "plots")
    names = {f"curves-listops-generated-2k-{n}-50-50-examples" for n in (100, 200)}
    assert names < set(found)


def test_many_attentions_take_several_figures_with_the_transformer_in_each(tmp_path):
    for name in STYLES:
        write_run(tmp_path, "listops", name)
    found = drawn(tmp_path, tmp_path / "plots")
    first, second = (found[f"curves-listops-generated-2k{more}"] for more in ("", "-2"))
    assert "Transformer" in first and "Transformer" in second
    assert ("FlashAttention" in first, "FlashAttention" in second) == (True, False)
    assert ("Smyrf" in first, "Smyrf" in second) == (False, True)


@pytest.mark.parametrize("count", range(1, 30))
def test_groups_fit_a_legend_and_leave_nothing_out(count):
    found = groups(list(range(count)), other_entries=2)
    assert all(len(part) + 2 <= MAX_ENTRIES and part[0] == 0 for part in found)
    assert [item for part in found for item in part[1:]] == list(range(1, count))


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


def test_contours_that_do_not_fit_one_figure_have_one_each(tmp_path):
    for contour in (6, 9, 14):
        for name in ("flash", "sparse"):
            for run in ("", "scratch"):
                settings = {"task": {"difficulty": None if contour == 14 else contour}}
                more = {"folder": f"{name}{contour}{run}", "settings": settings}
                write_run(tmp_path, "pathfinder32", name, name=run or None, **more)
    found = drawn(tmp_path, tmp_path / "plots")
    stem = "curves-pathfinder-generated-2k-contour"
    assert set(found) == {f"{stem}-6", f"{stem}-9", f"{stem}-14"}
    assert all("FlashAttention, scratch" in text for text in found.values())
    assert "contour 6;" in found[f"{stem}-6"]


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


def test_labels_of_points_do_not_overlap():
    with style():
        figure, axes = plt.subplots(figsize=(3.3, 3))
        points = [(1 + i / 50, 40 + i / 50, f"attention {i}", STYLES["flash"]) for i in range(6)]
        axes.plot([1, 3], [39, 42])
        label_points(figure, axes, points)
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(label) for label in axes.texts]  # without lines
    plt.close(figure)
    assert len(boxes) == 6
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_titles_of_panels_side_by_side_do_not_meet(tmp_path):
    for task in ("image", "pathfinder32"):
        write_run(tmp_path, task, "standard", source="CIFAR-10 (gray), 44,849 + 9,966 examples")
    cells, _ = make_cells(read_runs(str(tmp_path)))
    with style():
        figure = draw_accuracy_speed(cells, [column for _, column in cells])
        figure.draw_without_rendering()
        left, right = (axes.title.get_window_extent() for axes in figure.axes)
    plt.close(figure)
    assert left.x1 < right.x0


def test_a_run_without_validation_or_base_still_has_its_curve(tmp_path):
    path = write_run(tmp_path, "text", "linear", result=False) / "journal.jsonl"
    kept = [line for line in path.read_text().splitlines(True) if '"val"' not in line]
    path.write_text("".join(kept))
    assert set(drawn(tmp_path, tmp_path / "plots")) == {"curves-text-generated-2k"}


def test_a_run_that_has_just_begun_is_refused(tmp_path):
    path = write_run(tmp_path, "text", "linear", result=False) / "journal.jsonl"
    path.write_text(path.read_text().splitlines(True)[0])
    with pytest.raises(ValueError, match="no run has a measurement yet"):
        draw_all(read_runs(str(tmp_path)), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_smoothing_averages_and_keeps_the_ends():
    y = np.array([0.0, 3.0, 0.0, 3.0, 9.0])
    np.testing.assert_allclose(_smoothed(y, 0.4), [1.5, 1.0, 2.0, 4.0, 6.0])
    np.testing.assert_array_equal(_smoothed(y, 0.0), y)


def test_masks_of_one_attention_differ_in_marker_and_dashes():
    keys = [RowKey("sparse", mask, "") for mask in ("a", "b", "c")]
    styles = row_styles([*keys, RowKey("flash", "", "")])
    assert len({styles[key].line for key in keys}) == 3
    assert len({styles[key].marker for key in keys}) == 3
    assert len({styles[key].color for key in keys}) == 1
    assert len({found.color for found in row_styles(keys).values()}) == 3  # nothing else is drawn


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
