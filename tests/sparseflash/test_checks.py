"""Bad inputs: a ValueError that holds the offending value and says what to do instead."""

import re

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import masks
import sparseflash
from sparseflash import score_rules, select
from sparseflash.backends.registry import NAMES
from sparseflash.testing import make_qkv
from tests.op_cases import MASK, plans

Q, K, V = make_qkv(2, 4, 40, 40, 8, kv_heads=2)
JAGGED = torch.nested.as_nested_tensor([Q[0].mT, Q[1].mT], layout=torch.jagged)
THEIRS = create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, device="cpu")
GOOD = {"q": Q, "k": K, "v": V, "mask": MASK, "backend": "cpu"}


def like(function):
    return {"q": function(Q), "k": function(K), "v": function(V)}


def ones(*shape, dtype=torch.bool):
    return torch.ones(shape, dtype=dtype)


def seed(value):
    return {"dropout_p": 0.1, "seed": value}


def long(n):
    return dict.fromkeys("qkv", torch.zeros(1, 1, 1, 8).expand(1, 1, n, 8)) | {"mask": None}


EXTENT = "heads and head dim must be at least 1"
ONE_DTYPE = "bring them to one dtype and device"
CAST = "cast it to bfloat16, float16, float32 or float64"
PROBABILITY = "it must lie in [0, 1)"
SEED = "pass an int in [0, 2**63), an int64 tensor or None"
EXTENT_OF_MASK = "each extent of the mask must be 1 or that of q"
ARRAY = "give booleans, True where allowed"

CASES = {
    # name: changed arguments, the value in the message, the remedy in the message
    "no key heads": ({"k": K[:, :0], "v": V[:, :0]}, "k has shape (2, 0, 40, 8)", EXTENT),
    "k of another dtype": ({"k": K.double()}, "k is torch.float64", ONE_DTYPE),
    "v on another device": ({"v": V.to("meta")}, "v is torch.float32 on meta", ONE_DTYPE),
    "v of other keys": ({"v": V[:, :, 1:]}, "v (2, 2, 39, 8)",
        "all but the head dim must be equal"),
    "no data": (like(lambda t: t.to("meta")), "are on meta", "move them to cpu or cuda"),
    "all sparse": (like(torch.Tensor.to_sparse), "q is sparse", "pass a dense tensor"),
    "integers": (like(torch.Tensor.long), "torch.int64", CAST),
    "3 heads over 2": ({"q": Q[:, :3]}, "q has 3 heads, k and v 2", "must be a multiple"),
    "q an array": ({"q": Q.numpy()}, "q is a ndarray", "pass a torch tensor"),
    "all jagged": (dict.fromkeys("qkv", JAGGED), "q is nested, of layout torch.jagged", "packed"),
    "scale a text": ({"scale": "1"}, "scale is '1'", "pass a positive number or None"),
    "scale with a gradient": ({"scale": torch.tensor(0.5, requires_grad=True)},
        "scale is a tensor that requires a gradient", "multiply q by it and pass scale=1.0"),
    "two scales": ({"scale": torch.ones(2)}, "scale is a tensor of shape (2,)", "one number"),
    "dropout a text": ({"dropout_p": "0.1"}, "dropout_p is '0.1'", "pass a number in [0, 1)"),
    "dropout 1": ({"dropout_p": 1}, "dropout_p is 1", PROBABILITY),
    "seed negative": (seed(-1), "seed is -1", SEED),
    "two seeds": (seed(torch.zeros(2, dtype=torch.int64)), "of shape (2,)",
        "pass one int64 element"),
    "hopper on the CPU": ({"backend": "hopper"}, "its kernels run on CUDA tensors", "cpu"),
    "backend unknown": ({"backend": "cuda"}, "'cuda'", "auto, hopper, triton, cpu, reference"),
    "triton in float64": (like(torch.Tensor.double) | {"backend": "triton"}, "torch.float64", ""),
    "reference at length 65536": (long(2**16) | {"backend": "reference"}, f"all {2**32} scores",
        "take a backend that goes block by block"),
    "BlockMask of other length": ({"mask": masks.causal().build(41)},
        "41 queries and 41 keys, q and k have 40 and 40",
        "build it with mask.build(40, 40), or pass the Mask itself"),
    "array of other length": ({"mask": np.ones((40, 41), bool)}, "40", "n_q=40, n_k=41"),
    "BlockMask of 3 heads": ({"mask": masks.mask_from(np.ones((3, 40, 40), bool)).build(40)},
        "heads 3, q has 2 and 4", EXTENT_OF_MASK),
    "mask a string": ({"mask": MASK.key}, "mask is a str", "(masks.parse turns text"),
    "mask a pattern": ({"mask": masks.causal}, "mask is a function", "(call it: causal(...))"),
    "mask a function": ({"mask": lambda q, k: q >= k}, "mask is a function", "(masks.where turns"),
    "mask a selector": ({"mask": select.top_k(2)}, "mask is a Pooled", "q and k: selector(q, k)"),
    "mask of lists": ({"mask": [[True] * 40] * 40}, "mask is a list", "(np.array makes"),
    "mask of torch": ({"mask": THEIRS}, "mask is a BlockMask", "(masks.interop.from_flex converts"),
    "mask of ints": ({"mask": np.ones((40, 40), int)}, "int64", ARRAY),
    "mask of padding": ({"mask": ones(2, 40)}, "build it for n_q=2",
        "give the numbers of keys as lengths="),
}  # fmt: skip


