"""Published rows of self-pretraining: the tables of the pages follow from them."""

from functools import cache

import numpy as np
import pytest

from experiments.common.provenance import ROOT
from experiments.lra.run_files import read_runs
from experiments.lra.statistics import difference
from experiments.lra.tasks.listops_trees import CHUNK, OPERATOR, OPERATORS, _chunk

PAGES = ROOT / "docs" / "results"
LARGER = "A larger model, with rates that fall"  # a section of Image


@cache
def places(archive):
    """The runs of an archive by folder, without its seed."""
    runs = read_runs(str(PAGES / "lra" / f"{archive}.jsonl.gz"))
    return {run.place.rpartition("runs/train/")[2].removesuffix("/seed0"): run for run in runs}


@pytest.fixture(scope="module")
def pretrained():
    """Those of self-pretraining in few steps."""
    assert len(places("spt")) == 32
    return places("spt")


# archive, folder and name of the runs, density, and whether the times of a step are shown
SPT = {
    ("image", "Self-pretraining"): ("spt", "image-rotary", "", "59.4", False),
    ("image", LARGER): ("spt_image", "image-rotary", "-large", "59.4", True),
    ("text", "Self-pretraining"): ("spt", "text4k-rotary", "", "21.7", True),
    ("text", "With a rate that falls"): ("spt_text", "text4k-rotary", "-short", "21.7", True),
    ("listops", "Self-pretraining"): ("spt", "listops-rotary", "", "36.7", True),
}


@pytest.mark.parametrize(("page", "heading"), SPT)
def test_the_tables_of_self_pretraining_follow_from_the_rows(page, heading):
    text = section(page, heading).partition("\n### ")[0]
    archive, folder, name, density, timed = SPT[page, heading]
    found = places(archive)
    kinds = (f"{folder}/%s{name}-scratch", f"{folder}/%s{name}", f"{folder}-masked/%s{name}")
    flash, sparse = ([found[kind % name] for kind in kinds] for name in ("flash", "sparse"))
    for runs, start in ((flash, "FlashAttention |"), (sparse, f"block-sparse | {density}")):
        scratch, trained, tokens = (run.accuracy for run in runs)
        shown = f"{scratch:.1f} | {trained:.1f} | {trained - scratch:+.1f} | {tokens:.1f} |"
        shown += f" {runs[1].ms_per_step:.1f} |" if timed else ""
        assert f"| {start} | {shown}\n" in text
    shown = " | ".join(map(interval, sparse[:2], flash[:2]))
    last = f"{sparse[2].accuracy - flash[2].accuracy:+.1f} |"
    last += f" {sparse[1].ms_per_step - flash[1].ms_per_step:+.1f} |" if timed else ""
    assert f"| block-sparse less FlashAttention | | {shown} | | {last}\n" in text


def test_what_a_falling_rate_is_worth_on_text_follows_from_the_rows():
    text, names = section("text", "With a rate that falls"), ("flash", "sparse")
    old, new = (
        [places(archive)[f"text4k-rotary/{name}{more}"] for name in names]
        for archive, more in (("spt", ""), ("spt_text", "-short"))
    )
    dense, ours = (interval(*pair).removeprefix("+") for pair in zip(new, old, strict=True))
    assert f"have {dense} points less in the test with dense and {ours} with block-sparse" in text
    tokens = [places("spt")[f"text4k-rotary-masked/{name}"].accuracy for name in names]
    assert "more of the hidden bytes, {:.1f} and {:.1f} %, after".format(*tokens) in text


# lines of the page of all tasks: the section that they link, archive, pretrained runs, aim
OVERVIEW = [
    ("text.md#with-a-rate-that-falls", "spt_text", "text4k-rotary/{}-short", 88),
    ("image.md#a-larger-model-with-rates-that-fall", "spt_image", "image-rotary/{}-large", 80),
    ("pathfinder.md#self-pretraining", "spt_pathfinder", "pathfinder32-rotary/{}-c14-max", 92),
    ("listops.md#self-pretraining", "spt", "listops-rotary/{}", 60),
    ("listops.md#with-a-rate-that-falls", "spt_listops", "listops-rotary/{}-cosine", 60),
]


