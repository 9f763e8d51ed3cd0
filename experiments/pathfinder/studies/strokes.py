"""How accurate is a trained model on images with other strokes than those it was trained on?

    python -m experiments.pathfinder.studies.strokes run=docs/results/lra/path_x
    python -m experiments.pathfinder.studies.strokes 'strokes=[256]' 'parts=[marks]'

Strokes are the thickness of paddles and the radius of the marks. `parts` changes one of them only,
and so shows which of them the model depends on.
"""

import sys
from dataclasses import replace
from typing import Any

from torch import from_numpy
from torch.nn.functional import cross_entropy

from experiments.common.checks import whole_number
from experiments.common.program import program
from experiments.pathfinder.parameters import STROKES
from experiments.pathfinder.studies.trained import trained


def answers(options: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Returns (strokes, accuracy, loss) for each of `strokes`.

    Raises ValueError for an option out of range, and a folder without a run on Pathfinder.
    """
    whole_number("batch", options["batch"])
    parts = list(STROKES) if options["parts"] is None else options["parts"]
    for name, values, what in (
        ("parts", parts, f"from {', '.join(STROKES)}"),
        ("strokes", options["strokes"], "of sizes, or numbers between them, such as [128,192]"),
    ):
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name}={values!r}: give a list {what}")
    if wrong := [part for part in parts if part not in STROKES]:
        raise ValueError(f"parts={wrong}: choose from {', '.join(STROKES)}")
    run = trained(options["run"], options["device"])
    fields = [field for part in parts for field in STROKES[part]]
    drawn = [run.spec(strokes) for strokes in options["strokes"]]
    rows = []
    for strokes, other in zip(options["strokes"], drawn, strict=True):
        spec = replace(run.spec(), **{field: getattr(other, field) for field in fields})
        images = run.fresh(spec, options["seed"], options["examples"])
        logits = run.answers(images.pixels, options["batch"])
        labels = from_numpy(images.labels).long()
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        rows.append((strokes, accuracy, cross_entropy(logits, labels).item()))
        print(f"strokes of {strokes} done", file=sys.stderr, flush=True)
    return rows


@program("strokes", module="experiments.pathfinder.studies.strokes")
def main(options: dict[str, Any], command: str) -> None:
    rows = answers(options)
    parts = "strokes" if options["parts"] is None else " and ".join(options["parts"])
    print(f"| {parts} of | accuracy (%) | loss |", "|---:|---:|---:|", sep="\n")
    for strokes, accuracy, loss in rows:
        print(f"| {strokes} | {100 * accuracy:.1f} | {loss:.2f} |")


if __name__ == "__main__":
    main()
