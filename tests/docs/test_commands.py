"""Commands in code blocks of the pages: their programs have the options, and can read them."""

import re
import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from experiments import study
from experiments.common.config import CONF, compose
from tests.experiments.conftest import configs_are_read_once  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = {"lm.report": "lm_report", "pathfinder.studies": "path_masks"}
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}


def commands() -> list[tuple[str, list[str]]]:
    """Return programs with the options of their commands. Options that do not collide are joined,
    because each composition takes half a second, but for those of different files of a group.
    """
    found: dict[tuple, list[dict[str, str]]] = {}
    for page in [page for page in PAGES if "templates" not in page.parts]:
        for language, block in BLOCK.findall(page.read_text()):
            lines = re.findall(r"-m experiments\.(\S+) (.*)", block.replace("\\\n", " "))
            for program, rest in [] if language else lines:
                words = shlex.split(rest, comments=True)
                words = [word for word in words if re.match(r"[+~]{0,2}[\w.]+=", word)]
                options = {word.partition("=")[0]: word for word in words}
                own = {key.partition(".")[0] for key in options if "." in key}
                for key in (GROUPS & {*options}) - own:
                    for name in options.pop(key).partition("=")[2].split(","):
                        assert (CONF / key / f"{name}.yaml").exists(), (key, name)
                same = {word for key, word in options.items() if key in {"name", *own & GROUPS}}
                joined = found.setdefault((program, *sorted(same)), [])
                for known in joined:
                    if all(known.get(key, word) == word for key, word in options.items()):
                        known |= options
                        break
                else:
                    joined.append(options)
    return [(key[0], [*each.values()]) for key, joined in found.items() for each in joined]


@pytest.mark.slow
def test_programs_have_the_options_of_every_command():
    for program, options in commands():
        if program == "study":
            if name := next((w[5:] for w in options if w.startswith("name=")), ""):
                study.options(import_module(f"experiments.studies.{name}"), options)
            continue
        name = NAMES.get(program, program.rpartition(".")[2])
        for module in (f"experiments.{program}", f"experiments.{program}.__main__"):
            with suppress(ModuleNotFoundError):
                import_module(module)
        with suppress(MissingConfigException):  # others have the options of argparse
            compose(name, [w for w in options if "," not in w and not w.startswith("hydra.")])
