"""What models of Pathfinder look at: the probe, and the two questions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments.common.config import make as make_options
from experiments.common.rows import frame
from experiments.common.tables import MISSING
from experiments.lra.run import train
from experiments.lra.settings import compose_settings
from experiments.pathfinder.generate import VERSION, ends, make, redraw
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.render import ORIGIN
from experiments.pathfinder.studies import probe
from experiments.pathfinder.studies.probe import interval, paddles_at, seen, tables

CPU = torch.device("cpu")


@pytest.fixture
def ask(tmp_path):
    """Return a function that asks a question."""

    def asked(question: str, **changes: Any) -> str:
        places = {"rows": str(tmp_path / f"{question}.jsonl"), "cache_dir": str(tmp_path)}
        own = {"ask": question, "device": "cpu", "allow_changes": True} | places | changes
        return getattr(probe, question)(make_options(probe.Options, own), "command")

    return asked


def use(monkeypatch, model: nn.Module, *words: str) -> None:
    """Let a model stand for that of each run."""
    settings = compose_settings(["task=pathfinder32", "device=cpu", "scale=full", *words])
    monkeypatch.setattr(probe, "trained", lambda *_: (settings, model, 7))


class Bright(nn.Module):
    """Says yes to images with more pixels than `limit`."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit, self.asked = limit, []

    def forward(self, tokens):
        self.asked.append(tokens)
        yes = (tokens > 0).sum(1) > self.limit
        return torch.stack([~yes, yes], 1).float()


# ---- the probe


@pytest.mark.parametrize(("size", "contour"), [(32, 6), (128, 14)])
def test_a_probe_sees_the_paddles_from_the_marks_on(size, contour):
    each = spec(size, contour)
    images = make(each, 3, 0, 20)
    found = seen(images, each)
    assert found.shape == (20, 2, 1 + 2 * contour, 2)
    steps = np.linalg.norm(np.diff(found, axis=2), axis=-1)
    assert steps[..., 0].max() == pytest.approx(0, abs=1)  # the first paddle lies under the mark
    paddles, gaps = steps[..., 1::2], steps[..., 2::2]
    assert (abs(paddles - each.length) < 1).all() and (gaps < 2 * max(each.margins) + 4).all()
    # from both ends of one curve, or from ends of two
    same = (found[:, 0, 1:] == found[:, 1, :0:-1]).all((1, 2))
    np.testing.assert_array_equal(same, images.labels == 1)


def test_what_a_probe_sees_is_where_the_pixels_are():
    """The pixels of an image with only the marks and two paddles at each lie around those ends."""
    each = spec(128)
    images = make(each, 3, 0, 10)
    kept = paddles_at(images, 14, 4, middle=False)
    pixels, found = redraw(images, each, kept), seen(images, each)[:, :, :5].reshape(10, 10, 2)
    for image, places in zip(pixels, found, strict=True):
        lit = np.argwhere(image > 60)
        far = np.linalg.norm(lit[:, None] - places[None], axis=-1)
        assert far.min(1).max() < 5  # half a paddle, or the radius of a mark
        assert far.min(0).max() < 2


def test_paddles_at_the_marks_tell_more_than_the_marks(tmp_path, monkeypatch):
    each = spec(32, 6)
    data = probe.seen_on_disk(each, 0, 6000, tmp_path)
    monkeypatch.setattr(probe, "make", lambda *_: pytest.fail("made again"))
    again = probe.seen_on_disk(each, 0, 6000, tmp_path)
    assert all(map(torch.equal, data, again))
    (x, x_test), (y, y_test) = (part.split(4000) for part in data)
    right = []
    for k in (0, 1, 6):
        found = probe.fit(each, k, x, y, steps=300, seed=0, device=CPU)
        yes = probe.says_yes(found, x_test)
        assert torch.equal(yes, probe.says_yes(found, x_test.flip(1)))  # no mark is the first
        right.append((yes == (y_test > 0)).float().mean().item())
    assert 0.62 < right[0] < 0.8 and right[0] + 0.05 < right[1] < 0.93 and right[2] > 0.97
    blind = torch.where(torch.arange(13)[:, None] > 2, torch.nan, x_test)  # beyond one paddle
    found = probe.fit(each, 1, blind, y_test, steps=2, seed=0, device=CPU)
    assert torch.isfinite(found(blind)).all()


# ---- shortcuts


def test_shortcuts_are_measured_where_rows_are_missing(ask, tmp_path):
    sizes = {"size": [32, 64], "contour": [6, 9], "examples": 200, "tested": 100, "steps": 5}
    ask("shortcuts", **sizes, paddles=[0])
    text = ask("shortcuts", **sizes, paddles=[0, 1])
    rows = frame(tmp_path / "shortcuts.jsonl")
    assert rows.paddles.tolist() == [0] * 4 + [1] * 4 and rows.right.between(20, 100).all()
    assert "| the marks | and 1 paddle at each |" in text and text.count(" ± ") == 8


def test_a_table_has_the_newest_rows_of_the_images_made_now():
    found = ((2, 80, VERSION), (2, 90, VERSION), (3, 100, VERSION), (2, 50, VERSION - 1))
    rows = [
        {"size": 32, "contour": 6, "tested": 100, "paddles": k, "right": n, "images_version": v}
        for k, n, v in found
    ]
    assert tables(frame(rows))["shortcuts"].splitlines()[::2] == [
        "| size | contour | and 2 paddles at each | and 3 paddles at each |",
        f"| 32 | 6 | {interval(90, 100)} | {interval(100, 100)} |",
    ]


