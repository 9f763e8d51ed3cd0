"""The runs of a sweep: command lines of experiments.train, some from the weights of others."""

import fcntl
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import IO, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from experiments.common.files import digest
from experiments.common.program import check_keys
from experiments.lra.result import read_result
from experiments.lra.settings import Settings, compose_settings

MOST = 10_000  # runs of an entry
SEED = re.compile("seed=(0|[1-9][0-9]*)")
FORM = (
    "a sweep has common: [overrides], runs: {name: {with: [overrides], after: name}} and known: "
    "[archives of runs]"
)


@dataclass(frozen=True)
class SweepRun:
    """One run of experiments.train."""

    name: str  # of its entry, and the values that vary within the entry
    overrides: tuple[str, ...]
    settings: Settings
    after: "SweepRun | None"  # the run whose weights it starts from

    @property
    def data(self) -> str:
        """A digest of what its data depend on."""
        return digest(self.settings.data())

    def result(self) -> dict[str, Any] | None:
        """The content of its result.json; None if there is none yet."""
        return read_result(self.settings.folder)

    @property
    def complete(self) -> bool:
        result = self.result()
        return result is not None and result["complete"]

    @contextmanager
    def claim(self) -> Iterator[IO[str] | None]:
        """A file for the processes that may work on the run; None if others have it.

        The claim lasts until this block and all processes that inherit the file have ended. So it
        outlives a sweep that is killed, but not its processes.
        """
        self._claim.parent.mkdir(parents=True, exist_ok=True)
        with open(self._claim, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield None
            else:
                yield file

    @property
    def at_work(self) -> bool:
        """Whether a process has a claim to the run."""
        if not self._claim.exists():
            return False
        with self.claim() as claim:
            return claim is None

    @property
    def _claim(self) -> Path:
        return self.settings.folder.with_name(f".{self.settings.folder.name}.claim")


def sweep_runs(sweep: Mapping[str, Any], more: Sequence[str] = ()) -> list[SweepRun]:
    """All runs of a sweep, in its order.

    Args:
        sweep: `common`, overrides of all runs, and `runs`, {name: {with: overrides, after: name}}.
            Values separated by commas give a run each. A run `after` an entry with several runs
            starts from the run at the same place of that entry. `known` is for `in_order`.
        more: overrides of all runs, which take precedence over those of the sweep.

    Raises:
        ValueError: an entry, an override or a value is wrong.
    """
    unknown = sweep.keys() - {"common", "runs", "known"}
    if unknown or not sweep.get("runs") or not isinstance(sweep["runs"], Mapping):
        wrong = f"this one has {', '.join(sorted(unknown))}" if unknown else "this one has no runs"
        raise ValueError(f"{FORM}, but {wrong}")
    common, last = _overrides("common", sweep.get("common")), _overrides("with", more)
    found: dict[str, list[SweepRun]] = {}
    known: dict[tuple[str, ...], Settings] = {}
    for name, entry in sweep["runs"].items():
        entry = {} if entry is None else entry
        if not isinstance(entry, Mapping) or entry.keys() - {"with", "after"}:
            raise ValueError(f"sweep, {name}: {entry!r} is not {{with: [overrides], after: name}}")
        own = _overrides(f"{name}, with", entry.get("with"))
        try:
            check_keys("train", [*common, *own, *last])
            variants = list(islice(_variants([*common, *own, *last]), MOST + 1))
            if len(variants) > MOST:
                raise ValueError(f"its lists of values stand for more than {MOST:,} runs")
            before = _before(entry.get("after"), found, [overrides for _, overrides in variants])
            found[name] = [
                _run("/".join([name, *values]), overrides, after, known)
                for (values, overrides), after in zip(variants, before, strict=True)
            ]
        except (ValueError, HydraException, RecursionError) as error:
            raise ValueError(f"sweep, {name}: {error}") from error
    runs = [run for runs in found.values() for run in runs]
    owners: dict[Path, str] = {}
    for run in runs:
        folder = run.settings.folder
        if folder in owners:
            raise ValueError(
                f"sweep: {owners[folder]} and {run.name} would share the folder {folder}: "
                "give one of them a folder of its own with name="
            )
        owners[folder] = run.name
    return runs


def _overrides(where: str, given: Any) -> list[str]:
    """A list of overrides. Raises ValueError for anything else."""
    given = [] if given is None else given
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise ValueError(f'sweep, {where}: {given!r} is not a list of texts, such as ["seed=0,1"]')
    return list(given)


def _run(
    name: str,
    overrides: tuple[str, ...],
    after: SweepRun | None,
    known: dict[tuple[str, ...], Settings],
) -> SweepRun:
    """known: settings by their overrides. Runs that differ in the seed alone are composed once,
    since Hydra takes .1 s.
    """
    if after is not None:
        overrides = (*overrides, f"init_from='{after.settings.folder}'")
    seeds = [int(found[1]) for text in overrides if (found := SEED.fullmatch(text))]
    rest = tuple(text for text in overrides if not SEED.fullmatch(text))
    if rest not in known:
        known[rest] = compose_settings(rest)
    settings = replace(known[rest], seed=seeds[-1]) if seeds else known[rest]
    return SweepRun(name, overrides, settings, after)


def _before(
    after: str | None, found: Mapping[str, list[SweepRun]], variants: Sequence[tuple[str, ...]]
) -> Sequence[SweepRun | None]:
    """The run that each run starts from, by the overrides of these."""
    count = len(variants)
    if after is None:
        return [None] * count
    if after not in found:
        raise ValueError(f"after: {after} is not an entry above it; choose from {', '.join(found)}")
    if len(found[after]) not in (1, count):
        raise ValueError(f"{count} runs cannot start from the {len(found[after])} of {after}")
    before = found[after] * (count // len(found[after]))
    here, there = _by_key(variants), _by_key([run.overrides for run in before])
    for key in here.keys() & there.keys():
        pairs = zip(here[key], there[key], strict=True)
        crossed = [f"{one} would start from {other}" for one, other in pairs if one != other]
        if crossed and set(here[key]) == set(there[key]):
            raise ValueError(f"{crossed[0]} of {after}: give the lists in the order of {after}")
    return before


def _by_key(variants: Sequence[tuple[str, ...]]) -> dict[str, list[str]]:
    """The overrides of every run, by their keys."""
    found: dict[str, list[str]] = {}
    for text in (text for overrides in variants for text in overrides):
        found.setdefault(text.partition("=")[0], []).append(text)
    return found


def _variants(overrides: Sequence[str]) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """(the values that vary, the overrides) of every run; the last value of a key counts."""
    parsed: dict[str, Override] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element()
        if not re.fullmatch(r"\w+(\.\w+)*", key) or key.startswith("hydra"):
            raise ValueError(
                f"{override.input_line}: give settings of experiments.train, NAME=VALUE"
            )
        parsed.pop(key, None)
        parsed[key] = override
    choices = []
    for key, override in parsed.items():
        if override.is_sweep_override():
            values = list(islice(override.sweep_string_iterator(), MOST + 1))
            choices.append([(_plain(value), f"{key}={value}") for value in values])
        else:
            choices.append([("", str(override.input_line))])
    for chosen in product(*choices):
        yield [value for value, _ in chosen if value], tuple(text for _, text in chosen)


def _plain(value: str) -> str:
    """A value without Hydra's quotes and escapes."""
    return re.sub(r"\\(.)", r"\1", value).strip("'\"")