def test_the_table_of_all_tasks_follows_from_the_rows():
    text = section("lra", "With self-pretraining")
    times = []
    for link, archive, folder, aim in OVERVIEW:
        runs, found = [folder.format(name) for name in NAMES_OF], places(archive)
        shown = []
        for run in (runs[0] + "-scratch", runs[0], runs[1] + "-scratch", runs[1]):
            shown.append(f"{found[run].accuracy:.1f}" if run in found else "–")
        (row,) = [x for x in text.splitlines() if x.startswith("| [") and f"({link})" in x]
        assert f"{row}\n".endswith(line(*shown, str(aim)))
        dense, ours = (found[run].ms_per_step for run in runs)
        times.append(f"{100 * ours / dense:.0f}")
    assert times[0] == times[1]
    shown = f"takes {times[0]} % of it on Text and Image, {times[3]} and {times[4]} % on ListOps"
    assert shown in text
    last = {
        run.attention: f"{run.seconds / 60:.1f}"
        for run in read_runs(str(PAGES / "lra" / "path_x" / "scratch.jsonl.gz"))
        if run.steps == 5000 and run.seed == 1
    }
    assert f"5,000 steps take {last['sparse']} minutes in place of {last['flash']}." in text


def test_what_a_larger_model_is_worth_on_image_follows_from_the_rows():
    text = section("image", LARGER)
    found, small = places("spt_image"), places("spt")
    kinds = [f"image-rotary/{name}" for name in NAMES_OF]
    dense, ours = (found[f"{kind}-large"] for kind in kinds)
    scratch = [found[f"{kind}-large-scratch"] for kind in kinds]
    gains = [interval(found[f"{kind}-large"], small[kind]).removeprefix("+") for kind in kinds]
    assert "dense attention {} and block-sparse attention {} points above".format(*gains) in text
    assert f"| {interval(dense, ours).removeprefix('+')} points behind | no |\n" in text
    assert f"| {100 * ours.ms_per_step / dense.ms_per_step:.0f} % of its time | no |\n" in text
    behind = [small[kinds[0]].accuracy - small[kinds[1]].accuracy, dense.accuracy - ours.accuracy]
    assert "is {1:.1f} points behind dense attention, where it is {0:.1f}".format(*behind) in text
    ahead = scratch[1].accuracy - scratch[0].accuracy
    assert f"From scratch, block-sparse attention is {ahead:.1f} points ahead." in text
    ends = [100 * run.of("train")[-1]["accuracy"] for run in scratch]
    assert f"{ends[1]:.0f} % at the end, where dense attention has {ends[0]:.0f} %." in text
    old = interval(*(small[f"{kind}-scratch"] for kind in reversed(kinds))).removeprefix("+")
    assert f"With the small model it is {old} ahead." in text
    assert all(run.of("train")[-1]["accuracy"] > 0.998 for run in (dense, ours))
    lowest = {min(run.of("val"), key=lambda entry: entry["loss"])["step"] for run in (dense, ours)}
    assert [f"loss is lowest after {step:,} steps" in text for step in lowest] == [True]
    best = [100 * max(entry["accuracy"] for entry in run.of("val")) for run in (dense, ours)]
    assert "still rises to {:.1f} and {:.1f} %".format(*best) in text
    minutes = sum(run.seconds for run in found.values()) / 60
    assert f"The six runs took {minutes:.0f} minutes." in text


