"""Rows of the studies of Pathfinder. `images_version` is that of the generator."""

from dataclasses import dataclass

from experiments.common.records import Row
from experiments.common.text_table import MISSING


@dataclass(frozen=True, kw_only=True)
class ShortcutRow(Row):
    """How many held-out images a probe of the marks and the paddles at them gets right."""

    images_version: int
    size: int
    contour: int
    paddles: int  # at each mark that the probe sees
    seed: int
    examples: int  # images that the probe is trained on
    tested: int  # held-out images
    steps: int
    right: int  # of the held-out images

    WHAT = "images_version size contour paddles seed examples tested steps".split()
    SOURCES = ("experiments/pathfinder",)
    COMMAND = "python -m experiments.pathfinder.studies.shortcuts"


@dataclass(frozen=True, kw_only=True)
class CutRow(Row):
    """What a trained model answers to images without some paddles, beside a probe's answers to the
    whole images."""

    images_version: int
    run: str  # folder of the model
    left_out: int  # paddles
    place: str  # where they are left out: the middle, the marks
    seed: int
    first: int  # number of the first image
    images: int
    paddles: int  # at each mark that the probe sees
    probe_examples: int  # images that the probe is trained on
    probe_steps: int
    curve: int = 0  # images with a curve,
    curve_yes: int = 0  # to which the model says yes,
    curve_probe: int = 0  # to which the probe says yes,
    curve_both: int = 0  # to which both say yes
    other: int = 0  # the same of images without a curve
    other_yes: int = 0
    other_probe: int = 0
    other_both: int = 0

    WHAT = (
        "images_version run left_out place seed first images paddles probe_examples probe_steps"
    ).split()
    SOURCES = ("experiments/pathfinder", "experiments/lra/models", "masks", "sparseflash")
    COMMAND = "python -m experiments.pathfinder.studies.cuts"


def interval(count: int, of: int) -> str:
    """A share in percent with half the width of its 95 % interval (Wilson's around its middle)."""
    if not of:
        return MISSING
    share, z2 = count / of, 1.96**2
    half = 1.96 * (share * (1 - share) / of + z2 / (4 * of * of)) ** 0.5 / (1 + z2 / of)
    return f"{100 * share:.1f} ± {100 * half:.1f}"
