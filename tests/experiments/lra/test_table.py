"""The LRA table: which runs count, figures worked out by hand, data kept apart, differences."""

import numpy as np
import pytest
from scipy import stats

from experiments.common.files import pack
from experiments.lra import published as lra
from experiments.lra.cells import (
    Column,
    RowKey,
    averaged,
    difference,
    make_cells,
    mean_speedup,
    paper_value,
    speedup,
)
from experiments.lra.runs import PRETRAINED, Run, read_runs
from experiments.lra.table import Table
from tests.experiments.lra.made_runs import write_run

STANDARD, FLASH = RowKey("standard", "", ""), RowKey("flash", "", "")
LISTOPS = Column("listops", "generated", 2048)
CIFAR = "CIFAR-10 (gray), 44,849 + 9,966 examples"
# A measured training step of ListOps.
STEP = {"task": "listops", "attention": "standard", "option": "", "length": 2048, "pair": 1}
STEP |= {"batch": 32, "layers": 2, "dim": 64, "heads": 2, "precision": "bf16"}
STEP |= {"mode": "compile+graph", "device": "GPU A", "ms_median": 8.0, "peak_mib": 600.0}
STEP |= {"status": "ok"}


def run(attention="standard", task="listops", **options):
    """What the fixtures take."""
    return attention, task, options


@pytest.fixture
def table(tmp_path):
    """The table of made-up runs, which lie in tmp_path/00, tmp_path/01, ..."""

    def made(*runs, steps=None):
        for number, (attention, task, options) in enumerate(runs):
            write_run(tmp_path / f"{number:02}", task, attention, **options)
        return Table(read_runs(str(tmp_path)), steps)

    return made


@pytest.fixture
def cells(table):
    """The cells of made-up runs."""
    return lambda *runs: table(*runs).cells


def value(found, first, head):
    """A cell of the first table."""
    heads, *lines = found.sections["accuracy"]
    (line,) = [cells for cells in lines if cells[0] == first]
    return line[heads.index(head)]


def test_the_papers_averages_follow_from_its_cells():
    stated = (59.3, 59.8, 59.6, 54.9, 59.6, 58.9, 56.0, 57.6, 57.9)
    for name, mean in zip(lra.ATTENTIONS, stated, strict=True):
        accuracies = [lra.PAPER[name, task] for task in lra.AVERAGED]
        assert sum(accuracies) / 5 == pytest.approx(mean, abs=0.16), name
    # on Path-X its recipe starts from the weights of Pathfinder-64
    for task, expected in (("pathfinder128", 61.4), ("listops", None)):
        assert paper_value(RowKey("flash", "", PRETRAINED), Column(task, "")) == expected
        assert paper_value(RowKey("flash", "", "google"), Column(task, "")) is None


# ---- which runs count

# Runs of ListOps; each attention shows one thing.
ACCURACIES = [
    *(run(seed=seed, accuracy=x) for seed, x in enumerate((0.36, 0.37, 0.41))),
    run("flash", accuracy=0.361),
    run("linformer", steps=400, accuracy=0.25),
    *(run("linear", accuracy=0.36, **more) for more in ({}, {"seed": 1, "steps": 100})),
    *(run("performer", seed=seed, accuracy=0.37) for seed in (0, 1)),
    run("performer", seed=2, accuracy=0.10, settings={"lr": 1.0}, date="2026-02-01"),
    *(run("local", accuracy=x, date=f"2026-0{10 * x:.0f}-01") for x in (0.3, 0.4)),
    run("reformer", accuracy=0.361, commit="0123456789ab+changes"),
    run("smyrf", accuracy=0.37, commit=""),
    run("sparse", accuracy=0.18, more={"accuracy": 0.319}),  # the best of its checkpoints
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
    "block-sparse": "31.9 ¶ 17.7 [37.0]",  # it ended at the most frequent class, 17.5
}


def test_accuracies_are_marked_and_what_is_left_out_is_named(table):
    found = table(*ACCURACIES)
    head = "ListOps (generated, 2k)"
    assert {name: value(found, name, head) for name in CELLS} == CELLS
    assert value(found, "Linformer", "average") == "25.0† (1 of 5) [35.6]"
    assert value(found, "Linformer", "speed-up") == "1.00x [2.5x]"
    ends = ("seed1, cut short", "seed2, other settings", "seed0, seed 0 again")
    assert all(note.endswith(end) for note, end in zip(found.notes, ends, strict=True))
    notes = "\n".join(found.footnotes())
    assert "seed0: 400 of 1000 steps" in notes and "\n§ untraced" in notes


