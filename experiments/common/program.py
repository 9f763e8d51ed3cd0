"""The entry of every program: its Hydra configuration, and errors as one line.

    @program("speed", options_type=Options)  # conf/speed.yaml, and its dataclass of options
    def main(options: dict[str, Any], command: str) -> None: ...

    if __name__ == "__main__":
        main()

`command` is the command line, for records. Files of the user's own, such as task/mine.yaml, lie in
the folder of --config-dir; its *.py are imported first, so that they can register what those name.
 An unknown option, another value where the file has true
or false or a path is expected, and every ValueError of the program end in `error: ...` and exit
status 2; so does every OSError with the name of a file. With `-m`, the remaining jobs still run.
Ctrl-C ends in `interrupted` and exit status 130, output that nobody reads any more in 141.
"""

import importlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import InterpolationResolutionError
except ModuleNotFoundError as error:
    sys.exit(f"error: no module {error.name}: pip install 'sparseflash[experiments]'")

from experiments import interrupted
from experiments.common.checks import as_list, choose, path_text
from experiments.common.config import help_rows, store, words
from experiments.common.help import help_text

CONF = Path(__file__).resolve().parents[1] / "conf"
# options that are paths, in every program that has them but those of NO_PATHS
PATHS = (
    "archive cache_dir compiled csv data_dir export figures file import init_from out page pages"
    " pictures plots rows run runs speed"
).split()
LISTS = {"import", "pages", "runs"}  # those that take one path or a list
OPTIONAL = {"compiled", "speed"}  # those that may be null though the file has a path
NO_PATHS = {("decode", "pages"), ("packed_masks", "compiled")}
HYDRA = [  # no logs and no folders of its own
    *("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.job.chdir=false"),
    *("hydra.run.dir=.", "hydra.output_subdir=null", "hydra.sweep.subdir=."),
]
SWITCHES = {"", "-m", "--multirun", "--resolve"}  # no argument, or one of Hydra that takes no word
Main = Callable[[dict[str, Any], str], object]


def program(
    name: str, module: str | None = None, *, options_type: type | None = None
) -> Callable[[Main], Callable[[], None]]:
    """Make a function the program of conf/`name`.yaml; `module` is run as python -m `module`.

    options_type: a dataclass, the schema NAME_options of the file.
    """
    command = ["python", "-m", module or f"experiments.{name}"]
    if options_type is not None:
        store(name, options_type)

    def decorate(main: Main) -> Callable[[], None]:
        failed: list[str] = []  # jobs of a sweep

        def job(config: DictConfig) -> None:
            if signal.getsignal(signal.SIGINT) is interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            given: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
            overrides = given["task"]
            try:
                options = _options(config)
                if options_type is None:
                    _check_flags(name, options)
                    _check_paths(name, options)
                main(options, shlex.join([*command, *overrides]))
                sys.stdout.flush()
            except BrokenPipeError:
                sys.exit(_unread())
            except (ValueError, OSError) as error:
                text = error
                if isinstance(error, OSError):
                    if error.filename is None:  # of no place that an option names
                        raise
                    text = _place(error)
                print(f"error: {text}", file=sys.stderr, flush=True)
                if HydraConfig.get().mode != RunMode.MULTIRUN:
                    sys.exit(2)
                failed.append(shlex.join(overrides))

        @wraps(main)
        def entry() -> None:
            failed.clear()
            if {"--help", "-h"} & {*sys.argv[1:]}:
                about = sys.modules[main.__module__].__doc__
                return print(help_text(CONF, name, " ".join(command), about, options_type))
            try:
                _import_own(_config_dir(sys.argv[1:]))
                if options_type is None:
                    check_keys(name, sys.argv[1:])
                else:
                    _refuse_words(sys.argv[1:])
                _add_hydra(hasattr(options_type, "runs"))
                os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors are ours to print
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()
            except HydraException as error:
                known = [text.partition("=")[0] for text, _ in _known(name, options_type)]
                sys.exit(_fail(f"error: {words(error, known)}"))
            except OSError as error:  # a folder that Hydra makes
                if error.filename is None:
                    raise
                sys.exit(_fail(f"error: {_place(error)}"))
            except ValueError as error:
                sys.exit(_fail(f"error: {error}"))
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one does not wait
                print("interrupted", file=sys.stderr, flush=True)
                sys.exit(130)
            if failed:
                sys.exit(_fail(f"failed: {'; '.join(failed)}"))

        return entry

    return decorate


def _known(name: str, options_type: type | None) -> list[tuple[str, str]]:
    return [] if options_type is None else list(help_rows(options_type))


def _import_own(folder: Path | None) -> None:
    """Import the user's modules in the folder of --config-dir."""
    if folder is None:
        return
    sys.path.insert(0, str(folder))
    for path in sorted(folder.glob("*.py")):
        try:
            importlib.import_module(path.stem)
        except Exception as error:
            raise ValueError(
                f"--config-dir: {path} cannot be imported ({type(error).__name__}: {error})"
            ) from error


def _add_hydra(runs: bool) -> None:
    """Add the options of Hydra, beside the others, as argparse wants them."""
    own = [*HYDRA, f"hydra.sweep.dir={'${runs}' if runs else 'runs'}"]
    given = (i for i, text in enumerate(sys.argv) if i and "=" in text and text[0] != "-")
    place = next(given, len(sys.argv))
    sys.argv[place:place] = own


