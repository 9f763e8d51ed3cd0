"""Options as dataclasses: type, default, range and help of each in one place.

    @dataclass
    class Options(Checked):
        steps: int = option(1000, "of the optimizer", least=1)
        mask: str | None = option(None, "text of a mask")

    @program("name", Options)
    def main(options: Options, command: str) -> None: ...

Hydra refuses unknown options and values of another type, `Checked` values out of range, each in
one line that names the option, the value and the remedy.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

try:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    sys.exit(f"error: no module {error.name}: pip install 'sparseflash[experiments]'")

T = TypeVar("T")
CONF = Path(__file__).resolve().parents[1] / "conf"
LIMITS = {  # of a number: whether it holds, and what to give
    "least": (lambda value, limit: value >= limit, "at least {}"),
    "above": (lambda value, limit: value > limit, "above {}"),
    "most": (lambda value, limit: value <= limit, "at most {}"),
    "below": (lambda value, limit: value < limit, "below {}"),
}


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, at least {least}")


def choose(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ValueError with the choices, and the nearest, unless the value is one of them."""
    choices = [str(choice) for choice in choices]
    if str(value) not in choices:
        close = difflib.get_close_matches(str(value), choices, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{name}={value!r}: choose from {', '.join(choices)}{hint}")


def as_list(value: Any) -> list[Any]:
    """Return the values of an option that takes one or a list: [] for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def option(
    default: Any,
    help: str = "",
    *,
    choices: Iterable[str] = (),
    several: type | None = None,
    free: bool = False,
    **limits: float,
) -> Any:
    """Return the field of an option.

    Args:
        help: what `--help` says of it.
        choices: the texts that it may be.
        several: it takes one value of this type or a list of them, and becomes a list; None stays.
        free: it may differ between sessions of a run, because it changes no result but by rounding.
        limits: of numbers: `least`, `above`, `most`, `below`.
    """
    metadata = {"help": help, "choices": tuple(choices), "free": free, "limits": limits}
    metadata["several"] = several
    if isinstance(default, list | dict) or is_dataclass(default):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked:
    """The base of dataclasses of options: one that is out of range raises ValueError. None is in
    every range.
    """

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if (kind := each.metadata.get("several")) is not None and value is not None:
                value = [_one(each.name, kind, one) for one in as_list(value)]
                if not value:
                    raise ValueError(f"{each.name}=[]: give at least one")
                setattr(self, each.name, value)
            for one in value if isinstance(value, list) else [value]:
                if one is None:
                    continue
                if choices := each.metadata.get("choices"):
                    choose(each.name, one, choices)
                if isinstance(each.default, bool) and not isinstance(one, bool):
                    raise ValueError(f"{each.name}={one!r}: give true or false")
                limits: Mapping[str, float] = each.metadata.get("limits", {})
                if limits and (isinstance(one, bool) or not isinstance(one, int | float)):
                    raise ValueError(f"{each.name}={one!r}: give a number")
                if not all(LIMITS[name][0](one, limit) for name, limit in limits.items()):
                    wanted = " and ".join(LIMITS[name][1].format(x) for name, x in limits.items())
                    raise ValueError(f"{each.name}={value!r}: give a number {wanted}")


def _one(name: str, kind: type, value: Any) -> Any:
    """Return a value of a list of texts or numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        raise ValueError(f"{name}={value!r}: give {'a text' if kind is str else 'a number'}")
    if kind is str:
        return value if value is None else str(value)
    if kind is int and not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: give a whole number")
    return value


def store(name: str, options: Any) -> None:
    """Make the dataclass the configuration of a program without conf/NAME.yaml, and the schema
    NAME_options, for the defaults list of such a file.
    """
    if not (CONF / f"{name}.yaml").exists():
        ConfigStore.instance().store(name, options)
    ConfigStore.instance().store(f"{name}_options", options)


def make(options: type[T], values: Mapping[str, Any]) -> T:
    """Return the options with these values. Raises ValueError for an unknown or wrong one."""
    known = [each.name for each in fields(options)]  # type: ignore[arg-type]
    for name in values:
        choose("option", name, known)
    try:
        made: Any = OmegaConf.merge(OmegaConf.structured(options), dict(values))
        return OmegaConf.to_object(made)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        text = str(error.msg or error).splitlines()[0]
        raise ValueError(f"{error.full_key}: {text}" if error.full_key else text) from error


def compose(name: str, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of a command line of conf/NAME.yaml, inside a Hydra program or outside.

    Raises HydraException if a key or a group does not exist.
    """
    inside = GlobalHydra.instance().is_initialized()
    conf = "experiments.conf"
    with nullcontext() if inside else initialize_config_module(conf, version_base="1.3"):
        composed = hydra_compose(name, list(overrides))
    return OmegaConf.to_container(composed, resolve=True)  # type: ignore[return-value]


def words(error: Exception, known: Iterable[str] = ()) -> str:
    """Return an error of Hydra as one line that names the option and the value.

    known: the options of the program, for one that it does not have; those of the files of its
        groups are known from the error.
    """
    why: Any = error.__cause__
    text = " ".join(str(error).split())
    if not isinstance(why, OmegaConfBaseException):
        return text.partition(" Config search path:")[0]
    if text.startswith("Could not override"):
        place = str(why.full_key).rpartition(".")[0]
        near = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == place]
        near = near or [str(key) for key in why.parent_node or () if key != "hydra"]
        try:
            choose("option", str(why.full_key), [f"{place}.{key}".lstrip(".") for key in near])
        except ValueError as found:
            return str(found) if near else f"option={why.full_key}: there is none of that name"
    given = text.removeprefix("Error merging override ")
    return f"{given}: {str(why.msg).splitlines()[0]}"


def help_rows(options: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (option=default, what it means) for `--help`."""
    for each in fields(options):
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        if is_dataclass(default):
            yield from help_rows(default, f"{prefix}{each.name}.")
            continue
        if not each.metadata.get("help"):
            continue
        words = {None: "null", True: "true", False: "false"}
        text = str(default).replace(" ", "") if isinstance(default, list) else default
        text = words[default] if default is None or isinstance(default, bool) else text
        about = " | ".join(each.metadata["choices"]), each.metadata["help"]
        yield f"{prefix}{each.name}={text}", ": ".join(filter(None, about))