def test_rows_name_the_form_of_an_attention_and_what_is_padding(cells):
    form = {"attention": {"name": "reformer", "scale": 1.0, "hashes": 2, "bucket": None}}
    black = {"task": {"pad_black": True}, "attention": {"name": "flash", "padding": "hide"}}
    found = cells(run("reformer", settings=form), run("flash", "pathfinder32", settings=black))
    assert {row.text for row, _ in found} == {
        "Reformer, scale=1.0",
        "FlashAttention, black-padding",
    }


def test_of_as_many_seeds_the_newer_settings_count_and_a_complete_run_first(cells):
    old, new = {"date": "2026-01-01", "accuracy": 0.3}, {"date": "2026-02-01", "accuracy": 0.4}
    found = cells(
        run(settings={"lr": 1e-4}, **old), run(settings={"lr": 1e-3}, **new),
        run("flash", **old), run("flash", steps=400, **new),
    )  # fmt: skip
    assert [cell.accuracy for cell in found.values()] == pytest.approx([40, 30])


def test_a_setting_that_older_runs_lack_counts_as_its_default(cells):
    """Two seeds, and a third from after a setting came, whose default it has."""
    usual = {"lr": 1e-3, "model": {"dim": 64}}
    newer = {"mask_share": 0.5, "model": {"dim": 64, "setting": "nystrom", "rotary": None}}
    runs = [run(seed=seed, settings=usual) for seed in (0, 1)]
    (found,) = cells(*runs, run(seed=2, settings=usual | newer)).values()
    assert len(found.runs) == 3
    (found,) = cells(run(seed=3, settings=usual | {"mask_share": 0.2})).values()
    assert len(found.runs) == 3  # another value: another cell


