"""The notebook of the guide runs from the first cell to the last, and holds its outputs."""

import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "docs" / "guide" / "tour.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
FEWER = {"steps=60": "steps=10", "eval_every=20": "eval_every=5"}
SHELL = re.compile(r"^!\{PYTHON\} (.*)", re.DOTALL)


def test_outputs_and_pictures_are_stored():
    outputs = [output for cell in CELLS for output in cell.get("outputs", [])]
    assert len(CODE) >= 8 and not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    told = "".join("".join(output.get("text", "")) for output in outputs)
    assert "relative error" in told and "test accuracy" in told and "/home" not in told


@pytest.mark.slow
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    # the backend that a reader without a GPU has, here and in the programs
    monkeypatch.setattr("sparseflash.backends.triton.interpreted", lambda: False)

    def shell(arguments: str) -> None:
        """Runs a program as a command does, in this process: a start takes seconds."""
        flag, module, *words = shlex.split(arguments)
        assert flag == "-m"
        if module == "experiments.train":  # the reader's has more layers and steps
            words = [FEWER.get(word, word) for word in words] + ["model.layers=1"]
            assert {*FEWER.values()} <= {*words}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [module, *words])
            import_module(module).main()

    namespace = {"shell": shell}
    for cell in CODE:
        exec(SHELL.sub(r"shell('''\1''')", cell), namespace)
    printed = "".join(capsys.readouterr())
    assert printed.count("relative error") == 4 and "test accuracy" in printed
    assert re.search(r"^local\(64\) +0\.\d+ +64x64", printed, re.MULTILINE)
