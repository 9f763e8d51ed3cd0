"""Crops around marks, classed by the direction of the paddle there."""

import numpy as np
import pytest

from experiments.pathfinder.parameters import spec
from experiments.pathfinder.studies import directions
from tests.experiments.pathfinder.studies.small_run import options


def test_crops_are_around_a_mark_and_point_where_they_say():
    each = spec(64)
    x, y = directions.crops(each, 0, 400, 16, 0)
    crops = x.view(-1, 16, 16).numpy().astype(float)
    assert y.min() == 0 and y.max() == directions.CLASSES - 1
    assert np.bincount(y).min() > 10
    around = crops[:, 6:11, 6:11].mean()
    assert around > 3 * crops.mean()  # the mark, brighter than all else
    # beyond the mark, the paddle that begins there is where its class says
    rows, columns = np.mgrid[-8:8, -8:8]
    radius, angle = np.hypot(rows, columns), np.arctan2(rows, columns)
    ring = (radius > 3.5) & (radius < 6)
    octant = np.floor(angle % (2 * np.pi) / (np.pi / 4)) % 8
    hits = [(crops * (ring & (octant == c)))[y.numpy() == c].mean() for c in range(8)]
    others = [(crops * (ring & (octant == (c + 4) % 8)))[y.numpy() == c].mean() for c in range(8)]
    assert np.mean(hits) > 2 * np.mean(others)
    shifted, same = directions.crops(each, 0, 50, 16, 3)
    assert (same == y[: len(same)]).all() and (shifted != x[: len(same)]).any()
    assert (shifted == directions.crops(each, 0, 50, 16, 3)[0]).all()


def test_it_learns(monkeypatch):
    monkeypatch.setattr(directions, "EVERY", 10)
    monkeypatch.setattr(directions, "TESTED", 200)
    small = options("directions", examples=300, steps=60, side=8, lr=3e-3, warmup=10)
    short = small | {"steps": 10}
    first = directions.learn(short)
    loss, own, other = directions.learn(small)
    assert loss < first[0] and 0 <= other <= 1 and 0.125 < own <= 1
    assert directions.learn(short) == first
    assert directions.learn(short | {"warmup": 1})[0] != first[0]


def test_it_is_tested_on_other_images_of_both_sizes(monkeypatch):
    made, crops = [], directions.crops

    def recorded(each, seed, n, side, shift):
        found = crops(each, seed, 10, side, shift)
        made.append((found[0], each, seed, n))
        return found

    def size_of(model, x, y):
        return next(each.size for other, each, *_ in made if other is x)

    monkeypatch.setattr(directions, "crops", recorded)
    monkeypatch.setattr(directions, "accuracy", size_of)
    given = {"size": 64, "other": 128, "contour": 9, "strokes": 256, "seed": 7, "steps": 1}
    assert directions.learn(options("directions", examples=50, **given))[1:] == (64, 128)
    own, other = spec(64, 9, strokes=256), spec(128, 9)
    assert [each[1:] for each in made] == [(own, 7, 50), (own, 8, 1000), (other, 8, 1000)]


@pytest.mark.parametrize(
    ("words", "with_strokes"), [([], ""), (["strokes=256"], " with the strokes of 256")]
)
def test_what_the_program_prints(run_program, monkeypatch, words, with_strokes):
    monkeypatch.setattr(directions, "learn", lambda _: (0.5, 0.75, 0.25))
    assert run_program("pathfinder.studies.directions", *words)[:2] == (
        0,
        "embedding smooth, positions waves, rotary False: loss 0.50, "
        f"test 75.0 % on 64{with_strokes}, 25.0 % on 128\n",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"side": 0}, "side=0: give a whole number"),
        ({"warmup": 0}, "warmup=0: give a whole number"),
        ({"shift": -1}, "shift=-1: give 0 to 6, half of side"),
        ({"shift": 9}, "shift=9: give 0 to 6"),
        ({"side": 100}, "side=100: give at most 64"),
        ({"size": 50}, "Pathfinder of size 50"),
        ({"size": "abc"}, "Pathfinder of size abc: choose from 32"),
        ({"other": [32, 64]}, r"Pathfinder of size \[32, 64\]: choose from 32"),
        ({"contour": [6]}, r"contour=\[6\]: choose from 6"),
        ({"lr": "fast"}, "lr='fast': give a number above 0"),
        ({"size": 32, "strokes": 128}, "strokes=128: images of size 32 can have those of 32"),
        ({"model": {"rotary": "yes"}}, "rotary is 'yes'"),
    ],
)
def test_bad_values(changes, words):
    with pytest.raises(ValueError, match=words):
        directions.learn(options("directions", examples=10, steps=1, **changes))
