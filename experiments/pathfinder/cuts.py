"""Does a trained model follow the curve? What it says when paddles of the curve are left out.

    python -m experiments.pathfinder.cuts run=docs/results/lra/path_x/128-c14
    python -m experiments.pathfinder.cuts run=runs/train/pathfinder32/flash/seed0 'erased=[0,4]'

Paddles are left out in the middle of the curve, or at both marks. A model that follows the curve
minds both; one that goes by the directions at the marks does not notice the first.
"""

import sys

import hydra
import numpy as np
from omegaconf import DictConfig, ListConfig

from experiments.common.checks import whole_number
from experiments.pathfinder.generate import Images, redraw
from experiments.pathfinder.render import ORIGIN
from experiments.pathfinder.trained import trained


def answers(config: DictConfig) -> tuple[float, list[tuple[int, float, float]]]:
    """How often the model says that a curve leads from mark to mark: of images without one; and for
    each n of `erased` of those with one, n paddles being left out in its middle, or at its ends.

    Raises ValueError for a value that is none, and a folder without such a run.
    """
    whole_number("batch", config.batch)
    run = trained(config.run, config.device)
    strokes = run.settings.task.get("strokes")
    if isinstance(strokes, list):
        raise ValueError(f"run={config.run}: its images have several strokes, {strokes}")
    each = run.spec(strokes)
    erased = config.erased
    if not isinstance(erased, ListConfig) or not erased:
        raise ValueError(f"erased={erased!r}: give a list of numbers of paddles, such as [0,4]")
    if wrong := [n for n in erased if n not in range(each.contour + 1)]:
        raise ValueError(f"erased={wrong}: the curve has {each.contour} paddles")
    images = run.fresh(each, config.seed, config.examples)

    def yes(label: int, without: np.ndarray) -> float:
        pixels = redraw(images, each, ~without)[images.labels == label]
        return run.answers(pixels, config.batch).argmax(1).float().mean().item()

    none = np.zeros(images.placed.shape[:2], bool)
    rows = []
    for n in erased:
        middle = yes(1, on_curve(images, each.contour, n, middle=True))
        marks = yes(1, on_curve(images, each.contour, n, middle=False)) if n else middle
        rows.append((n, middle, marks))
        print(f"{n} of {each.contour} left out", file=sys.stderr, flush=True)
    return yes(0, none), rows


def on_curve(images: Images, contour: int, n: int, *, middle: bool) -> np.ndarray:
    """bool (n, paddles): n paddles of the snake with the first mark, in its middle or at its ends.

    Where a curve leads from mark to mark, that snake is the curve.
    """
    number = np.arange(contour)
    first = (contour - n) // 2
    chosen = (number >= first) & (number < first + n)
    if not middle:
        chosen = (number < n - n // 2) | (number >= contour - n // 2)
    # snakes grow in turn: paddle j of snake i is number 2 j + i
    paddles = 2 * number[chosen][None] + images.info[:, ORIGIN][:, None]
    found = np.zeros(images.placed.shape[:2], bool)
    np.put_along_axis(found, paddles, True, 1)
    return found


@hydra.main(version_base="1.3", config_path="../conf", config_name="cuts")
def main(config: DictConfig) -> None:
    try:
        none, rows = answers(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    print("| paddles left out | in the middle | at the marks |", "|---:|---:|---:|", sep="\n")
    for n, *shares in rows:
        print("|".join(["", f" {n} ", *(f" {100 * share:.1f} " for share in shares), ""]))
    print(f"\nsays yes to so many images with a curve (%); without one to {100 * none:.1f}")


if __name__ == "__main__":
    main()
