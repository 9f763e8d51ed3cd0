"""Terms of the softmax on a GPU, against the float64 oracle."""

from dataclasses import replace

import pytest

import masks
from tests.attention_cases import DTYPES, GPU_LENGTHS, LOW, Case, check, random_case
from tests.gpu_calls import GPU

pytestmark = GPU


@pytest.mark.parametrize("seed", range(300, 340))
def test_random_problem(seed, backend):
    hopper = backend == "hopper"  # it rounds an output with a sink twice
    case = random_case(seed, GPU_LENGTHS, (16, 40, 64, 128), LOW if hopper else DTYPES)
    check(replace(case, terms=("sink",)), backend, "cuda", slack=2 if hopper else 1)


@pytest.mark.parametrize("seed", range(340, 380))
def test_terms_of_the_scores(seed):
    """Those that only the portable kernels have: one, or all with a sink."""
    case = random_case(seed, GPU_LENGTHS, (16, 40, 64, 128), DTYPES)
    terms = ("sink", "softcap", "slopes", "bias")
    check(replace(case, terms=terms[seed % 5 : seed % 5 + 1] or terms), "triton", "cuda")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
def test_bias_at_every_width(head_dim, dtype):
    """The backward with a bias has tiles of its own."""
    case = Case(700, 1000, head_dim, dtype, heads=4, mask=masks.causal(), terms=("bias",), seed=30)
    check(case, "triton", "cuda")
