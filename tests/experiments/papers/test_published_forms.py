"""Longformer and BigBird as published compute what their masks say, forward and backward."""

import pytest
import torch

from experiments.papers.attention.blocked_gather import BlockedGather
from experiments.papers.attention.methods import METHODS, Setting
from experiments.papers.attention.sliding_chunks import SlidingChunks
from sparseflash.testing import relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")
FORMS = {"chunks": (SlidingChunks, {"window": 32}), "gather": (BlockedGather, {"block": 16})}


def expected(q, k, v, allowed):
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [7, 16, 31, 48, 161, 256])
@pytest.mark.parametrize("padding", [False, True])
def test_the_form_is_its_mask(form, n, padding):
    cls, own = FORMS[form]
    made = cls(**own, heads=2, head_dim=8, length=n)
    torch.manual_seed(0)
    qkv = [torch.randn(2, 2, n, 8, requires_grad=True) for _ in range(3)]
    lengths = torch.tensor([n, max(1, n - 20)], dtype=torch.int32) if padding else None
    dense = torch.from_numpy(made.pattern().build(n, heads=2, block_size=16).to_dense())
    allowed = dense.expand(2, 2, n, n)
    queries = torch.ones(2, 1, n, 1, dtype=torch.bool)
    if lengths is not None:
        queries = (torch.arange(n) < lengths[:, None])[:, None, :, None]
        allowed = allowed & queries.mT | ~queries  # queries of padding mean nothing
    exact = [t.detach().double().requires_grad_() for t in qkv]
    out, true = made(*qkv, lengths), expected(*exact, allowed)
    out, true = out.where(queries, 0), true.where(queries, 0)
    assert relative_error(out, true) < 1e-5
    dout = torch.randn(out.shape)
    found = torch.autograd.grad(out, qkv, dout)
    for a, b in zip(found, torch.autograd.grad(true, exact, dout.double()), strict=True):
        assert relative_error(a, b) < 1e-5


def test_they_are_the_functions_of_the_same_masks_on_ours():
    for form, mask in (("chunks", "longformer"), ("gather", "bigbird")):
        texts = []
        for name in (form, mask):
            setting = Setting(name, 1, 2, 1024, 16, "float32")
            texts.append(setting.case(setting.make(torch.device("cpu"))).mask)
        assert texts[0] == texts[1] and METHODS[form].exact
