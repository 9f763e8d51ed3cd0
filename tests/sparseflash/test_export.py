"""The layer in torch.export and AOTInductor."""

import shutil

import pytest
import torch
from torch.export import Dim

import masks
from sparseflash import BlockSparseAttention, Rotary

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BATCH, N = Dim("batch", min=2, max=64), Dim("n", min=2, max=4096)


def exported(dim: int, **given: torch.Tensor):
    """A layer, and its program for every batch and length."""
    layer = BlockSparseAttention(dim, 2, mask=masks.local(5), rotary=Rotary()).eval()
    x = torch.randn(3, 40, dim)
    dynamic = {"x": {0: BATCH, 1: N}} | {name: {0: BATCH} for name in given}
    with torch.no_grad():
        return layer, torch.export.export(layer, (x,), given, dynamic_shapes=dynamic)


def test_batch_and_length_stay_open():
    layer, program = exported(16)
    x = torch.randn(5, 33, 16)
    torch.testing.assert_close(program.module()(x), layer(x))
    layer, program = exported(16, lengths=torch.tensor([40, 3, 7]))
    x, lengths = torch.randn(2, 128, 16), torch.tensor([128, 100])
    found, wanted = program.module()(x, lengths=lengths), layer(x, lengths=lengths)
    torch.testing.assert_close(found, wanted)
    layer, program = exported(16, context=torch.randn(3, 24, 16))
    x, context = torch.randn(2, 30, 16), torch.randn(2, 24, 16)
    found, wanted = program.module()(x, context=context), layer(x, context=context)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_aot_inductor(tmp_path):
    layer, program = exported(16)
    path = str(tmp_path / "layer.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    x = torch.randn(5, 33, 16)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), layer(x))