def _refuse_words(arguments: list[str]) -> None:
    """Raise ValueError for an argument that is no option, or that Hydra cannot read."""
    flag = ""  # the argument before: those of Hydra may take a word
    for text in arguments:
        if not re.search("[=~]", text) and not text.startswith("-") and flag in SWITCHES:
            raise ValueError(f"{text}: give options as NAME=VALUE, without spaces around =")
        flag = text if text.startswith("-") else ""
        if found := re.match(r"([+~]{0,2})((\w+)[^=\s]*)=", text):
            _check_value(text, found[0])


def _place(error: OSError) -> str:
    return f"cannot use {error.filename} ({error.strerror}): name another place"


def _options(config: DictConfig) -> Any:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except InterpolationResolutionError as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"{why}: ${{...}} is the value of an option; write \\${{ for ${{"
        ) from error


def _unread() -> int:
    """Return what head and other readers do that end before the program."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    print("interrupted: the reader of the output has ended", file=sys.stderr, flush=True)
    return 141


def _fail(text: str) -> int:
    print(text, file=sys.stderr, flush=True)
    return 2


def check_keys(name: str, arguments: list[str]) -> None:
    """Raise ValueError for an option that conf/`name`.yaml and the files that it names do not
    have, with those they have, and for a value that Hydra cannot read.
    """
    given, below, files = [], [], []
    own = _config_dir(arguments)
    flag = ""  # the argument before: those of Hydra may take a word
    for text in arguments:
        if not re.search("[=~]", text) and not text.startswith("-") and flag in SWITCHES:
            raise ValueError(f"{text}: give options as NAME=VALUE, without spaces around =")
        flag = text if text.startswith("-") else ""
        if found := re.match(r"([+~]{0,2})((\w+)[^=\s]*)=", text):
            given.append(found[3])
            _check_value(text, found[0])
            if not found[1] and found[3] != "hydra":
                below += [found[2]] if "." in found[2] else []
                files += _named_file(name, found[2], text.removeprefix(found[0]), own)
    if not set(given) - {"hydra"}:
        return
    known = [str(key) for key in _composed(name)]
    for key in given:
        choose("option", key, [*known, "hydra"])
    swept = {file.partition("=")[0] for file in files if "," in file}
    below = [path for path in below if path.split(".")[0] not in swept]
    for path in below:
        overrides = [f for f in files if "," not in f]
        overrides += [f"hydra.searchpath=[file://{own}]"] if own else []
        _check_below(_composed(name, *overrides), path)


def _config_dir(arguments: list[str]) -> Path | None:
    """Return the folder of --config-dir, in which a user has files of their own such as
    task/mine.yaml. Raises ValueError if it is not there.
    """
    for text, after in pairwise([*arguments, ""]):
        flag, given, value = text.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = Path(value if given else after).resolve()
            if not folder.is_dir():
                raise ValueError(f"--config-dir {folder}: there is no such folder")
            return folder
    return None


@cache  # a sweep checks its entries one by one
def _composed(name: str, *files: str) -> DictConfig:
    """Return the configuration of conf/`name`.yaml with the overrides that name files."""
    inside = GlobalHydra.instance().is_initialized()
    with nullcontext() if inside else hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, list(files))


def _named_file(name: str, key: str, value: str, own: Path | None) -> list[str]:
    """Return the override, if the option names files of a folder of conf or of `own`, such as
    task=listops. Raises ValueError for a file that is not there.
    """
    folders = [entry for entry in _defaults(name).get("defaults", []) if isinstance(entry, dict)]
    if not any(key in entry for entry in folders):
        return []
    if re.search(r"[./\\$]", value):  # the files of another folder could run code
        choose(key, value, _names(key, own))
    if not re.fullmatch(r"[\w,]+", value):
        return []
    for each in value.split(","):
        choose(key, each, _names(key, own))
    return [f"{key}={value}"]


def _names(folder: str, own: Path | None) -> list[str]:
    found = [path for conf in (CONF, own) if conf for path in (conf / folder).glob("*.yaml")]
    return sorted({path.stem for path in found})


def _check_below(config: Any, path: str) -> None:
    """Raise ValueError for an option such as model.dim that its part of the file does not have."""
    *parts, last = path.split(".")
    for part in parts:
        config = config.get(part) if isinstance(config, DictConfig) else None
    if isinstance(config, DictConfig) and last not in config:
        place = ".".join(parts)
        choose("option", path, [f"{place}.{key}" for key in config])


def _check_value(text: str, key: str) -> None:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        value = text.removeprefix(key)
        what, quoted = "the value", f'"{value}"'
        if value.startswith("[") and value.endswith("]"):  # in quotes it would be one text
            what, quoted = "each text of the list", '["...","..."]'
        raise ValueError(
            f"{text}: quote {what} inside the shell's quotes, '{key}{quoted}'"
        ) from None


def _check_flags(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for another value where conf/`name`.yaml has true or false: the text "no"
    would count as true.
    """
    for key, default in _defaults(name).items():
        if isinstance(default, bool) and not isinstance(options[key], bool):
            raise ValueError(f"{key}={options[key]!r}: give true or false")


def _check_paths(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for another value than a text where a path is expected."""
    defaults = _defaults(name)
    for key in PATHS:
        if key not in defaults or (name, key) in NO_PATHS:
            continue
        value = options[key]
        if value is None and (defaults[key] is None or key in OPTIONAL):
            continue
        for each in as_list(value) if key in LISTS and value is not None else [value]:
            path_text(key, each)


@cache  # an entry of a sweep asks for each of its options
def _defaults(name: str) -> dict[str, Any]:
    """Return the values of conf/`name`.yaml."""
    found: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    return found
