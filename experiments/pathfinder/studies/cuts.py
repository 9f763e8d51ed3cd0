"""Does a trained model follow the curve? Its answers when paddles of the curve are left out.

    python -m experiments.pathfinder.studies.cuts run=docs/results/lra/path_x
    python -m experiments.pathfinder.studies.cuts run=runs/train/pathfinder32/flash/seed0 \
        'erased=[0,4]'

Paddles are left out in the middle of the curve, or at both marks. Both gaps change the answer of a
model that follows the curve. A gap in the middle does not change the answer of a model that uses
only the paddles at the marks.

Each answer is compared with that of a probe to the whole image. The probe sees only the marks and
the first paddles at them. A model that follows curves is also right where the probe is wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.checks import check_options
from experiments.common.program import program
from experiments.common.progress import progress
from experiments.common.records import Records
from experiments.common.text_table import MISSING, markdown
from experiments.lra.result import read_result
from experiments.pathfinder.generate import VERSION, Images, redraw
from experiments.pathfinder.parameters import Spec
from experiments.pathfinder.render import ORIGIN
from experiments.pathfinder.studies.probe import fit, says_yes, seen, seen_on_disk
from experiments.pathfinder.studies.rows import CutRow, interval
from experiments.pathfinder.studies.trained import Trained, trained

BLOCK = 100  # images of a row: an interrupted run continues with the next
PLACES = {True: "the middle", False: "the marks"}


def answers(options: dict[str, Any], command: str = "") -> list[CutRow]:
    """Returns rows of BLOCK images for each n of `erased` and each place: those of the CSV file,
    and those that it did not have, which it has then.

    Raises ValueError for an option out of range, a folder without a run on Pathfinder, and rows of
    the folder from before its run ended.
    """
    folder, erased = options["run"], options["erased"]
    check_options(options, whole="batch probe_examples probe_steps")
    run = trained(folder, options["device"])
    strokes = run.settings.task.get("strokes")
    if isinstance(strokes, list):
        raise ValueError(f"run={folder} has images of several strokes, {strokes}; one is needed")
    each = run.spec(strokes)
    if not isinstance(erased, list) or not erased:
        raise ValueError(f"erased={erased!r}: give a list of numbers of paddles, such as [0,4]")
    if wrong := [n for n in erased if n not in range(each.contour + 1)]:
        raise ValueError(f"erased={wrong}: give 0 to {each.contour}, the paddles of the curve")
    if options["paddles"] not in range(each.contour + 1):
        raise ValueError(f"paddles={options['paddles']}: give 0 to {each.contour}")
    images = run.fresh(each, options["seed"], options["examples"])
    records = Records(options["csv"], CutRow, allow_changes=options["allow_changes"])
    common = {name: options[name] for name in ("seed", "paddles", "probe_examples", "probe_steps")}
    common |= {"run": str(folder), "images_version": VERSION}
    rows = [
        CutRow(
            first=first, images=len(part.labels), left_out=n, place=PLACES[middle], mask="",
            density=None, **common, **CutRow.origin(str(run.device), command),
        )
        for n in erased for middle in PLACES if n or middle
        for first, part in _blocks(images)
    ]  # fmt: skip
    found = [records.find(row) for row in rows]
    ended = (read_result(Path(folder)) or {}).get("date", "")
    if old := [row.date for row in found if row is not None and row.date < ended]:
        raise ValueError(
            f"csv={options['csv']}: its rows of run={folder} are of {old[0]}, and the run ended "
            f"later, {ended}: give another csv"
        )
    missing = [row for row, same in zip(rows, found, strict=True) if same is None]
    if missing:
        probed = _probe_answers(options, each, images, run)
        for row in progress(missing, len(missing), f"{BLOCK} images at a time"):
            part, said = _part(images, row.first), probed[row.first : row.first + BLOCK]
            without = paddles_at(part, each.contour, row.left_out, middle=row.place == PLACES[True])
            pixels = redraw(part, each, ~without)
            yes = run.answers(pixels, options["batch"]).argmax(1).numpy() == 1
            records.append(replace(row, **_counts(part.labels == 1, yes, said)))
    found = [records.find(row) for row in rows]
    return [row for row in found if row is not None]


def _blocks(images: Images) -> Iterator[tuple[int, Images]]:
    for first in range(0, len(images.labels), BLOCK):
        yield first, _part(images, first)


def _part(images: Images, first: int) -> Images:
    arrays = (getattr(images, field.name) for field in fields(Images))
    return Images(*(array[first : first + BLOCK] for array in arrays))


def _probe_answers(options: dict[str, Any], each: Spec, images: Images, run: Trained) -> np.ndarray:
    """Returns whether a probe, trained on images of another seed, says yes to the whole images."""
    seed, n = options["seed"] + 1, options["probe_examples"]
    x, labels = seen_on_disk(each, seed, 0, n, Path(options["cache_dir"]))
    steps = options["probe_steps"]
    probe = fit(each, options["paddles"], x, labels, steps=steps, seed=seed, device=run.device)
    return says_yes(probe, x.new_tensor(seen(images, each))).numpy()


def _counts(curve: np.ndarray, yes: np.ndarray, probed: np.ndarray) -> dict[str, int]:
    counted = {"": True, "_yes": yes, "_probe": probed, "_both": yes & probed}
    return {
        name + end: int((of & what).sum())
        for name, of in (("curve", curve), ("other", ~curve))
        for end, what in counted.items()
    }


def paddles_at(images: Images, contour: int, n: int, *, middle: bool) -> np.ndarray:
    """Returns a bool array (images, paddles) of n paddles.

    middle: True for those in the middle of the snake with the first mark, False for those at the
        two marks. A curve that joins the marks is that snake, and both marks are at its ends.
    """
    number, first = np.arange(contour), (contour - n) // 2
    tail, origin = n - n // 2, images.info[:, ORIGIN][:, None]
    snake = np.broadcast_to(origin, (len(origin), n))
    if middle:
        chosen = number[first : first + n]
    else:
        chosen = np.concatenate([number[:tail], number[contour - n // 2 :]])
        other = np.where(images.labels[:, None] == 1, origin, 1 - origin)
        snake = np.where(np.arange(n) < tail, origin, other)
    found = np.zeros(images.placed.shape[:2], bool)
    # snakes grow in turn: paddle j of snake i is number 2 j + i
    np.put_along_axis(found, 2 * chosen[None] + snake, True, 1)
    return found


def table(rows: Sequence[CutRow]) -> str:
    """Returns a Markdown table in percent, with 95 % intervals of the answers."""
    heads = ["left out", "at", "images with a curve", "yes", "as the probe", "right against it"]
    lines = [[*heads, "images without", "yes", "as the probe", "right against it"]]
    for n, place in dict.fromkeys((row.left_out, row.place) for row in rows):
        of = [row for row in rows if (row.left_out, row.place) == (n, place)]
        cells = [str(n), place if n else MISSING]
        for name, label in (("curve", True), ("other", False)):
            ends = ("", "_yes", "_probe", "_both")
            count, yes, probe, both = (sum(getattr(row, name + end) for row in of) for end in ends)
            same = count - yes - probe + 2 * both
            # of the images that the probe answers wrongly, those that the model answers rightly
            against = (yes - both, count - probe) if label else (probe - both, probe)
            cells += [str(count), interval(yes, count), interval(same, count), interval(*against)]
        lines.append(cells)
    return markdown(lines, left=(1,))


@program("cuts", module="experiments.pathfinder.studies.cuts")
def main(options: dict[str, Any], command: str) -> None:
    print(table(answers(options, command)))


if __name__ == "__main__":
    main()