def test_the_tables_of_a_falling_rate_on_listops_follow_from_the_rows():
    text, found, old = section("listops", LISTOPS), places("spt_listops"), places("spt")
    pairs = {}
    for attention, (name, _) in NAMES_OF.items():
        run, tokens = (found[f"listops-rotary{x}/{attention}-cosine"] for x in ("", "-masked"))
        shown = [f"{value:.1f}" for value in (run.accuracy, tokens.accuracy, run.ms_per_step)]
        assert line(name, "36.7" if attention == "sparse" else "", *shown) in text
        pairs[attention] = run, tokens
    (dense, dense_tokens), (ours, ours_tokens) = pairs.values()
    last = [f"{ours_tokens.accuracy - dense_tokens.accuracy:+.1f}"]
    last += [f"{ours.ms_per_step - dense.ms_per_step:+.1f}"]
    name = "block-sparse less FlashAttention"
    assert line(name, "", interval(ours, dense), *last) in text
    assert f"{dense.accuracy:.1f} % dense, {ours.accuracy:.1f} % block-sparse | no |" in text
    assert f"{100 * ours.ms_per_step / dense.ms_per_step:.0f} % of its time | no |" in text
    before, scratch = (
        interval(dense, old[f"listops-rotary/flash{x}"])[1:] for x in ("", "-scratch")
    )
    assert f"{before} above the same model with a constant rate, and {scratch} above it" in text


def test_the_table_of_pathfinder_at_once_follows_from_the_rows(pretrained):
    text = section("pathfinder", "Contours of 14 at once")
    for attention in ("flash", "sparse"):
        tokens, run = (pretrained[f"pathfinder32-rotary{x}/{attention}"] for x in ("-masked", ""))
        assert not run.complete and run.accuracy is None
        shown = f"{run.steps:,} of {run.planned_steps:,}† | {run.val_accuracy:.1f} |"
        assert f"| {tokens.accuracy:.1f} | {shown}" in text


LISTOPS = "With a rate that falls"  # a section of its page
CONTOURS = {"c6": 6, "c9": 9, "c14": 14}
STARTS = {"": "pretrained", "-scratch": "from scratch"}
NAMES_OF = {"flash": ("FlashAttention", ""), "sparse": ("block-sparse", "59.4")}  # and density


def contours(runs, pool, count):
    """The runs of contours that grow, by attention and stage: ("flash", "c6-scratch")."""
    names = [f"{stage}{start}" for stage in CONTOURS for start in STARTS]
    pairs = [(attention, name) for name in names for attention in NAMES_OF]
    found = {}
    for attention, name in pairs:
        stage, _, start = name.partition("-")
        folder = f"pathfinder32-rotary/{attention}-{stage}{pool}{start and '-' + start}"
        if folder in runs:
            found[attention, name] = runs[folder]
    assert len(found) == count and all(run.complete for run in found.values())
    for (_, name), run in found.items():
        assert (run.config["task"]["difficulty"] or 14) == CONTOURS[name.partition("-")[0]]
        assert run.config["model"]["pool"] == ("max" if pool else "mean_tokens")
    return found


@pytest.fixture(scope="module")
def growing(pretrained):
    """Those with the mean of the pixels."""
    return contours(pretrained, "", 10)


