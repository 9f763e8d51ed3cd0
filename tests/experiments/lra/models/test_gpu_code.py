"""A training step, as torch.compile writes it for a GPU."""

import pytest
import torch

from tests.processes import in_a_new_process

VERSION = "2.13"  # of torch, whose internals tests.experiments.lra.models.gpu_code uses


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the step")
@pytest.mark.skipif(not torch.__version__.startswith(VERSION), reason=f"for torch {VERSION}")
def test_the_kernels_with_dropout_compile():
    kernels = in_a_new_process("-m", "tests.experiments.lra.models.gpu_code", "sparse").splitlines()
    assert len(kernels) > 8  # of two layers, forward and backward
