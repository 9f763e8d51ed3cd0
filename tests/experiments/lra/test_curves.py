"""Figures from journals alone."""

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.common.figures import PAGE, RC, legend
from experiments.curves import _smoothed, draw_accuracy_speed, draw_all, row_styles
from experiments.lra.cells import RowKey, make_cells
from experiments.lra.run_files import read_runs
from tests.experiments.lra.made_runs import write_run


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
        "curves-listops-generated-2k", "curves-pathfinder128-generated-2k", "accuracy-speed",
    }  # fmt: skip
    for text in ("block-sparse, butterfly", "shortcut: root operator", "wall time (s)"):
        assert text in found["curves-listops-generated-2k"]
    assert "training speed-up" in found["accuracy-speed"]


def test_titles_of_panels_side_by_side_do_not_meet(tmp_path):
    for task in ("image", "pathfinder32"):
        write_run(tmp_path, task, "standard", source="CIFAR-10 (gray), 44,849 + 9,966 examples")
    cells, _ = make_cells(read_runs(str(tmp_path)))
    with matplotlib.rc_context(RC):
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
    styles = row_styles(keys)
    assert len({styles[key].line for key in keys}) == 3
    assert len({styles[key].marker for key in keys}) == 3
    assert len({styles[key].color for key in keys}) == 1


def test_pre_training_has_curves_of_its_own(tmp_path):
    write_run(tmp_path, "image", "flash", length=1024)
    masked = {"pretrain": "masked_pixels"}
    write_run(tmp_path, "image", "flash", folder="pretrained", length=1024, settings=masked)
    found = drawn(tmp_path, tmp_path / "plots")
    assert set(found) == {"curves-image-generated-1k", "curves-image-generated-1k-pretraining"}


@pytest.mark.parametrize("words", [2, 8, 40])
def test_a_legend_is_no_wider_than_the_figure(words):
    with matplotlib.rc_context(RC):
        figure, axes = plt.subplots(figsize=(PAGE, 3))
        for i in range(3):
            axes.plot([0, 1], label=" ".join([f"mask{i}"] * words))
        legend(figure, [axes], columns=3)
        drawn = figure.legends[0]
        assert len(figure.legends) == 1 and len(drawn.get_texts()) == 3
        assert drawn.get_window_extent().width <= figure.bbox.width
        assert drawn._ncols == {2: 3, 8: 2, 40: 1}[words]  # type: ignore
        plt.close(figure)
