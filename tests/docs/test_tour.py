"""The notebook of the guide runs from the first cell to the last, and holds no outputs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "docs" / "guide" / "tour.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
SHELL = re.compile(r"^!\{PYTHON\} (.*)", re.DOTALL)


def test_outputs_are_cleared():
    assert len(CODE) >= 8 and not any(cell.get("outputs") for cell in CELLS)


@pytest.mark.slow
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    # the backend that a reader without a GPU has, here and in the programs
    monkeypatch.setattr("sparseflash.backends.triton.interpreted", lambda: False)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}

    def shell(arguments: str) -> None:
        command = [sys.executable, *shlex.split(arguments)]
        if "experiments.train" in command:
            command.append("model.layers=1")  # the reader's has more
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(done.stdout, done.stderr)

    namespace = {"shell": shell}
    for cell in CODE:
        exec(SHELL.sub(r"shell('''\1''')", cell), namespace)
    printed = capsys.readouterr().out
    assert printed.count("relative error") == 4 and "test accuracy" in printed
    assert re.search(r"^local\(64\) +0\.\d+ +64x64", printed, re.MULTILINE)
