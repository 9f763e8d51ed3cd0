"""Training on several GPUs: NCCL within the captured step, the same result as on one."""

import pytest
import torch

from tests.experiments.lra.training.commands import assert_processes_train_as_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.parametrize("attention", ["linear", "sparse"])
@pytest.mark.parametrize("compile", [False, True], ids=["graph", "compile+graph"])
def test_all_gpus_train_as_one(tmp_path, attention, compile):
    assert_processes_train_as_one(
        tmp_path,
        torch.cuda.device_count(),
        "listops",
        attention,
        batch=16,
        precision="fp32",
        compile=str(compile).lower(),
        graph="true",
    )
