"""The entry of every program: its Hydra configuration, and errors as one line.

    @program("speed", Options)  # a dataclass of `config.option`s
    def main(options: Options, command: str) -> None: ...

    if __name__ == "__main__":
        main()

`command` is the command line, for records. Files of the user's own, such as task/mine.yaml, lie in
the folder of --config-dir; its *.py are imported first, so that they can register what those name.
An unknown option, a wrong value and every ValueError of the program end in `error: ...` and exit
status 2; so does every OSError with the name of a file. With `-m`, the remaining jobs still run.
Ctrl-C ends in `interrupted` and exit status 130, output that nobody reads any more in 141.
"""

import importlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    sys.exit(f"error: no module {error.name}: pip install 'sparseflash[experiments]'")

from experiments.common.config import CONF, help_rows, make, store, words

HYDRA = [  # no logs and no folders of its own
    *("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.job.chdir=false"),
    *("hydra.run.dir=.", "hydra.output_subdir=null", "hydra.sweep.subdir=."),
]
SWITCHES = {"", "-m", "--multirun", "--resolve"}  # no argument, or one of Hydra that takes no word
Main = Callable[[Any, str], object]


def program(
    name: str, options: Any, module: str | None = None, *, made: bool = True
) -> Callable[[Main], Callable[[], None]]:
    """Make a function the program `name` with these options, run as python -m `module`.

    options: a dataclass, or one with other defaults. conf/`name`.yaml adds groups to it, if any.
    made: False gives the function the values as a dict, which it completes.
    """
    command = ["python", "-m", module or f"experiments.{name}"]
    store(name, options)

    def decorate(main: Main) -> Callable[[], None]:
        failed: list[str] = []  # jobs of a sweep

        def job(config: DictConfig) -> None:
            given: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
            overrides = given["task"]
            try:
                values: Any = OmegaConf.to_container(config, resolve=True)
                values = make(options, values) if made else values
                main(values, shlex.join([*command, *overrides]))
                sys.stdout.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at exit
                sys.exit(141)
            except (ValueError, OSError, OmegaConfBaseException) as error:
                text = _line(error)
                print(f"error: {text}", file=sys.stderr, flush=True)
                if HydraConfig.get().mode != RunMode.MULTIRUN:
                    sys.exit(2)
                failed.append(shlex.join(overrides))

        @wraps(main)
        def entry() -> None:
            failed.clear()
            if {"--help", "-h"} & {*sys.argv[1:]}:
                about = sys.modules[main.__module__].__doc__
                return print(help_text(name, " ".join(command), about, options))
            try:
                _import_own(sys.argv[1:])
                _refuse_words(sys.argv[1:])
                _add_hydra("${runs}" if not made else "runs")
                os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors are ours to print
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()
            except HydraException as error:
                known = [text.partition("=")[0] for text, _ in _options(name, options)]
                sys.exit(_fail(f"error: {words(error, known)}"))
            except (ValueError, OSError) as error:  # OSError: of a folder that Hydra makes
                sys.exit(_fail(f"error: {_line(error)}"))
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one does not wait
                print("interrupted", file=sys.stderr, flush=True)
                sys.exit(130)
            if failed:
                sys.exit(_fail(f"failed: {'; '.join(failed)}"))

        return entry

    return decorate


def _line(error: Exception) -> str:
    """Return an error as one line. Raise an OSError that names no file."""
    if isinstance(error, OSError):
        if error.filename is None:
            raise error
        return f"cannot use {error.filename} ({error.strerror}): name another place"
    return str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else str(error)


def _fail(text: str) -> int:
    print(text, file=sys.stderr, flush=True)
    return 2


def _import_own(arguments: list[str]) -> None:
    """Import the user's modules in the folder of --config-dir."""
    for text, after in pairwise([*arguments, ""]):
        flag, given, value = text.partition("=")
        if flag not in ("--config-dir", "-cd"):
            continue
        folder = Path(value if given else after).resolve()
        if not folder.is_dir():
            raise ValueError(f"--config-dir {folder}: there is no such folder")
        sys.path.insert(0, str(folder))
        for path in sorted(folder.glob("*.py")):
            try:
                importlib.import_module(path.stem)
            except Exception as error:
                raise ValueError(
                    f"--config-dir: {path} cannot be imported ({type(error).__name__}: {error})"
                ) from error


def _add_hydra(sweeps: str) -> None:
    """Add the options of Hydra, beside the others, as argparse wants them."""
    own = [*HYDRA, f"hydra.sweep.dir={sweeps}"]
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
        if not (found := re.match(r"[+~]{0,2}\w+[^=\s]*=", text)):
            continue
        try:
            OverridesParser.create().parse_override(text)
        except HydraException:
            key, value = found[0], text.removeprefix(found[0])
            quoted = '["...","..."]' if value[:1] == "[" else f'"{value}"'
            raise ValueError(
                f"{text}: quote texts inside the shell's quotes, '{key}{quoted}'"
            ) from None


def help_text(name: str, command: str, about: str | None, options: Any) -> str:
    """Return the help of a program: its docstring, its groups, then an option a line."""
    rows = _options(name, options)
    width = max((len(option) for option, _ in rows), default=0)
    lines = [(about or "").strip(), "", f"usage: {command} [OPTION=VALUE ...]", ""]
    return "\n".join([*lines, *(f"  {option:<{width}}  {text}" for option, text in rows)]).strip()


def _options(name: str, options: Any) -> list[tuple[str, str]]:
    """Return (option=default, what it means) for the groups and the options of a program."""
    return [*_groups(CONF / f"{name}.yaml"), *help_rows(options)]


def _groups(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (group=default, its choices) for the groups that are folders of conf."""
    loaded: Any = OmegaConf.load(path) if path.exists() else {}
    found = loaded.get("defaults", ())
    pairs = (pair for each in found if not isinstance(each, str) for pair in each.items())
    for group, default in pairs:
        if (CONF / str(group)).is_dir():
            choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
            yield f"{group}={default}", f"one of {', '.join(choices)}"