def test_a_killed_run_shows_its_best_validation_accuracy_as_such(tmp_path):
    path = write_run(tmp_path, "listops", "standard", accuracy=0.4, steps=500, result=False)
    with open(path / "journal.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # half-written
    write_run(tmp_path, "listops", "standard", 1, accuracy=0.4, steps=500)
    found = Table(read_runs(str(tmp_path)))
    # 40 (1 - exp(-2)) of both, since one was not tested
    assert value(found, "Transformer", "ListOps (generated, 2k)").endswith("(2)†‡ [36.0]")
    assert any("500 of 1000 steps" in note for note in found.footnotes())


def test_pre_training_enters_no_cell(table, tmp_path):
    found = table(run(), run(task="image", settings={"pretrain": "masked"}))
    assert [column.task for _, column in found.cells] == ["listops"]
    assert found.notes == [f"left out: {tmp_path}/01/image/standard/seed0, pre-training"]


def test_sources_and_lengths_of_data_have_columns_of_their_own(table):
    held_out = {"task": {"held_out": 0.1}}
    found = table(
        run(accuracy=0.50), run(accuracy=0.30, source="official"),
        run(task="text", length=1024, source="official", accuracy=0.65),
        run(task="text", length=512, source="official", settings=held_out),
        run(task="text", length=4096), run(task="image", source=CIFAR),
    )  # fmt: skip
    assert [c.text for c in found.columns] == [
        "ListOps (generated, 2k)", "ListOps (official, 2k)", "Text (generated, 4k)",
        "Text (official, 10 % held out, 512)", "Text (official, 1k)", "Image (CIFAR-10 gray, 2k)",
    ]  # fmt: skip
    mean = averaged(found.cells, STANDARD, found.columns)
    # official data, the official rule
    assert sorted(cell.accuracy for cell in mean.values()) == pytest.approx([30, 40, 65])
    assert f"Image (CIFAR-10 gray, 2k): {CIFAR}" in found.footnotes()


def test_averages_are_over_the_five_tasks_and_compare_with_the_same_of_the_paper(table):
    # same movie and Path-X are not of the five
    tasks = {"listops": 0.37, "text": 0.65, "image": 0.42, "imdb_same_movie": 0.99}
    made = table(
        *(run(task=task, accuracy=accuracy) for task, accuracy in tasks.items()),
        run(task="pathfinder128", accuracy=0.9),
        run("linear", settings={"recipe": "google"}),
        run("linear", "text", steps=500, result=False, settings={"recipe": "google"}),
    )
    assert value(made, "Transformer", "average") == "48.0 (3 of 5) [47.3]"
    assert value(made, "Transformer", "Path-X (generated, 2k)").startswith("90.0")
    # another recipe is not that of the paper; a mean is marked where one of its cells is
    assert value(made, "linear attention, google", "average").split()[0] == "37.3†‡"
    assert "[" not in value(made, "linear attention, google", "average")


# ---- speed


def test_speed_ups_are_geometric_means_of_the_same_work(table):
    found = table(
        run(ms=12.0), run("flash", ms=6.0),  # 2x
        run(ms=12.0, seed=1, device="GPU B"), run("flash", ms=1.5, seed=1, device="GPU B"),  # 8x
        run(task="text", ms=36.0), run("flash", "text", ms=4.0),  # 9x
        # a second column of Text, which counts as one task
        *(run(name, "text", ms=ms, settings={"task": {"held_out": 0.1}})
          for name, ms in (("standard", 36.0), ("flash", 4.0))),
        run(task="image", ms=5.0), run("flash", "image", ms=1.0, device="GPU B"),  # none
        run(task="files", ms=5.0), run("flash", "files", ms=5.0),  # not of the paper
        run(task="pathfinder128", ms=5.0), run("flash", "pathfinder128", ms=5.0),
    )  # fmt: skip
    assert speedup(found.cells, FLASH, LISTOPS) == pytest.approx(4)
    assert speedup(found.cells, FLASH, Column("image", "generated", 2048)) is None
    assert mean_speedup(found.cells, FLASH, found.columns) == (pytest.approx(6), 2)
    assert value(found, "FlashAttention", "speed-up") == "6.00x (2 of 3) [2.4x]"


def test_speed_ups_are_of_the_same_work(tmp_path):
    google = {"recipe": "google"}
    for number, (factor, row, *runs) in enumerate((
        (None, FLASH, run(ms=4.0), run("flash", ms=1.0, length=1024)),
        *((None, FLASH, run(ms=4.0), run("flash", ms=1.0, settings=own))
          for own in ({"batch": 16}, {"precision": "fp32"}, {"model": {"dim": 8}},
                      {"compile": True})),
        # a run with a name: the Transformer of its recipe; of two of the same size, of its name
        (3.0, RowKey("performer", "", "google, relu"), run(ms=4.0), run(ms=9.0, settings=google),
         run("performer", ms=3.0, settings=google, name="relu")),
        (3.0, RowKey("flash", "", "own"), run(ms=4.0), run(ms=9.0, name="own"),
         run("flash", ms=3.0, name="own")),
        (12.0, FLASH, *(run(ms=ms, seed=s) for s, ms in enumerate((12.0, 10.0, 30.0))),
         run("flash", ms=1.0)),  # the median of the runs
    )):  # fmt: skip
        place = tmp_path / f"case{number}"
        for i, (attention, task, options) in enumerate(runs):
            write_run(place / str(i), task, attention, **options)
        found, _ = make_cells(read_runs(str(place)))
        assert speedup(found, row, LISTOPS) == pytest.approx(factor), number


def test_times_come_from_measured_steps_where_they_are_given(table):
    steps = [
        STEP | {"ms_median": 99.0, "date": "2025"},  # measured again
        STEP,
        STEP | {"attention": "flash", "ms_median": 4.0, "peak_mib": 500.0},
        STEP | {"attention": "sparse", "option": "butterfly", "ms_median": 1.0},
        STEP | {"attention": "local", "length": 1024},  # of another length
        STEP | {"attention": "linear", "status": "out of memory"},
        *(STEP | {"attention": name} for name in ("smyrf", "reformer", "performer")),
        STEP | {"attention": "linformer", "mode": "eager"},
    ]
    found = table(
        *(run(name, ms=99.0)
          for name in ("standard", "flash", "local", "linear", "sparse", "linformer")),
        run("sparse", ms=99.0, mask="butterfly"), run("smyrf", settings={"batch": 64}),
        run("reformer", settings={"model": {"layers": 4}}),
        run("performer", settings={"precision": "fp32"}), steps=steps,
    )  # fmt: skip
    rows = {
        "FlashAttention": ("2.00x [2.4x]", "500"),
        "block-sparse, butterfly": ("8.00x [2.8x]", "600"),
        "Linformer": ("– [2.5x]", "600"),  # it was measured without torch.compile
        **{name: (f"– [{paper}x]", "–") for name, paper in {
            "block-sparse": 2.8, "local attention": 1.7, "linear attention": 2.3,
            "Smyrf": 1.7, "Reformer": 1.3, "Performer": 1.8}.items()},  # of other work
    }  # fmt: skip
    for name, texts in rows.items():
        assert tuple(value(found, name, head) for head in ("speed-up", "peak MiB")) == texts, name


# ---- differences


def test_differences_are_paired_by_seed_in_the_same_recipe(table):
    seeds = enumerate(zip((0.36, 0.37, 0.38), (0.38, 0.38, 0.41), strict=True))
    pairs = [(seed, *accuracies) for seed, accuracies in seeds]
    found = table(
        *(run(seed=seed, accuracy=one) for seed, one, _ in [*pairs, (3, 0.99, None)]),
        *(run("sparse", seed=seed, accuracy=two) for seed, _, two in pairs),
        run("flash", accuracy=0.40, settings={"recipe": "google"}),
        run("linear", accuracy=0.34, steps=400),
    )
    assert "from_flash" not in found.sections
    assert found.sections["from_standard"][1:] == [
        ["block-sparse", "+2.0 ± 2.5 (3, s)"],  # 4.303 / sqrt(3)
        ["linear attention", "-2.0 (1)†"],  # cut short
    ]


def test_rows_of_other_settings_are_named(table):
    longer, same = {"steps": 2000, "model": {"dim": 32}}, {"minutes": 3.0, "eps": 1e-8}
    found = table(
        run(settings={"model": {"dim": 64}}), run("flash", settings=longer),
        run("linear", settings=same), run("linear", settings=longer, name="long"),
    )  # fmt: skip
    wanted = "differs from Transformer in steps 1000 -> 2000; model.dim 64 -> 32"
    assert found.footnotes() == [
        note for note in found.footnotes() if "differs" not in note or note.endswith(wanted)
    ]
    assert sum("FlashAttention differs" in note for note in found.footnotes()) == 1


def seeded(seed, accuracy=None, right=None, data="a"):
    """Return a run with this accuracy, or with these test examples right."""
    result = {"accuracy": accuracy}
    if right is not None:
        result = {"accuracy": float(np.mean(right)), "correct": pack(np.asarray(right, bool))}
    session = {"processes": 1, "device": "", "date": "", "versions": {}}
    file = {"task": {"name": "text", "source": "", "baselines": {}}, "data": data}
    file |= {"settings": {"attention": {"name": "flash"}, "seed": seed}, "result": result}
    return Run("", file | {"sessions": [session], "mask": None, "complete": True}, [])


def test_where_seeds_dominate_the_interval_is_that_of_the_seeds():
    at = np.arange(1000)
    ours = [seeded(i, right=(at >= 50) & (at < end)) for i, end in enumerate((650, 690, 670))]
    found = difference(ours, [seeded(seed, right=at < 600) for seed in range(3)])
    assert found is not None and found.covers == "se" and found.value == pytest.approx(2)
    alone = stats.ttest_1samp([0, 4, 2], 0).confidence_interval(0.95)
    assert found.half == pytest.approx(alone.high - 2, rel=1e-3)


def test_a_single_seed_is_paired_by_its_examples():
    right = np.arange(100) % 10
    ours, other = seeded(0, right=right < 6), seeded(0, right=right < 5)
    found = difference([ours], [other])
    assert found is not None and (found.seeds, found.covers) == (1, "e")
    assert found.value == pytest.approx(10.0)
    spread = 100 * (0.1 * 0.9 * 100 / 99) ** 0.5  # a tenth of the examples differs, by 100 points
    assert found.half == pytest.approx(stats.t.ppf(0.975, 99) * spread / 10, rel=1e-3)
    # a second seed with the same answers: the examples are no more than before
    more = difference([ours, seeded(1, right=right < 6)], [other, seeded(1, right=right < 5)])
    assert more is not None and (more.half, more.covers) == (pytest.approx(found.half), "se")


def test_what_cannot_be_paired():
    right = np.arange(8) < 4
    single = difference([seeded(0, 0.5)], [seeded(0, 0.4)])
    assert single is not None and (single.half, single.covers) == (None, "")
    assert difference([seeded(0, 0.5)], [seeded(1, 0.4)]) is None
    assert difference([seeded(0)], [seeded(0, 0.4)]) is None
    other_data = difference([seeded(0, right=right)], [seeded(0, right=right, data="b")])
    assert other_data is not None and other_data.covers == ""
    # examples count only where all seeds have them, of the same data
    for second in (seeded(1, 0.5), seeded(1, right=right, data="b")):
        pair = seeded(0, right=right), second
        part = difference(pair, pair)
        assert part is not None and part.covers == "s"
    both = [seeded(s, right=right) for s in (0, 1)]
    assert difference(both, both) == (0.0, 0.0, 2, "se")


@pytest.mark.parametrize("seeds", [1, 3])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds):
    """Two attentions whose examples are hard in common, and whose seeds are good or bad."""
    rng, held, n = np.random.default_rng(seeds), 0, 400
    for _ in range(n):
        ease = rng.normal(size=600)
        pair = []
        for shift in (0.0, 0.3):
            luck = rng.normal(scale=0.15 * (seeds > 1), size=seeds)
            noise = rng.normal(size=(seeds, 600))
            right = noise + ease + shift + luck[:, None] > 0
            pair.append([seeded(seed, right=right[seed]) for seed in range(seeds)])
        found = difference(pair[1], pair[0])
        assert found is not None and found.half is not None
        scale = (2 + 0.15**2 * (seeds > 1)) ** 0.5
        truth = 100 * (stats.norm.cdf(0.3 / scale) - 0.5)
        held += abs(found.value - truth) < found.half
    assert 0.93 <= held / n <= 0.995
