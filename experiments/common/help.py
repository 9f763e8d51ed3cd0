"""What --help prints: the options of a program with their defaults and what they mean.

It is read from the dataclass of the options, or else from conf/NAME.yaml, where a comment beside an
option, or above it, says what it is.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.common.config import help_rows

LINE = re.compile(r"( *)(\w+):(?: ([^#].*?))?(?: +# (.*))?")  # indent, key, value, comment
HIDDEN = ("hydra", "defaults")  # sections that are no options


def help_text(
    conf: Path, name: str, command: str, about: str | None, options_type: type | None = None
) -> str:
    """Return the help of a program: its docstring, its groups, then an option a line.

    options_type: a dataclass of `config.option`s; without one, the file has the options.
    """
    text = (conf / f"{name}.yaml").read_text()
    config: Any = OmegaConf.create(text)
    rows = [*_groups(conf, config.get("defaults", []))]
    rows += help_rows(options_type) if options_type else _options(text)
    width = max((len(option) for option, _ in rows if option), default=0)
    lines = [(about or "").strip(), "", f"usage: {command} [OPTION=VALUE ...]", ""]
    lines += [f"  {option:<{width}}  {words}" if option else f"  {words}" for option, words in rows]
    return "\n".join(lines).strip()


def _groups(conf: Path, defaults: Any) -> Iterator[tuple[str, str]]:
    """Yield (group=default, its choices) for the groups that are folders of conf."""
    for entry in defaults:
        for group, default in {} if isinstance(entry, str) else entry.items():
            if (conf / str(group)).is_dir():
                choices = sorted(path.stem for path in (conf / group).glob("*.yaml"))
                yield f"{group}={default}", f"one of {', '.join(choices)}"


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Yield (option=default, comment) in the order of the file, and ("", comment) for comments on
    lines of their own.
    """
    sections: list[str] = []  # around the line, by two spaces of indent each
    hidden, above = False, []
    for line in text.splitlines():
        if line.startswith("#"):
            above.append(("", line.removeprefix("#").removeprefix(" ")))
        elif found := LINE.fullmatch(line):
            indent, key, value, comment = found.groups("")
            del sections[len(indent) // 2 :]
            if not indent:
                hidden = key in HIDDEN
            name = ".".join([*sections, key])
            if not value:
                sections.append(key)
            if not hidden:
                yield from above
                yield (f"{name}={value}", comment) if value else ("", f"{name}: {comment}")
            above = []
        elif not line:
            yield from above
            above = []
