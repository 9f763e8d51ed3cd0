"""Does a trained model follow the curve? Its answers when paddles of the curve are left out.

    python -m experiments.pathfinder.studies.cuts run=docs/results/lra/path_x
    python -m experiments.pathfinder.studies.cuts run=runs/train/pathfinder32/flash/seed0 \
        'erased=[0,4]'

Paddles are left out in the middle of the curve, or at both marks. Both gaps change the answer of a
model that follows the curve. A gap in the middle does not change the answer of a model that uses
only the paddles at the marks.
"""

import sys
from typing import Any

import numpy as np

from experiments.common.checks import whole_number
from experiments.common.program import program
from experiments.pathfinder.generate import Images, redraw
from experiments.pathfinder.render import ORIGIN
from experiments.pathfinder.studies.trained import trained


def answers(options: dict[str, Any]) -> tuple[float, list[tuple[int, float, float]]]:
    """Returns how often the model answers that a curve joins the marks, as shares of 1.

    Returns:
        The share of the images without such a curve, and for each n of `erased` a row (n, share
        with n paddles left out in the middle, share with n left out at the ends) of the others.

    Raises:
        ValueError: an option out of range, or a folder without a run on Pathfinder.
    """
    folder, erased, batch = options["run"], options["erased"], options["batch"]
    whole_number("batch", batch)
    run = trained(folder, options["device"])
    strokes = run.settings.task.get("strokes")
    if isinstance(strokes, list):
        raise ValueError(f"run={folder} has images of several strokes, {strokes}; one is needed")
    each = run.spec(strokes)
    if not isinstance(erased, list) or not erased:
        raise ValueError(f"erased={erased!r}: give a list of numbers of paddles, such as [0,4]")
    if wrong := [n for n in erased if n not in range(each.contour + 1)]:
        raise ValueError(f"erased={wrong}: give 0 to {each.contour}, the paddles of the curve")
    images = run.fresh(each, options["seed"], options["examples"])

    def yes(label: int, without: np.ndarray) -> float:
        pixels = redraw(images, each, ~without)[images.labels == label]
        return run.answers(pixels, batch).argmax(1).float().mean().item()

    none = np.zeros(images.placed.shape[:2], bool)
    rows = []
    for n in erased:
        middle = yes(1, on_curve(images, each.contour, n, middle=True))
        marks = yes(1, on_curve(images, each.contour, n, middle=False)) if n else middle
        rows.append((n, middle, marks))
        print(f"{n} of {each.contour} left out", file=sys.stderr, flush=True)
    return yes(0, none), rows


def on_curve(images: Images, contour: int, n: int, *, middle: bool) -> np.ndarray:
    """Returns a bool array (images, paddles): n paddles of the snake with the first mark.

    middle: True for those in its middle, False for those at its ends. If a curve joins the marks,
        the snake is that curve.
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


@program("cuts", module="experiments.pathfinder.studies.cuts")
def main(options: dict[str, Any], command: str) -> None:
    none, rows = answers(options)
    print("| paddles left out | in the middle | at the marks |", "|---:|---:|---:|", sep="\n")
    for n, *shares in rows:
        print("|".join(["", f" {n} ", *(f" {100 * share:.1f} " for share in shares), ""]))
    print(f"\npercent of the images with a curve answered yes; without a curve {100 * none:.1f}")


if __name__ == "__main__":
    main()