def line(*cells):
    """A line of a table."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"


def check_contours(text, found, start, stages, last):
    """`last`: what follows in the first table, by attention, and for the difference."""
    runs = {key: [found[key, stage + start] for stage in stages] for key in NAMES_OF}
    for attention, (name, density) in NAMES_OF.items():
        shown = [f"{run.accuracy:.1f}" for run in runs[attention]]
        assert line(f"{name}, {STARTS[start]}", density, *shown, *last[attention]) in text
        steps = [f"{run.steps:,}" for run in runs[attention]]
        assert line(f"{name}, {STARTS[start]}", *steps, *([""] * (3 - len(steps)))) in text
    if "less" in last:
        shown = map(interval, runs["sparse"], runs["flash"])
        name = f"block-sparse less FlashAttention, {STARTS[start]}"
        assert line(name, "", *shown, *last["less"]) in text


def test_the_tables_of_contours_that_grow_follow_from_the_rows(pretrained):
    text = section("pathfinder", "Self-pretraining").partition("\n### ")[0]
    runs = places("spt_pathfinder").values()
    found = contours(places("spt_pathfinder"), "-max", len(runs))
    assert len(runs) == 12 and min(run.accuracy for run in runs) > 75
    pixels = {key: pretrained[f"pathfinder32-rotary-masked/{key}"] for key in NAMES_OF}
    last = {key: [f"{run.accuracy:.1f}"] for key, run in pixels.items()} | {"less": [""]}
    check_contours(text, found, "", CONTOURS, last)
    check_contours(text, found, "-scratch", CONTOURS, dict.fromkeys((*NAMES_OF, "less"), ("",)))
    majority = [found["flash", stage].baselines["majority"] for stage in CONTOURS]
    assert line("shortcut: majority", "", *(f"{value:.1f}" for value in majority), "") in text
    (dense, dense_scratch), (ours, ours_scratch) = (
        [found[key, stage].accuracy for stage in ("c14", "c14-scratch")] for key in NAMES_OF
    )
    assert (
        f"**Dense attention reaches {dense:.1f} %, block-sparse attention {ours:.1f} %.**" in text
    )
    gains = f"{dense - dense_scratch:.0f} points to dense and {ours - ours_scratch:.0f} to block"
    assert f"**Pretraining is worth {gains}-sparse attention**" in text


def test_the_runs_of_the_neighbourhood_are_those_of_the_page():
    text = section("pathfinder", "Self-pretraining").partition("\n### ")[0]
    near, others = (
        {
            run.place.split("/")[-2]: run
            for run in read_runs(str(PAGES / "lra" / f"{name}.jsonl.gz"))
        }
        for name in ("spt_pathfinder_2d", "spt_pathfinder")
    )
    first, second, last = (
        near[f"sparse-neighborhood-32x32-11-5ae152-{stage}-max"] for stage in CONTOURS
    )
    shown = f"has {first.accuracy:.1f}, {second.accuracy:.1f} and {last.accuracy:.1f} %, after "
    shown += f"{first.steps:,}, {second.steps:,} and {last.steps:,} steps."
    dense, default = (interval(last, others[f"{name}-c14-max"]) for name in NAMES_OF)
    shown += f" With contours of 14 it is {dense.removeprefix('-')} points behind dense attention,"
    assert f"{shown} and level with the default mask ({default})." in text
    assert f"The neighbourhood, {last.density:.1f} % of its blocks: " in text
    pixels = near["sparse-neighborhood-32x32-11-5ae152"]
    assert f"The row of its pixels, {pixels.accuracy:.1f} %, is that of a second run" in text


def test_the_tables_with_the_mean_of_the_pixels_follow_from_the_rows(growing):
    text = section("pathfinder", "With the mean of the pixels").partition("\n### ")[0]
    times = {key: growing[key, "c14"].ms_per_step for key in NAMES_OF}
    last = {key: [f"{ms:.2f}"] for key, ms in times.items()}
    last["less"] = [f"{times['sparse'] - times['flash']:+.2f}"]
    check_contours(text, growing, "", CONTOURS, last)
    check_contours(
        text, growing, "-scratch", ("c6", "c9"), dict.fromkeys(NAMES_OF, ("not run", ""))
    )


def test_runs_at_chance_answer_the_same_for_every_image(growing):
    """Seven runs, as the page says; those of one contour also log the same late in training."""
    chance = {key: run for key, run in growing.items() if run.accuracy < 60}
    assert len(chance) == 7
    for run in chance.values():
        majority = run.baselines["majority"]
        assert min(abs(run.accuracy - x) for x in (majority, 100 - majority)) < 1e-6
    for stage, start, same in (("c6", 3500, ("c6-scratch",)), ("c9", 5000, ("c9", "c9-scratch"))):
        runs = {key: run for key, run in chance.items() if key[1].startswith(stage)}
        assert len(runs) == 3 and len({tuple(run.correct) for run in runs.values()}) == 1
        late = {
            tuple(line["accuracy"] for line in run.of("train") if line["step"] >= start)
            for (_, name), run in runs.items()
            if name in same
        }
        assert len(late) == 1


def test_losses_and_aims_of_self_pretraining_on_listops_follow_from_the_rows(pretrained):
    text = section("listops", "Self-pretraining")
    flash, sparse = (pretrained[f"listops-rotary/{name}"] for name in ("flash", "sparse"))
    result = f"{flash.accuracy:.1f} % dense, {sparse.accuracy:.1f} % block-sparse"
    assert f"| 60 % with pretraining | {result} | no, nor [" in text
    assert f"| {sparse.accuracy - flash.accuracy:.1f} points above |" in text
    assert f"| {100 * sparse.ms_per_step / flash.ms_per_step:.0f} % of its time | no |\n" in text
    for name, shortcut in (
        ("first operator alone", "root operator"),
        ("most frequent digit", "majority"),
    ):
        shown = f"{flash.baselines[shortcut]:.1f}"
        assert f"| shortcut: {name} | | {shown} | {shown} | | | |\n" in text
    for attention, name in (("flash", "FlashAttention"), ("sparse", "block-sparse")):
        runs = (pretrained[f"listops-rotary/{attention}{x}"] for x in ("-scratch", ""))
        shown = " | ".join(f"{run.of('val')[-1]['loss']:.2f}" for run in runs)
        assert f"| {name} | {shown} |\n" in text


def test_accuracies_by_the_first_operator_follow_from_the_rows(pretrained):
    first, last = 98_000 // CHUNK, 100_000 // CHUNK  # the chunks with the test split
    chunks = [_chunk(0, i) for i in range(first, last + 1)]
    roots = np.concatenate([flat[np.cumsum(n) - n] for (flat, n), _ in chunks])
    test = slice(98_000 - first * CHUNK, 100_000 - first * CHUNK)
    roots, labels = roots[test], np.concatenate([labels for _, labels in chunks])[test]

    def shown(right):
        each = [100 * right[roots == OPERATOR + i].mean() for i in range(len(OPERATORS))]
        return " | ".join(f"{accuracy:.1f}" for accuracy in each)

    rule = np.array([0, 9, 4, 8])[roots - OPERATOR] == labels  # most frequent values in training
    run = pretrained["listops-rotary/flash"]
    assert 100 * rule.mean() == pytest.approx(run.baselines["root operator"])
    constant, falling = (section("listops", x) for x in ("Self-pretraining", LISTOPS))
    for attention, (name, _) in NAMES_OF.items():
        run = f"listops-rotary/{attention}"
        for start, how in (("-scratch", "from scratch"), ("", "pretrained")):
            assert line(f"{name}, {how}", shown(pretrained[run + start].correct)) in constant
        right = places("spt_listops")[f"{run}-cosine"].correct
        assert line(f"{name}, pretrained", shown(right)) in falling
        if attention == "flash":
            above = 100 * (right.astype(float) - rule)
            half = 1.96 * above.std() / len(above) ** 0.5
            assert f"{above.mean():.1f} ± {half:.1f} points above that rule" in falling
    for text in (constant.partition("\n### ")[0], falling):
        assert f"| shortcut: first operator alone | {shown(rule)} |\n" in text


def section(page, heading):
    """The text of a page from a heading on."""
    return (PAGES / f"{page}.md").read_text().split(f"# {heading}\n")[1]


def interval(ours, other):
    """The difference in points, and its 95 % interval."""
    found = difference([ours], [other])
    return f"{found.value:+.1f} ± {found.half:.1f}"
