"""What an import brings along, what the public names say, and what `explain` answers."""

import inspect
import re
from functools import cache

import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import make_qkv
from tests.processes import in_a_new_process

HEAVY = ("triton", "hydra", "matplotlib", "omegaconf", "experiments", "sympy")


@cache
def loaded_by(statement: str, names: tuple[str, ...] = HEAVY) -> set[str]:
    code = f"import sys; {statement}; print(*(n for n in {names!r} if n in sys.modules))"
    return set(in_a_new_process("-c", code).split())


def test_import_and_call_on_the_cpu_are_light():
    # torch itself may bring triton: what counts is what sparseflash adds to it
    statement = (
        "import torch, masks, sparseflash; q = torch.ones(1, 1, 16, 16, requires_grad=True);"
        " sparseflash.attention(q, q, q, masks.causal()).sum().backward()"
    )
    loaded = loaded_by(statement)
    assert loaded <= loaded_by("import torch") and not {"hydra", "matplotlib"} & loaded


def test_import_and_use_of_masks_load_numpy_only():
    statement = "import masks; masks.parse('local:9&causal').build(100)"
    assert not loaded_by(statement, ("torch", "einops", "sparseflash", *HEAVY))


def public_names():
    for module in (sparseflash, masks):
        yield module.__name__, module
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)
    for cls in (masks.Mask, masks.BlockMask):
        for name, member in vars(cls).items():
            if not name.startswith("_") and (callable(member) or hasattr(member, "__get__")):
                yield f"masks.{cls.__name__}.{name}", member


@pytest.mark.parametrize("value", [pytest.param(v, id=n) for n, v in public_names()])
def test_public_name_has_a_docstring(value):
    text = inspect.getdoc(getattr(value, "__func__", value))
    assert text and len(text) > 10
    assert not text.startswith(f"{getattr(value, '__name__', '')}(")  # that of a bare dataclass


@pytest.mark.parametrize("function", [sparseflash.attention, sparseflash.decode])
def test_every_parameter_is_documented_in_order(function):
    names = re.findall(r"^    (\w+):", inspect.getdoc(function) or "", re.MULTILINE)
    wanted = list(inspect.signature(function).parameters)
    assert names[: len(wanted)] == wanted and "ValueError" in names[len(wanted) :]


def answers(text: str, direction: str = "forward") -> dict[str, str]:
    """Backend -> answer for one direction."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(direction)) + 1
    return dict(line.strip().split(": ", 1) for line in lines[first : first + 4])


CALLS = ("float32", "None"), ("float32", "masks.causal()"), ("bfloat16", "None")


@cache
def explained(**environment: str) -> dict[tuple[str, str], dict[str, str]]:
    """Answers to all calls, from one process."""
    code = "import torch, masks, sparseflash\n"
    for dtype, mask in CALLS:
        code += f"q = torch.ones(1, 1, 16, 16, dtype=torch.{dtype})\n"
        code += f"print(sparseflash.explain(q, q, q, {mask}), end='====')\n"
    told = in_a_new_process("-c", code, **environment).split("====")
    return {call: answers(text) for call, text in zip(CALLS, told, strict=False)}


@pytest.mark.parametrize("mask", ["None", "masks.causal()"])
def test_explain_without_a_gpu_names_cpu_and_why_no_kernels(mask):
    found = explained()["float32", mask]
    assert list(found) == ["hopper", "triton", "cpu", "reference"]
    for name in ("hopper", "triton"):
        assert "CUDA tensors" in found[name] and "cpu" in found[name]
    assert "TRITON_INTERPRET=1" in found["triton"]
    assert found["cpu"] == "chosen" and found["reference"] == "could run this"


def test_explain_under_the_interpreter_names_triton():
    answer = explained(TRITON_INTERPRET="1")["float32", "None"]
    assert answer["triton"] == "chosen" and "could run" in answer["cpu"]
    answer = explained(TRITON_INTERPRET="1")["bfloat16", "None"]
    assert "bfloat16" in answer["triton"] and answer["cpu"] == "chosen"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_explain_of_a_named_backend_chooses_it(backend):
    lines = sparseflash.explain(*make_qkv(1, 1, 16, 16, 16), backend=backend).splitlines()
    assert [line for line in lines if line.endswith("chosen")] == [f"  {backend}: chosen"] * 2
    assert lines[0] == f"forward: {backend}" and lines[5] == f"backward: {backend}"


def test_explain_gives_the_reason_of_a_refusal():
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 2**16, 8)
    found = answers(sparseflash.explain(q, q, q))
    assert "float64" in found["triton"] and found["cpu"] == "chosen"
    assert str(2**32) in found["reference"]


def test_explain_takes_every_option_of_attention():
    q, k, v = make_qkv(1, 1, 16, 16, 16, dtype=torch.float64)
    options = {"scale": 0.5, "return_lse": True, "return_max_scores": True, "deterministic": True}
    answer = sparseflash.explain(q, k, v, masks.causal(), dropout_p=0.1, seed=3, **options)
    assert "cpu: chosen" in answer
