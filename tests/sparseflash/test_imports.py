"""What an import brings along, what the public names say, and what `explain` answers."""

import sys

import pytest
import torch

import masks
import sparseflash
from tests.processes import in_a_new_process

OPTIONAL = "sparseflash.integrations.transformers", "sparseflash.integrations.diffusers"
HEAVY = ("triton", "hydra", "matplotlib", "omegaconf", "experiments", "sympy")
OUTSIDE = f"""
import sys
import torch

def show(text):
    print(text, end="====")

show(" ".join(name for name in {HEAVY} if name in sys.modules))
import masks, sparseflash
q = torch.ones(1, 1, 16, 16, requires_grad=True)
sparseflash.attention(q, q, q, masks.causal()).sum().backward()
show(" ".join(name for name in {HEAVY} if name in sys.modules))
for mask in (None, masks.causal()):
    show(sparseflash.explain(q.detach(), q.detach(), q.detach(), mask))
"""


@pytest.fixture(scope="module")
def outside() -> list[str]:
    """What a process without the interpreter tells: heavy modules before and after, and `explain`
    without a mask and with one.
    """
    return in_a_new_process("-c", OUTSIDE).split("====")


def test_import_and_call_on_the_cpu_are_light(outside):
    before, after = (set(names.split()) for names in outside[:2])
    # torch itself may bring triton: what counts is what sparseflash adds to it
    assert after <= before and not {"hydra", "matplotlib"} & after


USE_OF_MASKS = f"""
import sys, masks
mask = masks.parse('local:9&causal')
mask.build(100)
print(*(n for n in {("torch", "einops", "sparseflash", *HEAVY)} if n in sys.modules))
mask.draw(100)
assert "matplotlib.pyplot" not in sys.modules, "a picture needs no display"
"""


def test_import_and_use_of_masks_load_numpy_only():
    pytest.importorskip("matplotlib")
    assert not in_a_new_process("-c", USE_OF_MASKS)


def test_a_file_of_the_users_in_place_of_masks_is_named(tmp_path):
    """The folder of a script comes before the packages that are installed."""
    (tmp_path / "masks.py").write_text("import sparseflash\n")
    script = tmp_path / "script.py"
    script.write_text("try:\n    import sparseflash\nexcept ImportError as e:\n    print(e)")
    said = in_a_new_process(str(script))
    assert str(tmp_path / "masks.py") in said and "another name" in said


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    """sys.modules[name] = None is how Python marks a module that cannot be imported."""
    for code, missing in {
        "masks.causal().draw(9)": "matplotlib.figure",
        "import sparseflash.integrations.transformers": "transformers.masking_utils",
        "import sparseflash.integrations.diffusers": "diffusers.models",
    }.items():
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.startswith(OPTIONAL)]:
                patch.delitem(sys.modules, name)
            for name in [missing, *(x for x in sys.modules if x.startswith(f"{missing}."))]:
                patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=f"pip install '{missing.partition('.')[0]}"):
                exec(code, {"masks": masks})


def answers(text: str, direction: str = "forward") -> dict[str, str]:
    """Backend -> answer for one direction."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(direction)) + 1
    return dict(line.strip().split(": ", 1) for line in lines[first : first + 4])


@pytest.mark.parametrize("call", [2, 3], ids=["None", "masks.causal()"])
def test_explain_without_a_gpu_names_cpu_and_why_no_kernels(call, outside):
    found = answers(outside[call])
    assert list(found) == ["hopper", "triton", "cpu", "reference"]
    for name in ("hopper", "triton"):
        assert "CUDA tensors" in found[name] and "cpu" in found[name]
    assert "TRITON_INTERPRET=1" in found["triton"]
    assert found["cpu"] == "chosen" and found["reference"] == "could run this"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests on a GPU run without the interpreter")
def test_explain_under_the_interpreter_names_triton():
    q = torch.ones(1, 1, 16, 16)
    answer = answers(sparseflash.explain(q, q, q))
    assert answer["triton"] == "chosen" and "could run" in answer["cpu"]
    q = q.bfloat16()
    answer = answers(sparseflash.explain(q, q, q))
    assert "bfloat16" in answer["triton"] and answer["cpu"] == "chosen"
