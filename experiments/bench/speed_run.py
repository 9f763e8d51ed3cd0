"""A run of experiments.speed: what to measure, in which order, and what is measured already."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from experiments.bench.cases import Case
from experiments.bench.grids import GRIDS, make_grid
from experiments.bench.measure import Bench, Measurement
from experiments.bench.providers import DIRECTIONS, concerns, default_providers, find
from experiments.bench.rows import SpeedRow
from experiments.bench.warm import breaks_context
from experiments.common.checks import as_list, choose
from experiments.common.records import OK, Records

SHAPE = "mask seq_len batch heads kv_heads head_dim v_dim dtype layout block_size".split()


def chosen(options: dict[str, Any], device: torch.device) -> list[Measurement]:
    """The measurements of the named grid, or of the given masks and shapes.

    Raises ValueError for a provider, direction, grid, mask or shape that does not exist.
    """
    for name in ("directions", "mask", "seq_len"):
        if options[name] == [] or (name, options[name]) == ("directions", None):
            raise ValueError(f"{name}={options[name]}: give at least one, or leave it out")
    directions = as_list(options["directions"])
    providers = as_list(options["providers"])
    given = {name: options[name] for name in SHAPE}
    if options["grid"] is None:
        cases = make_grid(str(device), **given).cases()
        return measurements(cases, providers or default_providers(device), directions)
    choose("grid", options["grid"], GRIDS)
    if any(value is not None for value in given.values()):
        raise ValueError(f"grid={options['grid']} has its own masks and shapes: leave these out")
    found: dict[Measurement, None] = {}
    for part in GRIDS[options["grid"]](device):
        names = [name for name in part.providers if not providers or name in providers]
        found |= dict.fromkeys(measurements(part.cases, names, directions))
    return list(found)


def measurements(
    cases: Iterable[Case], providers: Sequence[str], directions: Sequence[str]
) -> list[Measurement]:
    """What the cases, providers and directions give, everything of a case together.

    Raises ValueError for a provider, direction, mask or block size that does not exist.
    """
    for direction in directions:
        choose("directions", direction, DIRECTIONS)
    found = {name: find(name) for name in providers}
    cases = list(cases)
    for case in cases:
        _ = case.blocks  # refuses an impossible mask now, not in the middle of the run
    return [
        Measurement(case, name, direction)
        for case in cases
        for name, provider in found.items()
        for direction in directions
        if concerns(provider, case, direction)
    ]


def in_rounds(wanted: Sequence[Measurement], rounds: int) -> list[Measurement]:
    """Return all of `wanted` in every round, beginning each time with another provider of a case.
    Every other round takes the cases backwards: dense attention, which comes first, is measured at
    the end again.

    What a provider gains or loses by its place, by the clock or the temperature, then shows as the
    range of the rounds.
    """
    found = []
    cases = [list(group) for _, group in groupby(wanted, lambda what: what.case)]
    for number in range(rounds):
        for group in cases[:: -1 if number % 2 else 1]:
            by_provider: dict[str, list[Measurement]] = {}
            for what in group:
                repeat = replace(what, round=number + 1)
                by_provider.setdefault(what.provider, []).append(repeat)
            turns = list(by_provider.values())
            first = number % len(turns)
            found += [what for turn in (*turns[first:], *turns[:first]) for what in turn]
    return found


def unmeasured(
    wanted: Iterable[Measurement], device: torch.device, records: Records[SpeedRow]
) -> list[Measurement]:
    """Those for which the records hold no time."""

    def known(what: Measurement) -> bool:
        row = records.find(what.row(device, ""))
        return row is not None and row.status == OK

    return [what for what in wanted if not known(what)]


def run(
    wanted: Sequence[Measurement], bench: Bench, records: Records[SpeedRow], command: str
) -> list[SpeedRow]:
    """The row of each, measured now or found in `records`, to which new ones are added."""
    rows = []
    for i, what in enumerate(wanted, 1):
        row, note = what.row(bench.device, command), ""
        known = records.find(row)
        if known is not None and known.status == OK:
            row, note = known, f"  (measured {known.date})"
        else:
            row = bench.run(what, row)
            if known is None or known.status != row.status:  # the same failure stands once
                records.append(row)
        rows.append(row)
        print(f"[{i:3}/{len(wanted)}] {describe(row)}{note}", flush=True)
        if breaks_context(row.status):
            print("the device is lost to this process: run again for the rest", flush=True)
            break
    return rows


def describe(row: SpeedRow) -> str:
    """A row as one line of text."""
    what = f"{row.provider:20} {row.direction:8} {row.mask:46} N {row.n_q:<6} D {row.head_dim:<3}"
    what += f" round {row.round}" if row.round > 1 else ""
    if row.status != OK:
        return f"{what}  {row.status}"
    share = "" if row.fraction is None else f"{100 * row.fraction:3.0f} % of ideal  "
    warning = f"  warning: {row.warning}" if row.warning else ""
    return (
        f"{what} {row.ms:9.3f} ms {row.tflops:8.3f} TFLOP/s  {share}error {row.error:.1e}{warning}"
    )