def test_the_interval_is_wilsons():
    """Its half width is that of the 95 % interval around its own middle."""
    assert interval(50, 100) == "50.0 ± 9.6" and interval(0, 100) == "0.0 ± 1.8"
    assert interval(100, 100) == "100.0 ± 1.8" and interval(900, 1000) == "90.0 ± 1.9"
    assert interval(0, 0) == MISSING


# ---- cuts


def test_paddles_are_left_out_in_the_middle_or_at_the_marks():
    each = spec(64, 9)
    images = make(each, 3, 0, 12)
    number, origin = np.arange(images.placed.shape[1]) // 2, images.info[:, ORIGIN]
    for n in (0, 1, 4, 9):
        middle, marks = (paddles_at(images, 9, n, middle=m) for m in (True, False))
        assert (middle.sum(1) == n).all() and (marks.sum(1) == n).all()
        image, paddle = np.nonzero(middle)
        assert (images.placed[image, paddle, 0] == origin[image]).all()
        if n in (1, 4):
            inner, outer = (set(number[np.nonzero(found)[1]]) for found in (middle, marks))
            assert inner == set(range((9 - n) // 2, (9 + n) // 2))
            assert outer == {*range((n + 1) // 2), *range(9 - n // 2, 9)}
    marks, both = paddles_at(images, 9, 2, middle=False), ends(images, each)
    for image, x in enumerate(seen(images, each)):  # those that the probe sees
        for paddle, mark in zip(both[image, marks[image]], x, strict=True):
            assert sorted(paddle.tolist()) == sorted(mark[1:3].tolist())


SMALL = {"tested": 12}


def test_answers_follow_what_is_left_out(ask, monkeypatch, tmp_path):
    images = make(spec(32), 1000, 0, 12)
    pixels = (images.pixels[images.labels == 1] > 0).sum((1, 2))
    use(monkeypatch, Bright(int(np.median(pixels)) - 1))
    text = ask("cuts", **SMALL, erased=[0, 6, 14])
    rows = frame(tmp_path / "cuts.jsonl")
    assert text.count("\n") == 6 and interval(rows.curve_yes[1], rows.curve[1]) in text
    assert (rows.curve + rows.other == 12).all() and (rows.step == 7).all()
    whole, middle, marks, none, none_too = rows.curve_yes / rows.curve
    assert whole >= 0.5 > middle >= none == none_too and marks < 0.5


def test_an_interrupted_study_continues(ask, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "BLOCK", 8)
    use(monkeypatch, Bright(10_000))
    ask("cuts", **SMALL | {"tested": 16}, erased=[0])
    use(monkeypatch, Bright(-1))  # another model: its rows show which were asked again
    ask("cuts", **SMALL | {"tested": 20}, erased=[0, 2])
    rows = frame(tmp_path / "cuts.jsonl")
    assert rows["first"].tolist() == [0, 8, 16, 0, 8, 16, 0, 8, 16]
    assert (rows.curve_yes == rows.curve * (rows.index >= 2)).all()


def test_images_are_drawn_as_those_of_the_run():
    look = ("task.difficulty=14", "task.margins=[1,2]", "task.strokes=192")
    settings = compose_settings(["task=pathfinder128", *look])
    assert probe.spec_of(settings) == spec(128, margins=[1, 2], strokes=192)


# ---- wrong values


def test_wrong_values_are_refused(ask, monkeypatch):
    use(monkeypatch, Bright(0), "task.generate=true", "data_seed=3")
    wrong = [
        ("shortcuts", {"paddles": [15]}, r"paddles=\[15\]"),
        ("shortcuts", {"steps": 0}, "steps=0"),
        ("cuts", {"erased": [0, 15]}, "erased=.*14"),
        ("cuts", {"seed": 3}, "seed=3"),
        ("cuts", {"tested": 1}, "tested=1"),
    ]
    for question, changes, words in wrong:
        with pytest.raises(ValueError, match=words):
            ask(question, **changes)


def test_the_model_of_a_run_is_asked(tmp_path, run_program):
    small = "model.layers=1 model.dim=16 model.heads=1 model.head_dim=16 model.mlp_dim=16".split()
    small += ["attention=linear", "steps=2", "batch=4", "scale=full", "device=cpu", "eval_every=2"]
    small += [f"runs={tmp_path}/runs", f"cache_dir={tmp_path}"]
    small += ["task=pathfinder32", "task.generate=true", "task.examples=[8,4,4]"]
    folder = compose_settings(small).folder
    train(compose_settings(small))
    words = [f"run={folder}", "tested=8", "erased=2", "device=cpu"]
    words += [f"rows={tmp_path}/cuts.jsonl", f"cache_dir={tmp_path}"]
    status, out, _ = run_program("pathfinder.studies.probe", "ask=cuts", *words)
    assert status == 0 and out.count("| 2 |") == 2
    words = [*small, "pretrain=masked"]
    train(compose_settings(words))
    with pytest.raises(ValueError, match="classifier of Pathfinder"):
        probe.trained(compose_settings(words).folder, CPU)
