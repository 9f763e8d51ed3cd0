"""Images with other strokes, and what a run says to them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.lra.tasks.task import pixel_order
from experiments.pathfinder.generate import make
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.studies import strokes
from tests.experiments.pathfinder.studies.small_run import options, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("strokes")
    return small_run(place, "task=pathfinder64", "task.difficulty=6", "task.order=tiles:8")


def answers(folder, **changes):
    return strokes.answers(options("strokes", **{"run": folder, "examples": 12} | changes))


def test_it_sees_the_strokes_that_are_asked_for(run, monkeypatch):
    seen = []

    class Blind(nn.Module):  # says no
        def forward(self, tokens):
            seen.append(tokens)
            return torch.tensor([[1.0, 0.0]]).expand(len(tokens), 2)

    monkeypatch.setattr("experiments.pathfinder.studies.trained._model", lambda *_: Blind())
    order = pixel_order((64, 64), "tiles:8")
    plain, coarse = spec(64, 6), spec(64, 6, strokes=256)
    marks = replace(plain, marker_radius=coarse.marker_radius)
    for asked, parts, drawn in ((64, None, plain), (256, None, coarse), (256, ["marks"], marks)):
        seen.clear()
        rows = answers(run, strokes=[asked], parts=parts, batch=5)
        images = make(drawn, 1000, 0, 12)
        assert (torch.cat(seen).numpy() == images.pixels.reshape(12, -1)[:, order]).all()
        assert [len(batch) for batch in seen] == [5, 5, 2]
        (each,) = rows
        assert each[:2] == (asked, pytest.approx(1 - images.labels.mean()))
        assert each[2] == pytest.approx(0.3133 + images.labels.mean(), abs=1e-3)


@pytest.mark.parametrize(
    ("words", "parts"), [([], "strokes"), (["parts=[marks,thickness]"], "marks and thickness")]
)
def test_what_the_program_prints(run_program, monkeypatch, words, parts):
    monkeypatch.setattr(strokes, "answers", lambda _: [(128, 0.75, 0.5), (192.5, 0.5, 1.25)])
    status, out, _ = run_program("pathfinder.studies.strokes", *words)
    assert (status, out.splitlines()) == (
        0,
        [
            f"| {parts} of | accuracy (%) | loss |",
            "|---:|---:|---:|",
            "| 128 | 75.0 | 0.50 |",
            "| 192.5 | 50.0 | 1.25 |",
        ],
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strokes": 128}, "strokes=128: give a list of sizes"),
        ({"strokes": [64, 300]}, "strokes=300: images of size 64 can have those of 64 to 256"),
        ({"parts": "marks"}, "parts='marks': give a list from thickness, marks"),
        ({"parts": ["mark"]}, r"parts=\['mark'\]: choose from thickness"),
        ({"batch": 0}, "batch=0: give a whole number"),
    ],
)
def test_bad_values(changes, words, run):
    with pytest.raises(ValueError, match=words):
        answers(run, **changes)
