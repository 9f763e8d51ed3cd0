"""The code of the documentation runs: blocks of pages, scripts and the notebook."""

import contextlib
import io
import itertools
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.processes import on_ranks

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODELS = re.compile(r"^(?:from|import) (transformers|diffusers|timm)\b", re.MULTILINE)
PAGES = {
    page: found
    for page in sorted(DOCS.rglob("*.md"))
    if (found := BLOCK.findall(page.read_text()))
    and page.stem not in ("own_model", "many_gpus")
    and "templates" not in page.parts
}


pytestmark = pytest.mark.usefixtures("no_interpreter")  # as a reader without a GPU


@pytest.mark.usefixtures("own_patterns")  # some pages define patterns
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for needed in ("matplotlib", "scipy", *MODELS.findall(page.read_text())):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": page.stem}
    for block in PAGES[page]:
        few = re.sub("([26])0_000", r"\1_000", block)  # examples, not 60_000
        exec(compile(few, str(page), "exec"), namespace)


def test_every_step_of_online_softmax_keeps_the_claim_of_its_induction():
    """Any cuts of random rows, with forbidden and large scores."""
    blocks = PAGES[DOCS / "guide/how_it_works.md"]
    [block] = [block for block in blocks if "def online_step" in block]
    page: dict = {"np": np}
    exec(block[: block.index("q, k, v, dout =")], page)
    for rng in map(np.random.default_rng, range(50)):
        n, rows = int(rng.integers(1, 40)), 4
        s, v = rng.choice([1, 1000]) * rng.standard_normal((rows, n)), rng.standard_normal((n, 3))
        s[rng.random((rows, n)) < rng.choice([0, 0.5, 1])] = -np.inf
        state = np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, 3))
        cuts = np.unique([0, n, *rng.integers(0, n + 1, 5)])
        for start, stop in itertools.pairwise(cuts):
            state = page["online_step"](*state, s[:, start:stop], v[start:stop])
            m = s[:, :stop].max(1)
            p = np.exp(s[:, :stop] - np.where(np.isneginf(m), 0, m)[:, None])
            for found, right in zip(state, (m, p.sum(1), p @ v[:stop]), strict=True):
                np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


# ---- scripts, with fewer steps and shorter sequences


def test_the_script_trains_a_model_and_the_page_runs(capsys):
    script, *rest = BLOCK.findall((DOCS / "guide/own_model.md").read_text())
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
    few = script.replace("range(101)", "range(26)")
    assert few != script
    exec("\n".join([few, *rest]), {"__name__": "__main__"})
    bits = [float(x) for x in re.findall(r"([\d.]+) bits a byte", capsys.readouterr().out)]
    assert len(bits) == 2 and bits[0] > 7.5 and bits[-1] < 6


def run_script(rank: int, world: int, script: str, out: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script, {"__name__": "__main__"})
    out.with_suffix(f".{rank}").write_text(printed.getvalue())


def test_two_processes_train_on_one_sequence(tmp_path):
    partition, script = BLOCK.findall((DOCS / "guide/many_gpus.md").read_text())
    exec(partition.replace("partition.png", str(tmp_path / "partition.png")), {})
    few = script.replace("N, DIM, HEADS = 2048", "N, DIM, HEADS = 256")
    assert few != script
    on_ranks(2, run_script, few, tmp_path / "printed", group=False)
    losses = re.findall(r"loss ([\d.]+)", (tmp_path / "printed.0").read_text())
    assert len(losses) == 4 and float(losses[-1]) < 3.6


# ---- the notebook

CELLS = json.loads((DOCS / "guide/tour.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
FEWER = {"steps=60": "steps=10", "eval_every=20": "eval_every=5"}
SHELL = re.compile(r"^!\{PYTHON\} (.*)", re.DOTALL)


@pytest.mark.slow
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)

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
