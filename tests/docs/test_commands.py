"""Commands in code blocks of the pages: their programs have the options, and can read them."""

import re
import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from experiments import study
from experiments.common.config import compose

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_programs_have_the_options_of_every_command():
    commands = []
    for page in [page for page in PAGES if "templates" not in page.parts]:
        for language, block in BLOCK.findall(page.read_text()):
            if not language:
                commands += re.findall(r"-m experiments\.(\S+) (.*)", block.replace("\\\n", " "))
    for program, rest in dict.fromkeys(commands):
        words = shlex.split(rest, comments=True)
        options = [word for word in words if re.match(r"[+~]{0,2}[\w.]+=", word)]
        if program == "study":
            name, *options = options or [""]
            if name:
                module = import_module(f"experiments.studies.{name.removeprefix('name=')}")
                study.options(module, options)
            continue
        name = {"lm.report": "lm_report", "pathfinder.studies.masks": "path_masks"}
        name = name.get(program, program.rpartition(".")[2])
        for module in (f"experiments.{program}", f"experiments.{program}.__main__"):
            with suppress(ModuleNotFoundError):
                import_module(module)
        with suppress(MissingConfigException):  # others have the options of argparse
            compose(name, [w for w in options if "," not in w and not w.startswith("hydra.")])
