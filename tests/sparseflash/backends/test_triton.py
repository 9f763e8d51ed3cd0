"""The Triton kernels in Triton's interpreter: float32 and float16 against the float64 oracle."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.backends import triton as backend
from sparseflash.testing import make_qkv
from tests.attention_cases import HEAD_DIMS, INTERPRETER_LENGTHS, Case, check, random_case
from tests.problems import problem_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the kernels on it"
)


DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("seed", range(24))
def test_random_problem(seed):
    check(random_case(seed, INTERPRETER_LENGTHS, HEAD_DIMS, DTYPES), "triton", "cpu")


BOTH_KINDS = masks.local(150) | masks.global_tokens(40)  # partial and full blocks in one row
EMPTY = masks.causal() & ~masks.causal()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "length, mask",
    [(1, None), (63, None), (128, None), (257, None), (390, BOTH_KINDS), (270, EMPTY)],
)
def test_masks(length, mask, dtype):
    check(Case(length, length, 64, dtype, mask=mask), "triton", "cpu")


@pytest.fixture
def no_plans():
    """The cache of plans, empty before and after: plans hold the tiles they were made with."""
    sparseflash.clear_cache()
    yield
    sparseflash.clear_cache()


@pytest.mark.parametrize("head_dim", [32, 72, 128, 256])
@pytest.mark.parametrize("family", ["ampere", "blackwell", "geforce", "cdna"])
def test_tiles_of_other_gpus(family, head_dim, monkeypatch, no_plans):
    monkeypatch.setattr(backend, "family_of", lambda device: family)
    monkeypatch.setattr(backend, "_has_tma", lambda device: family not in ("ampere", "cdna"))
    check(Case(150, 150, head_dim, mask=masks.causal(), dropout_p=0.1), "triton", "cpu")


@pytest.mark.parametrize(
    ("triton", "numpy", "refused"),
    [("3.6.0", "2.4.1", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.4.1", False)],
)
def test_an_interpreter_that_fails_with_this_numpy_is_refused(triton, numpy, refused, monkeypatch):
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr("numpy.__version__", numpy)
    reason = backend.unsupported(problem_of(*make_qkv(1, 1, 16, 16, 16), None), "forward")
    if refused:
        assert reason and "Triton 3.6.0 fails with NumPy 2.4.1; install numpy<2.4" in reason
    else:
        assert reason is None
