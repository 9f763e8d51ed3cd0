"""How accurate is a classifier that does not follow the curve? Lower bounds from probes.

    python -m experiments.pathfinder.studies.shortcuts 'size=[32,128,256]'

A probe sees the two marks and the first k paddles at each. A better probe may find more, so its
accuracy is a lower bound of what a shortcut can reach. A classifier needs a higher accuracy to show
that it follows curves.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common.checks import as_list, check_options
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import Records
from experiments.common.text_table import MISSING, markdown
from experiments.pathfinder.generate import VERSION, check_seed
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.studies.probe import fit, says_yes, seen_on_disk
from experiments.pathfinder.studies.rows import ShortcutRow, interval


@program("shortcuts", module="experiments.pathfinder.studies.shortcuts")
def main(options: dict[str, Any], command: str) -> None:
    """Measures every size, contour and number of paddles that the CSV file does not have."""
    check_seed(options["seed"])
    check_options(options, whole="examples tested steps")
    counts, device = as_list(options["paddles"]), find_device(options["device"])
    specs = [spec(s, c) for s in as_list(options["size"]) for c in as_list(options["contour"])]
    most = min((each.contour for each in specs), default=0)
    if wrong := [k for k in counts if isinstance(k, bool) or k not in range(most + 1)]:
        raise ValueError(f"paddles={wrong}: give 0 to {most}, the paddles of a curve")
    records = Records(options["csv"], ShortcutRow, allow_changes=options["allow_changes"])
    common = {name: options[name] for name in ("seed", "examples", "tested", "steps")}
    common["images_version"] = VERSION
    n, seed = common["examples"], common["seed"]
    for each in specs:
        rows = [
            ShortcutRow(
                size=each.size, contour=each.contour, paddles=k, right=0, mask="", density=None,
                **common, **ShortcutRow.origin(str(device), command),
            )
            for k in counts
        ]  # fmt: skip
        missing = [row for row in rows if records.find(row) is None]
        if not missing:
            continue
        data = seen_on_disk(each, seed, 0, n + common["tested"], Path(options["cache_dir"]))
        (x, x_test), (y, y_test) = (part.split([n, common["tested"]]) for part in data)
        for row in missing:
            probe = fit(each, row.paddles, x, y, steps=row.steps, seed=seed, device=device)
            right = int((says_yes(probe, x_test) == (y_test > 0)).sum())
            records.append(replace(row, right=right))
    print(table(records.rows))


def table(rows: Sequence[ShortcutRow]) -> str:
    """Returns a Markdown table of accuracies in percent with 95 % intervals: the newest rows of the
    images as they are made now."""
    rows = [row for row in rows if row.images_version == VERSION]
    found = {(row.size, row.contour, row.paddles): row for row in rows}
    counts = sorted({row.paddles for row in rows})
    heads = ["the marks", *(f"and {k} paddle{'s' * (k > 1)} at each" for k in counts if k)]
    lines = [["size", "contour", *heads[-len(counts) :]]]
    for size, contour in sorted({key[:2] for key in found}):
        cells = [found.get((size, contour, k)) for k in counts]
        texts = [interval(row.right, row.tested) if row else MISSING for row in cells]
        lines.append([str(size), str(contour), *texts])
    return markdown(lines, left=())


if __name__ == "__main__":
    main()
