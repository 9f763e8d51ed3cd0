"""The study of masks that learn Pathfinder, from made-up runs."""

import pytest

from experiments.common.rows import frame
from experiments.lra.runs import read_runs, write_archive
from experiments.pathfinder.generate import VERSION
from experiments.pathfinder.studies import points, summary, table, tables
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
    assert found.family.tolist() == [
        "dense", "window", "window", "window along a Hilbert curve", "random blocks",
    ]  # fmt: skip
    assert found.depth.tolist() == [1, 16, 2, 16, 4]
    assert found.has_global.tolist() == [False, False, True, False, False]
    assert found.density.round(3).tolist() == [1, 0.126, 0.124, 0.126, 0.125]
    assert found.seen.tolist()[1:3] == [pytest.approx(0.45, abs=0.001), 1]
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
    spread, ranks = summary(found).splitlines()
    assert spread.endswith("pooled over 4 cells: 0.71")
    assert ranks.endswith(
        "over 3 cells: pairs -0.50, layers of full reach -1.00, seen in all layers 1.00"
    )
    assert summary(found[:1]).endswith("over 0 cells: –")


def test_a_start_is_that_of_the_same_order_and_an_archive_gives_the_same(tmp_path, run_program):
    runs = runs_of(tmp_path / "a", ("hilbert", "local:66", 0.6), ("row", "", 0.9))
    for order, accuracy in (("hilbert", 0.625), ("row", 0.85)):
        write_run(
            tmp_path / "a", "pathfinder32", "flash", accuracy=accuracy, length=1024,
            settings={"task": {"order": order}}, folder=f"start-{order}",
        )  # fmt: skip
    runs = read_runs(str(tmp_path / "a"))
    made = table(points(runs))
    assert "| dense | 100.0 | 1 | 100.0 | 90.5 ± 0.7 | +5.5 | 2 |" in made
    assert "| 60.5 ± 0.7 | -2.0 | 2 |" in made
    write_archive(runs, tmp_path / "b.jsonl.gz")
    words = [f"runs={tmp_path}/b.jsonl.gz", f"out={tmp_path}/out"]
    status, out, _ = run_program("pathfinder.studies", *words)
    assert status == 0 and made in out and (tmp_path / "out" / "path-masks.png").exists()


def test_other_runs_are_left_out_and_other_families_refused(tmp_path):
    write_run(tmp_path / "a", "pathfinder32", "flash", length=1024)
    with pytest.raises(ValueError, match="no run has label=masks; train first"):
        points(read_runs(str(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"task\.order=row and mask=strided:8, no family"):
        points(runs_of(tmp_path / "b", ("row", "strided:8", 0.5)))


def test_shortcuts_have_wilsons_intervals_and_the_newest_rows_of_the_images_made_now():
    """The half width is that of the 95 % interval around its own middle."""
    found = ((2, 900, VERSION), (2, 50, VERSION), (3, 100, VERSION), (2, 10, VERSION - 1))
    about = {"size": 32, "contour": 6, "tested": 100}
    rows = [about | {"paddles": k, "right": n, "images_version": v} for k, n, v in found]
    assert tables(frame(rows))["shortcuts"].splitlines()[::2] == [
        "| size | contour | and 2 paddles at each | and 3 paddles at each |",
        "| 32 | 6 | 50.0 ± 9.6 | 100.0 ± 1.8 |",
    ]
