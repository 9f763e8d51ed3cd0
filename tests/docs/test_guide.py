"""Every Python block of the documentation runs, in order, in one namespace a page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODELS = re.compile(r"^(?:from|import) (transformers|diffusers|timm)\b", re.MULTILINE)
PAGES = {
    page: found
    for page in sorted(DOCS.rglob("*.md"))
    # test_guide_own_model.py runs these as files, without the interpreter of Triton
    if (found := BLOCK.findall(page.read_text()))
    and page.stem not in ("own_model", "many_gpus")
    and "templates" not in page.parts
}


@pytest.mark.usefixtures("own_patterns")  # some pages define patterns
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for needed in ("matplotlib", "scipy", *MODELS.findall(page.read_text())):
        pytest.importorskip(needed)
    # the backend that a reader without a GPU has; the interpreter takes a minute for a page
    monkeypatch.setattr("sparseflash.backends.triton.interpreted", lambda: False)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": page.stem}
    for block in PAGES[page]:
        few = re.sub("([26])0_000", r"\1_000", block)  # examples, not 60_000
        exec(compile(few, str(page), "exec"), namespace)


def test_the_guide_has_code():
    assert {"selectors", "masks"} <= {page.stem for page in PAGES}
