"""The study of masks that learn Pathfinder, from made-up runs."""

import pytest

from experiments.lra.runs import read_runs, write_archive
from experiments.pathfinder.studies.masks import (
    archived,
    points,
    summary,
    table,
)
from tests.experiments.lra.made_runs import write_run

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


def test_other_runs_are_left_out_and_other_families_refused(tmp_path):
    write_run(tmp_path / "a", "pathfinder32", "flash", length=1024)
    with pytest.raises(ValueError, match="no run has label=masks; train first"):
        points(read_runs(str(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"task\.order=row and mask=strided:8, no family"):
        points(runs_of(tmp_path / "b", ("row", "strided:8", 0.5)))
