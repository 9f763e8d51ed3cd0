"""The call of FlexAttention: torch's own on a CPU is the reference."""

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import masks
from sparseflash.integrations import flex
from sparseflash.testing import logits, oracle

N = 200
DOCUMENTS = torch.arange(N) // 70
FIRST = torch.tensor([0, 9])
MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k]),
    "empty rows": lambda b, h, q, k: (q > 30) & (k < 100),
    "batch and heads": lambda b, h, q, k: (k >= FIRST[b]) & ((q - k).abs() <= 20 * (h + 1)),
}


def inputs(heads=4, keys=N):
    torch.manual_seed(0)
    shapes = ((2, 4, N, 16), (2, heads, keys, 16), (2, heads, keys, 24))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def block_mask(name, keys=N, **options):
    return theirs.create_block_mask(MODS[name], 2, 4, N, keys, device="cpu", **options)


@pytest.mark.parametrize("name, size", zip(MODS, [16, (128, 64), 128, 16], strict=True))
def test_output_lse_and_gradients(name, size):
    tensors = inputs(heads=2)
    mask = block_mask(name, BLOCK_SIZE=size)
    pairs = theirs.create_mask(MODS[name], 2, 4, N, N, device="cpu")
    out, aux = flex.flex_attention(
        *tensors, None, mask, 0.3, True, return_aux=theirs.AuxRequest(lse=True, max_scores=True)
    )
    expected, lse = oracle(*tensors, pairs, 0.3)
    maxima = logits(*tensors[:2], pairs, 0.3).amax(-1)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.lse, lse.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.max_scores, maxima.float(), rtol=1e-5, atol=1e-5)
    assert not aux.max_scores.requires_grad
    request = theirs.AuxRequest(max_scores=True)  # alone, which torch refuses on a CPU
    alone = flex.flex_attention(*tensors, None, mask, 0.3, True, return_aux=request)[1]
    assert type(alone) is theirs.AuxOutput and alone.lse is None
    assert torch.equal(alone.max_scores, aux.max_scores)
    seen = pairs.any(-1)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum() + aux.lse[seen].sum(), tensors)
    expected = torch.autograd.grad(((expected * weights)[seen]).sum() + lse[seen].sum(), tensors)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"return_lse": True, "scale": 0.1}, "lse", "none"])
def test_the_results_have_the_form_of_torch(options):
    if isinstance(options, str):
        options = {"return_aux": theirs.AuxRequest(lse=options == "lse")}
    tensors = [t.detach() for t in inputs(keys=150)]
    mask = block_mask("empty rows", keys=150)
    expected = theirs.flex_attention(*tensors, block_mask=mask, **options)
    found = flex.flex_attention(*tensors, block_mask=mask, **options)
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        assert type(found[1]) is type(expected[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_without_a_mask_and_with_one_of_masks():
    tensors = [t.detach() for t in inputs()]
    expected = theirs.flex_attention(*tensors)
    torch.testing.assert_close(flex.flex_attention(*tensors), expected)
    expected = theirs.flex_attention(*tensors, block_mask=block_mask("causal"))
    for mask in (masks.causal(), masks.causal().build(N)):
        found = flex.flex_attention(*tensors, block_mask=mask)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_inside_a_compiled_function():
    tensors = [t.detach() for t in inputs()]
    theirs_mask = block_mask("documents")
    ours = flex.convert(theirs_mask)
    compiled = torch.compile(
        lambda q, k, v: flex.flex_attention(q, k, v, block_mask=ours),
        backend="eager", fullgraph=True,
    )  # fmt: skip
    expected = flex.flex_attention(*tensors, block_mask=theirs_mask)
    torch.testing.assert_close(compiled(*tensors), expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"score_mod": lambda s, *_: torch.erf(s)}, "torch.erf is not known"),
        ({"score_mod": "causal"}, "score_mod is 'causal'; pass a function"),
        ({"return_aux": theirs.AuxRequest(lse=True), "return_lse": True}, "alone"),
        ({"heads": 2}, "4 heads, key 2: pass enable_gqa=True"),
        ({"keys": 100}, "200 keys, q and k have 200 and 100"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
    ids=["score_mod", "no function", "both", "heads", "lengths", "scale"],
)
def test_what_cannot_be_done_is_refused(options, message):
    tensors = inputs(heads=options.pop("heads", 4), keys=options.pop("keys", N))
    with pytest.raises(ValueError, match=message):
        flex.flex_attention(*tensors, block_mask=block_mask("causal"), **options)
