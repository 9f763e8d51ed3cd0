"""Rows of measured training steps: what makes them the same, tables by hand, figures."""

from dataclasses import replace

import pytest

from experiments.common.records import Records
from experiments.lra import published as lra
from experiments.lra.speed.plot import draw_all
from experiments.lra.speed.rows import SWEEP, StepRow, newest
from experiments.lra.speed.table import (
    as_markdown,
    by_length,
    by_task,
    fastest,
    gain,
    mean_gain,
    step_ms,
    tables,
)
from tests.experiments.lra.speed.made_rows import ROW, step_rows


def test_the_same_measurement_is_found_whatever_its_result(tmp_path):
    records = Records(tmp_path / "s.csv", StepRow)
    records.append(replace(ROW, mask="local:64", density=0.5))  # known after the measurement
    same = replace(ROW, status="", ran="", ms_median=None, commit="x", date="2027", command="y")
    assert records.find(same) == records.rows[0]
    for change in (
        {"task": "text"}, {"option": "butterfly"}, {"batch": 8}, {"device": "GPU B"},
        {"mode": "eager"}, {"source": "other"}, {"torch": "2.12"},
    ):  # fmt: skip
        assert records.find(replace(ROW, **change)) is None
    rows = [ROW, replace(ROW, source="def", ms_median=4.0)]
    assert [row.ms_median for row in newest(rows)] == [4.0]


def test_the_mean_speed_up_is_geometric_over_the_five_tasks_alone():
    base = [replace(ROW, task=task, ms_median=8.0) for task in (*lra.AVERAGED, "pathfinder128")]
    times = (4.0, 4.0, 1.0, 1.0, 8.0, 0.01)  # 2x 2x 8x 8x 1x, and one that does not count
    flash = [
        replace(row, attention="flash", ms_median=ms) for row, ms in zip(base, times, strict=True)
    ]
    rows = [*base, *flash]
    assert gain(flash[2], rows) == pytest.approx(8.0)
    assert mean_gain(flash, rows) == (pytest.approx(256**0.2), 5)
    flash_line = by_task(rows, step_ms, memory=True)[2]
    assert [flash_line[i] for i in (0, 1, -1)] == ["FlashAttention", "4 (2.00x) 1000", "3.03x"]


def test_speed_ups_are_of_the_same_batch_and_device():
    flash = replace(ROW, attention="flash", ms_median=2.0)
    assert gain(flash, [replace(ROW, batch=16)]) is None
    assert gain(flash, [replace(ROW, device="GPU B")]) is None
    assert gain(flash, [ROW]) == pytest.approx(4.0)


def test_a_missing_task_is_counted_in_the_mean_and_shown_as_missing():
    rows = [ROW, replace(ROW, task="text"), replace(ROW, attention="flash", ms_median=4.0)]
    lines = by_task(rows, step_ms, memory=False)
    assert lines[2] == ["FlashAttention", "4 (2.00x)", "–", "2.00x (1 of 5)"]


def test_lengths_that_do_not_fit_say_so():
    sweep = [row for row in step_rows() if row.task == SWEEP]
    lines = by_length(sweep, step_ms, memory=True)
    assert lines[0] == ["", "1k", "2k", "4k", "8k", "16k", "32k", "64k"]
    assert lines[1][-3:] == ["128 (1.00x) 14400", "out of memory", "out of memory"]
    assert "Transformer, sweep, 64k: out of memory: Tried to allocate 64 GiB" in tables(sweep)


def test_the_fastest_other_at_each_length_from_4k_on():
    sparse = replace(ROW, task=SWEEP, attention="sparse", length=4096, ms_median=2.0)
    rows = [
        replace(sparse, length=1024),
        sparse,
        replace(sparse, option="butterfly", ms_median=1.6),
        replace(sparse, attention="linear", ms_median=2.4),
        replace(sparse, attention="flash", ms_median=4.0),
    ]
    assert fastest(rows) == [
        "4k: block-sparse, butterfly 1.6 ms, the fastest other linear attention 2.4 ms, 1.50x"
    ]


def test_tables_are_for_steps_and_layers_and_name_the_masks_with_their_densities():
    text = as_markdown(step_rows())
    assert text.count("### GPU A, bf16: ") == 4 and "| FlashAttention |" in text
    row = replace(ROW, attention="sparse", mask="butterfly:64", density=0.25)
    assert "block-sparse at 2048 tokens: butterfly:64, density 25.0 %" in tables([ROW, row, row])


def test_figures_are_drawn_from_the_rows(tmp_path):
    paths = draw_all(step_rows(), tmp_path)
    assert all(path.stat().st_size > 1000 for path in paths)
    assert [path.name for path in paths] == [
        "lra-speedup-gpu-a-bf16.png",
        "lra-speedup-gpu-a-bf16.svg",
        "lra-length-gpu-a-bf16.png",
        "lra-length-gpu-a-bf16.svg",
    ]
    svg = paths[3].read_text()
    assert "128k tokens a batch" in svg and "Transformer, where it fits" in svg


def test_without_memory_or_a_base_there_is_less_to_draw(tmp_path):
    rows = [replace(row, peak_mib=None) for row in step_rows() if row.attention != "standard"]
    names = {path.stem for path in draw_all(rows, tmp_path)}
    assert names == {"lra-length-gpu-a-bf16"}
