"""Commands in code blocks of the pages: their programs have the options, and can read them."""

import re
import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import hydra
import pytest

from experiments.common.program import CONF, check_keys

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
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        for program, rest in dict.fromkeys(commands):
            words = shlex.split(rest, comments=True)
            options = [word for word in words if re.match(r"[+~]{0,2}[\w.]+=", word)]
            name = {"lm.report": "lm_report"}.get(program, program.rpartition(".")[2])
            for module in (f"experiments.{program}", f"experiments.{program}.__main__"):
                with suppress(ModuleNotFoundError):
                    import_module(module)
            check_keys("path_masks" if name == "masks" else name, options)
