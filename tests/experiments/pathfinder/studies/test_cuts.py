"""Curves with gaps, and what a run says to them."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from experiments.common.provenance import ROOT
from experiments.lra.settings import compose_settings
from experiments.pathfinder.generate import ends, make, redraw
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.render import ORIGIN
from experiments.pathfinder.studies import cuts
from experiments.pathfinder.studies.probe import seen
from experiments.pathfinder.studies.rows import CutRow
from experiments.pathfinder.studies.trained import Trained
from tests.experiments.pathfinder.studies.small_run import options, small_run

PATH_256 = ROOT / "docs/results/lra/path_256"


@pytest.mark.parametrize(("size", "contour"), [(32, 6), (64, 9), (128, 14), (256, 14)])
def test_what_is_kept_is_drawn_as_it_was(size, contour):
    each = spec(size, contour)
    images = make(each, 3, 0, 12)
    every = np.ones(images.placed.shape[:2], bool)
    assert (redraw(images, each, every) == images.pixels).all()
    none = redraw(images, each, ~every)
    assert ((none > 0).sum((1, 2)) < (images.pixels > 0).sum((1, 2))).all()
    assert (none[images.pixels == 0] == 0).all()
    assert none.max() == images.pixels.max()  # the marks stay


def test_paddles_are_left_out_in_the_middle_or_at_the_marks():
    each = spec(64, 9)
    images = make(each, 3, 0, 12)
    origin = images.info[:, ORIGIN]
    for n in (0, 1, 4, 9):
        middle, marks = (cuts.paddles_at(images, 9, n, middle=m) for m in (True, False))
        assert (middle.sum(1) == n).all() and (marks.sum(1) == n).all()
        image, paddle = np.nonzero(middle)
        assert (images.placed[image, paddle, 0] == origin[image]).all()
        number = np.arange(images.placed.shape[1]) // 2
        if n in (1, 4):
            assert not (middle & marks).any()
            inner, outer = (set(number[np.nonzero(found)[1]]) for found in (middle, marks))
            assert inner == set(range((9 - n) // 2, (9 + n) // 2))
            assert outer == {*range((n + 1) // 2), *range(9 - n // 2, 9)}
    # a gap changes the image where the curve is, between the marks
    gap = redraw(images, each, ~cuts.paddles_at(images, 9, 3, middle=True))
    assert ((gap != images.pixels).sum((1, 2)) > 10).all()


@pytest.mark.parametrize("size", [128, 256])
def test_at_both_marks_are_the_paddles_that_the_probe_sees(size):
    each = spec(size, 9)
    images = make(each, 3, 0, 20)
    assert 5 < (images.labels == 0).sum() < 15
    marks, both = cuts.paddles_at(images, 9, 2, middle=False), ends(images, each)
    for image, x in enumerate(seen(images, each)):
        left, right = both[image, marks[image]]
        for paddle, mark in ((left, x[0]), (right, x[1])):
            assert sorted(paddle.tolist()) == sorted(mark[1:3].tolist())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and that of a run with another objective."""
    place, task = tmp_path_factory.mktemp("cuts"), "task=pathfinder32"
    other = small_run(place, task, "name=pre", "pretrain=masked")
    return small_run(place, task, "task.order=tiles:8", "data_seed=3"), other


@pytest.fixture
def answers(tmp_path):
    """Rows of the program with a small probe, kept in a file of the test."""
    small = {"examples": 12, "probe_examples": 40, "probe_steps": 2, "cache_dir": tmp_path}

    def rows(folder, **changes):
        given = {"run": folder, "csv": tmp_path / "cuts.csv"} | small | changes
        return cuts.answers(options("cuts", **given))

    return rows


def shares(rows):
    return [(row.left_out, row.place, row.curve_yes / row.curve) for row in rows]


