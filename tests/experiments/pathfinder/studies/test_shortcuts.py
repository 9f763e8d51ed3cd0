"""Probes of the marks and the paddles at them."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from experiments.common.checks import as_list
from experiments.common.records import read
from experiments.common.text_table import MISSING
from experiments.pathfinder.generate import VERSION, make, redraw
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.render import ORIGIN
from experiments.pathfinder.studies import probe, shortcuts
from experiments.pathfinder.studies.rows import ShortcutRow, interval


@pytest.mark.parametrize(("size", "contour"), [(32, 6), (128, 14)])
def test_a_probe_sees_the_paddles_from_the_marks_on(size, contour):
    each = spec(size, contour)
    images = make(each, 3, 0, 20)
    found = probe.seen(images, each)
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
    snake, number = images.placed[:, :, 0], np.arange(images.placed.shape[1])[None] // 2
    origin = images.info[:, ORIGIN, None]
    last = np.where(images.labels[:, None] == 1, origin, 1 - origin)
    kept = (number < 2) & (snake == origin) | (number >= 12) & (number < 14) & (snake == last)
    pixels, found = (
        redraw(images, each, kept),
        probe.seen(images, each)[:, :, :5].reshape(10, 10, 2),
    )
    for image, places in zip(pixels, found, strict=True):
        lit = np.argwhere(image > 60)
        far = np.linalg.norm(lit[:, None] - places[None], axis=-1)
        assert far.min(1).max() < 5  # half a paddle, or the radius of a mark
        assert far.min(0).max() < 2


def test_images_are_made_once_and_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "PART", 8)
    monkeypatch.setattr(probe, "RUN", 3)
    each = spec(32, 6)
    images = make(each, 5, 0, 20)
    x, labels = probe.seen_on_disk(each, 5, 3, 12, tmp_path)
    np.testing.assert_array_equal(x, probe.seen(images, each)[3:15])
    np.testing.assert_array_equal(labels, images.labels[3:15])
    for other, seed in ((each, 6), (spec(32, 9), 5)):
        others, _ = probe.seen_on_disk(other, seed, 3, 12, tmp_path)
        np.testing.assert_array_equal(others, probe.seen(make(other, seed, 3, 12), other))
    with monkeypatch.context() as patch:
        patch.setattr(probe, "VERSION", 3)
        probe.seen_on_disk(each, 5, 3, 12, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4  # a folder each
    monkeypatch.setattr(probe, "make", lambda *_: pytest.fail("made again"))
    again, _ = probe.seen_on_disk(each, 5, 0, 16, tmp_path)
    assert torch.equal(again[3:15], x)


def test_paddles_at_the_marks_tell_more_than_the_marks(tmp_path):
    each, device = spec(32, 6), torch.device("cpu")
    data = probe.seen_on_disk(each, 0, 0, 6000, tmp_path)
    (x, x_test), (y, y_test) = (part.split(4000) for part in data)
    right = []
    for k in (0, 1, 6):
        found = probe.fit(each, k, x, y, steps=300, seed=0, device=device)
        yes = probe.says_yes(found, x_test)
        assert torch.equal(yes, probe.says_yes(found, x_test.flip(1)))  # no mark is the first
        right.append((yes == (y_test > 0)).float().mean().item())
    assert 0.62 < right[0] < 0.8 and right[0] + 0.05 < right[1] < 0.93 and right[2] > 0.97
    blind = torch.where(torch.arange(13)[:, None] > 2, torch.nan, x_test)  # beyond one paddle
    found = probe.fit(each, 1, blind, y_test, steps=2, seed=0, device=device)
    assert torch.isfinite(found(blind)).all()


def test_steps_are_turned_into_the_way_between_the_marks():
    steps = torch.tensor([[[[3.0, 4], [-8, 6]], [[0, 0], [3, 4]]]])
    turned = probe._turned(steps, torch.tensor([[[1.0, 1], [7, 9]]]))
    assert torch.allclose(
        turned, torch.tensor([[[[5.0, 0], [0, 10]], [[0, 0], [5, 0]]]]), atol=1e-5
    )


def test_a_probe_is_trained_on_the_marks_in_either_order(monkeypatch):
    """Which of them is first does not depend on the label."""
    labels = torch.arange(100) % 2
    x = torch.zeros(100, 2, 1, 2)
    x[:, 1, 0, 0], x[..., 1] = 1, labels[:, None, None]  # which mark it is, and the label
    given, one_order = [], probe.Probe.one_order
    monkeypatch.setattr(probe.Probe, "one_order", lambda *a: given.append(a[1]) or one_order(*a))
    probe.fit(spec(32, 6), 0, x, labels, steps=4, seed=0, device=torch.device("cpu"))
    first, label = torch.cat(given)[:, 0, 0].T
    for each in (0, 1):
        assert 0.4 < first[label == each].mean() < 0.6


@pytest.mark.parametrize(("size", "contour"), [(32, 6), (256, 14), ([32, 64], [6, 9])])
def test_the_program_measures_what_is_missing(run_program, monkeypatch, tmp_path, size, contour):
    monkeypatch.setattr(probe, "PART", 150)
    words = ["examples=200", "tested=100", "steps=5", f"size={size}", f"contour={contour}"]
    words += [f"csv={tmp_path}/rows.csv", f"cache_dir={tmp_path}", "seed=7"]
    specs = [spec(*each) for each in product(as_list(size), as_list(contour))]
    fitted, fit = [], shortcuts.fit

    def recorded(each, k, x, y, **options):
        np.testing.assert_array_equal(x[:9], probe.seen(make(each, 7, 0, 9), each))
        fitted.append((each, k, len(x), options["steps"], options["seed"]))
        return fit(each, k, x, y, **options)

    monkeypatch.setattr(shortcuts, "fit", recorded)
    for paddles in ("[0]", "[0,1,2]"):
        status, out, error = run_program(
            "pathfinder.studies.shortcuts", *words, f"paddles={paddles}"
        )
        assert status == 0, error
    rows = read(tmp_path / "rows.csv", ShortcutRow)
    asked = [(each, 0) for each in specs] + [(each, k) for each in specs for k in (1, 2)]
    assert fitted == [(each, k, 200, 5, 7) for each, k in asked]
    assert [(spec(row.size, row.contour), row.paddles) for row in rows] == asked
    assert all(20 < row.right < 100 and row.tested == 100 for row in rows)
    assert "| the marks | and 1 paddle at each | and 2 paddles at each |" in out
    assert out.count(" ± ") == 3 * len(specs)
    assert all(interval(row.right, 100) in out for row in rows)


def test_a_table_has_the_newest_rows_of_the_images_made_now():
    what: dict[str, Any] = {
        "size": 32,
        "contour": 6,
        "seed": 0,
        "examples": 1,
        "tested": 100,
        "steps": 1,
    }
    what |= {"mask": "", "density": None} | ShortcutRow.origin("cpu", "")
    found = ((2, 80, VERSION), (2, 90, VERSION), (3, 100, VERSION), (2, 50, VERSION - 1))
    rows = [ShortcutRow(paddles=k, right=n, images_version=v, **what) for k, n, v in found]
    assert shortcuts.table(rows).splitlines()[::2] == [
        "| size | contour | and 2 paddles at each | and 3 paddles at each |",
        f"| 32 | 6 | {interval(90, 100)} | {interval(100, 100)} |",
    ]


def test_the_interval_is_wilsons():
    """Its half width is that of the 95 % interval around its own middle."""
    assert interval(50, 100) == "50.0 ± 9.6" and interval(0, 100) == "0.0 ± 1.8"
    assert interval(100, 100) == "100.0 ± 1.8" and interval(900, 1000) == "90.0 ± 1.9"
    assert interval(0, 0) == MISSING
