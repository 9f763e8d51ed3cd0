"""The runs of a plan: command lines of experiments.train, and which begins where another ended."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from experiments.common.files import digest
from experiments.lra.training.config import Settings, compose_settings
from experiments.lra.training.journal import read_result

PLAN = "a plan has common: [overrides] and runs: {name: {with: [overrides], after: name}}"
ENTRY = {"with", "after"}  # what an entry of it may say


@dataclass(frozen=True)
class PlannedRun:
    """One run of experiments.train."""

    name: str  # the entry of the plan and, of a sweep, the values that tell it from the others
    overrides: tuple[str, ...]
    settings: Settings
    after: "PlannedRun | None"  # whose weights it begins with

    @property
    def data(self) -> str:
        """A digest of what its data depend on."""
        s = self.settings
        where = {"data_dir": s.data_dir, "cache_dir": s.cache_dir, "seed": s.data_seed}
        return digest({"task": s.task} | where)

    def result(self) -> dict[str, Any] | None:
        """What its result.json says, None if there is none yet."""
        return read_result(self.settings.folder)

    @property
    def complete(self) -> bool:
        result = self.result()
        return result is not None and result["complete"]


def planned_runs(plan: Mapping[str, Any], more: Sequence[str] = ()) -> list[PlannedRun]:
    """All runs of a plan, in its order.

    Args:
        plan: `common`, overrides of all runs, and `runs`, {name: {with: overrides, after: name}}.
            Values by comma are a sweep. A run that comes `after` one of a sweep begins from the run
            in the same place of that sweep, or from the only one.
        more: overrides of all runs that count before those of the plan.

    Raises:
        ValueError: an entry, an override or a value that does not exist or is none.
    """
    unknown = plan.keys() - {"common", "runs"}
    if unknown or not plan.get("runs") or not isinstance(plan["runs"], Mapping):
        wrong = f"it says {', '.join(sorted(unknown))}" if unknown else "it has no such runs"
        raise ValueError(f"{PLAN}, but {wrong}")
    everywhere = _overrides("common", plan.get("common")), _overrides("with", more)
    found: dict[str, list[PlannedRun]] = {}
    for name, entry in plan["runs"].items():
        entry = {} if entry is None else entry
        if not isinstance(entry, Mapping):
            raise ValueError(f"plan, {name}: {entry!r} is not {{with: [overrides], after: name}}")
        if unknown := entry.keys() - ENTRY:
            raise ValueError(
                f"plan, {name}: {', '.join(sorted(unknown))} is neither with nor after"
            )
        own = _overrides(f"{name}, with", entry.get("with"))
        try:
            sweep = list(_sweep([*everywhere[0], *own, *everywhere[1]]))
            before = _before(name, entry.get("after"), found, len(sweep))
            found[name] = [
                _run("/".join([name, *values]), overrides, after)
                for (values, overrides), after in zip(sweep, before, strict=True)
            ]
        except (ValueError, HydraException) as error:
            raise ValueError(f"plan, {name}: {error}") from error
    runs = [run for runs in found.values() for run in runs]
    _refuse_shared_folders(runs)
    return runs


def _overrides(where: str, given: Any) -> list[str]:
    """A list of overrides; ValueError for anything else."""
    given = [] if given is None else given
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise ValueError(f'plan, {where}: {given!r} is no list of texts, such as ["seed=0,1"]')
    return list(given)


def _refuse_shared_folders(runs: Sequence[PlannedRun]) -> None:
    owners: dict[Path, str] = {}
    for run in runs:
        folder = run.settings.folder
        if folder in owners:
            raise ValueError(
                f"plan: {owners[folder]} and {run.name} would share the folder {folder}: "
                "tell them apart with name="
            )
        owners[folder] = run.name


def _run(name: str, overrides: tuple[str, ...], after: PlannedRun | None) -> PlannedRun:
    if after is not None:
        overrides = (*overrides, f"init_from='{after.settings.folder}'")
    return PlannedRun(name, overrides, compose_settings(overrides), after)


def _before(
    name: str, after: str | None, found: Mapping[str, list[PlannedRun]], count: int
) -> Sequence[PlannedRun | None]:
    """The run that each of `count` runs begins from."""
    if after is None:
        return [None] * count
    if after not in found:
        raise ValueError(f"after: {after} is no entry above it; there are {', '.join(found)}")
    if len(found[after]) not in (1, count):
        raise ValueError(f"it is {count} runs after the {len(found[after])} of {after}")
    return found[after] * (count // len(found[after]))


def _sweep(overrides: Sequence[str]) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """(the values that vary, the overrides) of every run; the last value of a key counts."""
    parsed: dict[str, Override] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element()
        parsed.pop(key, None)
        parsed[key] = override
    choices = []
    for key, override in parsed.items():
        if override.is_sweep_override():
            values = list(override.sweep_string_iterator())
            choices.append([(_plain(value), f"{key}={value}") for value in values])
        else:
            choices.append([("", str(override.input_line))])
    for chosen in product(*choices):
        yield [value for value, _ in chosen if value], tuple(text for _, text in chosen)


def _plain(value: str) -> str:
    """Without what Hydra quotes and escapes."""
    return re.sub(r"\\(.)", r"\1", value).strip("'\"")