class Bright(nn.Module):
    """Says yes to images with more pixels than `limit`."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, tokens):
        yes = (tokens > 0).sum(1) > self.limit
        return torch.stack([~yes, yes], 1).float()


def use(monkeypatch, model):
    monkeypatch.setattr("experiments.pathfinder.studies.trained._model", lambda *_: model)


def test_a_run_is_asked(run, monkeypatch, answers, tmp_path):
    seeds, seen = [], cuts.seen_on_disk
    monkeypatch.setattr(
        cuts,
        "seen_on_disk",
        lambda each, seed, *rest: seeds.append(seed) or seen(each, seed, *rest),
    )
    rows = answers(run[0], erased=[0, 4], seed=1000)
    assert seeds == [1001]  # the probe is not trained on the images that it is asked about
    assert [row.left_out for row in rows] == [0, 4, 4]
    assert [row.place for row in rows] == ["the middle", "the middle", "the marks"]
    assert all(row.curve + row.other == row.images == 12 for row in rows)
    again = answers(run[0], erased=[0, 4], batch=5, csv=tmp_path / "again.csv")
    counts = [(row.curve_yes, row.curve_both, row.other_yes) for row in rows]
    assert counts == [(row.curve_yes, row.curve_both, row.other_yes) for row in again]


@pytest.mark.parametrize("size", [32, 256])
def test_answers_follow_what_is_left_out(run, monkeypatch, answers, size):
    images = make(spec(size), 1000, 0, 12)
    pixels = (images.pixels[images.labels == 1] > 0).sum((1, 2))
    use(monkeypatch, Bright(int(np.median(pixels)) - 1))
    rows = answers(run[0] if size == 32 else PATH_256, erased=[0, 6, 14])
    whole, middle, marks, none, none_too = (share for *_, share in shares(rows))
    assert whole >= 0.5 > middle >= none == none_too and marks < 0.5


def test_answers_are_paired_with_those_of_the_probe(run, monkeypatch, answers, tmp_path):
    """A model that says what the probe says is never right against it, and one that says yes to
    everything is right where the probe misses a curve."""
    monkeypatch.setattr(cuts, "BLOCK", 8)
    images = make(spec(32), 1000, 0, 20)
    probed = images.labels == 1
    probed[[0, 5, 9]] ^= True
    monkeypatch.setattr(cuts, "says_yes", lambda *_: torch.from_numpy(probed))

    class Same(nn.Module):
        def forward(self, tokens):
            pixels = tokens.reshape(len(tokens), 32, 32).numpy()
            order = [np.flatnonzero((images.pixels == each).all((1, 2)))[0] for each in pixels]
            yes = torch.from_numpy(probed[order])
            return torch.stack([~yes, yes], 1).float()

    use(monkeypatch, Same())
    monkeypatch.setattr(
        "experiments.pathfinder.studies.trained.pixel_order", lambda *_: slice(None)
    )
    rows = answers(run[0], erased=[0], examples=20)
    assert [(row.first, row.images) for row in rows] == [(0, 8), (8, 8), (16, 4)]
    for row in rows:
        assert row.curve_both == row.curve_yes == row.curve_probe
        assert row.other_both == row.other_yes == row.other_probe
    n = (images.labels == 1).sum()
    assert f"| {n} |" in cuts.table(rows) and cuts.table(rows).count("100.0 ± ") == 2
    use(monkeypatch, Bright(-1))
    rows = answers(run[0], erased=[0], examples=20, csv=tmp_path / "yes.csv")
    missed, invented = (images.labels == 1) & ~probed, (images.labels == 0) & probed
    assert sum(row.curve_yes - row.curve_both for row in rows) == missed.sum() > 0
    assert sum(row.other_probe - row.other_both for row in rows) == 0 < invented.sum()


def test_the_model_and_the_probe_get_what_a_row_says(run, monkeypatch, answers):
    kept, redraw, fitted, fit = [], cuts.redraw, [], cuts.fit

    def drawn(images, each, which):
        kept.append(which)
        return redraw(images, each, which)

    def trained(each, paddles, x, *rest, **options):
        fitted.append((paddles, len(x), options["steps"], options["seed"]))
        return fit(each, paddles, x, *rest, **options)

    monkeypatch.setattr(cuts, "redraw", drawn)
    monkeypatch.setattr(cuts, "fit", trained)
    rows = answers(run[0], erased=[4], paddles=14)
    assert fitted == [(14, 40, 2, 1001)] and len(rows) == len(kept) == 2
    images = make(spec(32), rows[0].seed, 0, 12)
    for row, found in zip(rows, kept, strict=True):
        middle = row.place == "the middle"
        assert (found == ~cuts.paddles_at(images, 14, 4, middle=middle)).all()


def test_images_are_drawn_as_those_of_the_run(tmp_path, monkeypatch, answers):
    drawn, look = [], ("task.difficulty=6", "task.strokes=128", "task.distractors=2")
    monkeypatch.setattr(cuts, "redraw", lambda images, each, _: drawn.append(each) or images.pixels)
    answers(small_run(tmp_path, "task=pathfinder64", *look), erased=[0])
    assert drawn == [spec(64, 6, strokes=128, distractors=2)]
    look = ("task.difficulty=14", "task.margins=[1,2]", "+task.documented=true")
    settings = compose_settings(["task=pathfinder128", *look])
    other = Trained(settings, nn.Identity(), np.arange(1), torch.device("cpu"), torch.float32)
    assert other.spec() == spec(128, margins=[1, 2], documented=True)


def test_shares_of_a_table():
    counts = {"curve": 100, "curve_yes": 80, "curve_probe": 60, "curve_both": 50}
    counts |= {"other": 200, "other_yes": 20, "other_probe": 60, "other_both": 10}
    what = {"images_version": 2, "run": "a", "left_out": 4, "place": "the marks", "seed": 0}
    what |= {"first": 0, "images": 300, "paddles": 1, "probe_examples": 1, "probe_steps": 1}
    row = CutRow(**what, **counts, mask="", density=None, **CutRow.origin("cpu", ""))
    cells = [cell.split(" ± ")[0].strip() for cell in cuts.table([row]).splitlines()[2].split("|")]
    # yes; as the probe: both or neither; right where the probe is wrong
    assert cells[3:7] == ["100", "80.0", "60.0", "75.0"]
    assert cells[7:11] == ["200", "10.0", "70.0", "83.3"]


def test_an_interrupted_run_continues(run, monkeypatch, answers):
    monkeypatch.setattr(cuts, "BLOCK", 8)
    first = answers(run[0], erased=[0], examples=16)
    use(monkeypatch, Bright(-1))  # another model: its rows tell which were asked again
    both = answers(run[0], erased=[0, 2], examples=20)
    assert both[:2] == first and len(both) == 9
    assert all(row.curve_yes == row.curve for row in both[2:])


def test_rows_of_a_run_that_went_on_are_refused(run, monkeypatch, answers):
    rows = answers(run[0], erased=[0])
    monkeypatch.setattr(cuts, "read_result", lambda _: {"date": rows[0].date})
    assert answers(run[0], erased=[0]) == rows
    monkeypatch.setattr(cuts, "read_result", lambda _: {"date": "2100-01-01T00:00:00+00:00"})
    with pytest.raises(ValueError, match=r"rows of run=.*, and the run ended later, 2100"):
        answers(run[0], erased=[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"paddles": 15}, "paddles=15: give 0 to 14"),
        ({"probe_steps": 0}, "probe_steps=0: give a whole number"),
        ({"run": "nowhere"}, "run=nowhere: no config.yaml there"),
        ({"erased": [0, 15]}, r"erased=\[15\]: give 0 to 14, the paddles of the curve"),
        ({"erased": 4}, "erased=4: give a list"),
        ({"erased": []}, "give a list of numbers of paddles"),
        ({"seed": 3}, "seed=3: the run was trained on images of this seed"),
        ({"device": "tpu"}, "device='tpu': choose from cpu, cuda"),
        ({"examples": True}, "examples=True: give a whole number, at least 1"),
        ({"examples": 0}, "examples=0: give a whole number"),
        ({"examples": 1}, "examples=1: all have the same label"),
        ({"batch": 1.5}, "batch=1.5: give a whole number"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_values(changes, words, run, answers):
    with pytest.raises(ValueError, match=words):
        answers(run[0], **changes)


def test_other_runs_are_refused(run, tmp_path, answers):
    with pytest.raises(ValueError, match="give a classifier of Pathfinder; this run is of path"):
        answers(run[1])
    (tmp_path / "config.yaml").write_text("task: {name: pathfinder32}\n")
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read .*setting"):
        answers(tmp_path)


def test_several_strokes_are_refused(run, tmp_path, answers):
    settings = OmegaConf.load(run[0] / "config.yaml")
    settings.task.strokes = [32, 32]
    OmegaConf.save(settings, tmp_path / "config.yaml")
    (tmp_path / "weights.pt").symlink_to((run[0] / "weights.pt").absolute())
    with pytest.raises(ValueError, match=r"has images of several strokes, \[32, 32\]"):
        answers(tmp_path)
