"""The study of masks that learn Pathfinder, from made-up runs."""

import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.common.figures import style
from experiments.lra.runs import read_runs, write_archive
from experiments.pathfinder.studies.masks import (
    FAMILIES,
    archived,
    draw,
    points,
    summary,
    table,
)
from experiments.sweep import planned
from tests.experiments.lra.made_runs import write_run

SWEEPS = Path("experiments/conf/sweep")
SETTINGS = {"label": "masks", "model": {"layers": 4}}


def runs_of(root, *wanted: tuple[str, str, float], length: int = 1024):
    """Runs of two seeds for each order, mask and accuracy."""
    for number, (order, mask, accuracy) in enumerate(wanted):
        settings = SETTINGS | {"task": {"order": order}, "init_from": f"start-{order}/seed0"}
        for seed in (0, 1):
            write_run(
                root, "pathfinder32", "sparse" if mask else "flash", seed,
                accuracy=accuracy + 0.01 * seed, mask=mask, length=length, settings=settings,
                folder=f"run{number}",
            )  # fmt: skip
    return read_runs(str(root))


def test_density_and_reach_are_those_of_the_mask(tmp_path):
    found = points(
        runs_of(
            tmp_path,
            ("hilbert", "local:66", 0.6), ("row", "local:66", 0.5), ("row", "", 0.9),
            ("row", "local:49|global:16", 0.7), ("row", "random_blocks(0.125, block=16)", 0.8),
        )
    )  # fmt: skip
    assert [p.family for p in found] == [
        "dense", "window", "window", "window along a Hilbert curve", "random blocks",
    ]  # fmt: skip
    assert [p.depth for p in found] == [1, 16, 2, 16, 4]
    assert [p.has_global for p in found] == [False, False, True, False, False]
    assert [round(p.density, 3) for p in found] == [1, 0.126, 0.124, 0.126, 0.125]
    assert found[1].seen == pytest.approx(0.45, abs=0.001) and found[2].seen == 1
    lines = table(found).splitlines()
    assert "| window | 12.6 | 16 | 45.0 | 50.5 ± 0.7 | – | 2 |" in lines
    assert any(line.startswith("| window + global tokens | 12.4 | 2 |") for line in lines)


def test_a_mask_that_never_reaches_all_pairs_has_its_place(tmp_path):
    mask = "(sliding_tiles:32x32:4x8:2x4>>tiled:32x32:4x8)"
    found = points(runs_of(tmp_path, ("tiles:4x8", mask, 0.6), ("row", "", 0.9)))
    assert [p.depth for p in found] == [1, math.inf]
    with style():
        figure = draw(found)
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["never"]


def test_depths_close_to_each_other_share_a_tick(tmp_path):
    texts = ("local:66", "local:71", "local:137")
    found = points(runs_of(tmp_path, *[("row", text, 0.6) for text in texts]))
    assert sorted(p.depth for p in found) == [8, 15, 16]
    with style():
        figure = draw(found)
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["8", "15, 16"]


def test_ranks_of_equal_values_are_shared(tmp_path):
    found = points(
        runs_of(
            tmp_path,
            ("row", "local:66", 0.6), ("row", "local:137", 0.7),
            ("row", "local:49|global:16", 0.8), ("row", "", 0.9),
        )
    )  # fmt: skip
    assert summary(found).splitlines() == [
        "standard deviation of the seeds, pooled over 4 cells: 0.71 points",
        "rank correlation with accuracy over 3 cells: "
        "pairs -0.50, layers of full reach -1.00, seen in 4 layers 1.00",
    ]
    assert summary(found[:1]).endswith("over 0 cells: –")
    equal = points(
        runs_of(tmp_path / "b", *[("row", f"local:{n}|global:16", 0.6) for n in (49, 121)])
    )
    assert summary(equal).endswith("over 2 cells: –")


def test_masks_of_one_place_stand_side_by_side(tmp_path):
    """Open and filled markers, and those of one depth, do not lie on each other."""
    texts = ("local:49|global:16", "local:121|global:16", "butterfly:16|global:8", "local:66")
    found = points(runs_of(tmp_path, *[("row", text, 0.6) for text in texts], ("row", "", 0.6)))
    with style():
        figure = draw(found)
    for axes in figure.axes:
        places = [float(x.lines[0].get_xdata()[0]) for x in axes.containers]
        assert len(places) == len(set(places)) == 4
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert labels == ["12 to 13", "25"]