@pytest.mark.parametrize("changes, value, remedy", CASES.values(), ids=CASES)
def test_bad_input_is_refused_with_value_and_remedy(changes, value, remedy):
    """Also after a good call, whose plan must not serve it."""
    before, bad = sparseflash.attention(**GOOD), GOOD | changes
    message = f"{re.escape(value)}.*{re.escape(remedy)}"
    if changes.get("backend") in NAMES:  # `explain` answers why a known backend cannot run
        message = f"{changes['backend']}' cannot run this call: .*{message}"
        assert value in sparseflash.explain(**bad)
    else:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            sparseflash.explain(**bad)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        sparseflash.attention(**bad)
    assert torch.equal(before, sparseflash.attention(**GOOD))
    assert len(plans()) == 1 + ("seed" in changes)  # looked at when the call runs


@pytest.mark.parametrize("shape", [(), (1,), (7,)])
def test_int32_seeds_are_refused(shape):
    """A table of keys for ranks is int32 too: kernels would read beyond these."""
    bad = GOOD | seed(torch.full(shape, 3, dtype=torch.int32))
    for function in (sparseflash.attention, sparseflash.explain):
        with pytest.raises(ValueError, match=r"seed is a torch.int32.*int64"):
            function(**bad)


def test_unknown_option_is_refused():
    for function in (sparseflash.attention, sparseflash.explain):
        with pytest.raises(TypeError, match="casual"):
            function(Q, K, V, casual=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_of_numpy_pass(dtype):
    def call(kind, seed):
        score, options = score_rules.softcap(kind(2)), {"scale": kind(0.5), "dropout_p": kind(0.25)}
        return sparseflash.attention(**GOOD, **options, seed=seed, score=score)

    ours, theirs = call(float, 3), call(dtype, np.int64(3))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name, value, remedy", [
    ("is_causal", True, "masks.causal()"), ("attn_mask", torch.zeros(40, 40), "mask="),
    ("window_size", (128, 0), "masks.local"), ("batch_first", True, "leave it out"),
    ("enable_gqa", True, "leave it out"), ("cu_seqlens_q", None, "packed.documents"),
    ("num_heads", 4, "heads="), ("dropuot_p", 0.5, "help"),
])  # fmt: skip
def test_arguments_of_other_libraries(name, value, remedy):
    shown = "Tensor" if isinstance(value, torch.Tensor) else value
    layer = sparseflash.BlockSparseAttention(16, 2)
    calls = (
        lambda given: sparseflash.attention(Q, K, V, **given),
        lambda given: sparseflash.explain(Q, K, V, **given),
        lambda given: sparseflash.decode(Q, K, V, **given),
        lambda given: sparseflash.BlockSparseAttention(16, 2, **given),
        lambda given: layer(torch.zeros(1, 8, 16), **given),
    )
    for call in calls:
        with pytest.raises(TypeError, match=re.escape(remedy)) as found:
            call({name: value})
        assert f"argument {name}, which is {shown}" in str(found.value)


def test_other_orders_and_kinds_of_arguments():
    attention = sparseflash.attention
    with pytest.raises(TypeError, match=r"sink.*take sparseflash.attention"):
        sparseflash.decode(Q, K, V, sink=torch.ones(4))
    for mask in (masks.causal(), masks.causal().build(40)):
        with pytest.raises(ValueError, match=r"q is a (Band|BlockMask); .* after q, k and v"):
            attention(mask, Q, K, V)
    with pytest.raises(ValueError, match=r"mask is a bool.*is_causal"):
        attention(Q, K, V, True)
    with pytest.raises(ValueError, match=r"mask is torch.float32.*mask == 0"):
        attention(Q, K, V, torch.zeros(40, 40))
    with pytest.raises(ValueError, match=r"lengths is torch.bool of shape \(2, 40\).*mask.sum"):
        attention(Q, K, V, lengths=torch.ones(2, 40, dtype=torch.bool))