def test_an_archive_gives_the_same_table(tmp_path):
    runs = runs_of(tmp_path / "a", ("hilbert", "local:66", 0.6), ("row", "", 0.9))
    for order, accuracy in (("hilbert", 0.625), ("row", 0.85)):
        write_run(
            tmp_path / "a", "pathfinder32", "flash", accuracy=accuracy, length=1024,
            settings={"task": {"order": order}}, folder=f"start-{order}",
        )  # fmt: skip
    other = {"label": "path_x_masks", "model": {"layers": 4}}
    write_run(tmp_path / "a", "pathfinder32", "flash", length=1024, settings=other, folder="other")
    runs = read_runs(str(tmp_path / "a"))
    assert len(runs) == 7
    write_archive(archived(runs), tmp_path / "b.jsonl.gz")
    kept = read_runs(str(tmp_path / "b.jsonl.gz"))
    assert len(kept) == 6 and all("correct" not in run.file["result"] for run in kept)
    for run in kept:
        steps = {line["step"] for line in run.of("val")}
        assert steps and {line["step"] for line in run.of("train")} <= steps
    made = table(points(runs))
    assert made == table(points(kept))
    assert "| dense | 100.0 | 1 | 100.0 | 90.5 ± 0.7 | +5.5 | 2 |" in made
    assert "| 60.5 ± 0.7 | -2.0 | 2 |" in made


@pytest.mark.parametrize("mask", [None, "", "local:300"])
def test_the_title_says_what_the_runs_start_from(tmp_path, mask):
    runs_of(tmp_path, ("row", "local:66", 0.6))
    if mask is not None:
        write_run(
            tmp_path, "pathfinder32", "sparse" if mask else "flash", mask=mask, length=1024,
            settings={"task": {"order": "row"}}, folder="start-row",
        )  # fmt: skip
    with style():
        title = draw(points(read_runs(str(tmp_path)))).get_suptitle()
    words = {None: "contour 14;", "": "contour 14, from dense weights;"}
    assert words.get(mask, "contour 14, from block-sparse weights;") in title


def test_other_runs_are_left_out_and_other_families_refused(tmp_path):
    write_run(tmp_path / "a", "pathfinder32", "flash", length=1024)
    with pytest.raises(ValueError, match="no run has label=masks; train first"):
        points(read_runs(str(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"task\.order=row and mask=strided:8, no family"):
        points(runs_of(tmp_path / "b", ("row", "strided:8", 0.5)))


def runs_of_sweep(name, last=None):
    """Its runs, up to an entry: Hydra takes .1 s and more for each."""
    sweep: Any = OmegaConf.to_container(OmegaConf.load(SWEEPS / f"{name}.yaml"))
    entries = list(sweep["runs"])
    for entry in entries[entries.index(last) + 1 :] if last else ():
        del sweep["runs"][entry]
    return planned(sweep, ["device=cpu", "scale=full"])


@pytest.mark.slow
def test_the_runs_of_pathfinder_start_from_dense_attention_of_their_order(tmp_path):
    runs = runs_of_sweep("path_masks")
    starts, runs = runs[:3], runs[3:]
    for run in runs:
        start = run.after.settings
        found = (start.attention["name"], start.label, start.steps)
        assert found == ("flash", "masks_start", 12000)
        assert start.task == run.settings.task and start.model == run.settings.model
    assert (len(starts), len(runs)) == (3, 50)
    has_every_family_at_equal_steps(tmp_path, runs, 1024, (1 / 4, 1 / 8))


@pytest.mark.slow
def test_the_runs_of_path_x_start_from_its_pretrained_model(tmp_path):
    runs = runs_of_sweep("path_x_masks")
    *_, last = (run.settings for run in runs_of_sweep("spt_path_x", last="c14"))
    for run in runs:
        assert run.settings.init_from == last.folder.as_posix()
        assert run.settings.model == last.model
        same = ("name", "difficulty", "examples", "generate")
        assert [run.settings.task[x] for x in same] == [last.task[x] for x in same]
    assert len(runs) == 25
    has_every_family_at_equal_steps(tmp_path, runs, 16384, (1 / 8, 1 / 32))


def has_every_family_at_equal_steps(root, runs, length, densities):
    """And at two densities. What 16,384 pixels reach takes long, and a test of the docs sees it."""
    assert len({run.settings.folder for run in runs}) == len(runs)
    assert len({(run.settings.steps, run.settings.batch) for run in runs}) == 1
    chosen = [run.settings for run in runs if run.settings.seed == 0]
    made = runs_of(root, *[(s.task["order"], s.mask or "", 0.5) for s in chosen], length=length)
    found = points(made)
    assert {p.family for p in found} == {name for name, _ in FAMILIES.values()}
    for p in found[1:]:
        assert min(abs(p.density / wanted - 1) for wanted in densities) < 0.13, p
    assert len(found) == 25 and len(FAMILIES) == 8
    assert length > 1024 or all(p.depth == 2 for p in found if p.has_global)
    sparser = [p.density < found[1].density / 1.5 for p in found if p.family == "window"]
    assert sparser == [False, False, True, True]  # of the two densities, the higher one first
