"""Attention of q, k and v in one tensor: the operators, and layers under torch.compile."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import masks
from sparseflash import BlockSparseAttention, Rotary, select
from sparseflash.attention import attention_of_qkv
from sparseflash.ops.qkv import parts
from sparseflash.terms import term_options
from tests.op_cases import BACKENDS
from tests.qkv_cases import Layer, check_operator, gradients

MASK = masks.local(30) | masks.butterfly(16)


def tensor(heads=2, kv_heads=1, n=70, head_dim=16, dtype=torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, n, heads + 2 * kv_heads, head_dim, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mask", "heads", "kv_heads", "dropout_p"),
    [(None, 2, 2, 0.0), (MASK, 2, 1, 0.0), (MASK & masks.causal(), 2, 2, 0.3)],
)
def test_results_and_gradients_are_those_of_the_parts(
    monkeypatch, backend, mask, heads, kv_heads, dropout_p
):
    check_operator(
        monkeypatch, backend, tensor(heads, kv_heads), kv_heads, mask, dropout_p=dropout_p,
        deterministic=backend != "cpu", in_place=backend == "triton",
    )  # fmt: skip


def test_opcheck():
    options = None, 0.0, False, "cpu", *term_options(None), True
    call = tensor().requires_grad_(), 1, MASK.key, [], [], None, None, None, None, *options, True
    torch.library.opcheck(torch.ops.sparseflash.forward_qkv, call)
    out, lse, _ = torch.ops.sparseflash.forward_qkv(*call)
    out, lse = out.detach(), lse.detach()
    call = out, None, tensor(), 1, out, lse, *call[2:-1]
    torch.library.opcheck(torch.ops.sparseflash.backward_qkv, call)


def test_a_gradient_of_the_lse_counts():
    options = None, 0.0, False, "reference", *term_options(None), False
    qkv = tensor(dtype=torch.float64).requires_grad_()
    call = 1, "", [], [], None, None, None, None, *options, True
    found = gradients(torch.ops.sparseflash.forward_qkv(qkv, *call)[1], qkv)
    q, k, _ = parts(qkv, 1)
    wanted = gradients((q @ k.mT * 16**-0.5).logsumexp(-1), qkv)
    torch.testing.assert_close(found, wanted)


def operators(layer, x, fullgraph=True) -> tuple[list[str], ...]:
    """The names of the operators in the compiled forward and backward of a layer, whose results
    are those of the eager one."""
    names = []

    def compiler(graph, _):
        names.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    call = torch.compile(layer, backend=aot_autograd(fw_compiler=compiler), fullgraph=fullgraph)
    out = call(x)
    out.sum().backward()
    torch.testing.assert_close(out, layer(x))
    return tuple(names)


def copies(names: list[str]) -> list[str]:
    return [name for name in names if any(word in name for word in ("stack", "cat", "clone"))]


def test_a_compiled_layer_has_the_gradient_without_a_copy():
    x = torch.randn(2, 70, 16)
    for layer in (Layer(2, 1, 16, MASK), BlockSparseAttention(16, 2, kv_heads=1, mask=MASK)):
        forward, backward = operators(layer, x)
        assert "sparseflash.forward_qkv.default" in forward
        assert "sparseflash.backward_qkv.default" in backward and not copies(backward)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "keep_max_scores": True}, {"mask": MASK}])
def test_a_compiled_layer_equals_the_eager_one(options):
    torch.manual_seed(0)
    layer, x = BlockSparseAttention(16, 2, **options), torch.randn(2, 70, 16, requires_grad=True)
    parameters = [x, *layer.parameters()]
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        out = call(x)
        results.append((out, layer.max_scores, *gradients(out, *parameters)))
    torch.testing.assert_close(*results)


class Doubled(BlockSparseAttention):
    def attend(self, q, k, v, lengths=None):
        return super().attend(q, k, v, lengths) * 2


@pytest.mark.parametrize(
    "layer",
    [
        Doubled(16, 2, mask=MASK),
        BlockSparseAttention(16, 2, mask=MASK, rotary=Rotary()),
        BlockSparseAttention(16, 2, mask=select.top_k(2, block_size=16)),
    ],
    ids=["attend of its own", "rotary", "selector"],
)
def test_what_needs_q_k_and_v_gets_them(layer):
    torch.manual_seed(0)
    x = torch.randn(2, 64, 16)
    whole = not isinstance(layer.mask, select.Selector)  # the first call has parts outside
    names = [name for part in operators(layer, x, whole) for name in part]
    assert not any("qkv" in name for name in names)


def test_no_gradient_takes_the_plain_operator():
    layer, x = BlockSparseAttention(16, 2, mask=MASK), torch.randn(2, 70, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x))


def test_a_compiled_call_follows_autocast():
    call = torch.compile(attention_of_qkv, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(tensor().requires_grad_(), 1, MASK).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", [0, "fastest"])
def test_a_compiled_call_is_checked(backend):
    layer = Layer(2, 1, 16, MASK, backend=backend)
    with pytest.raises(ValueError, match="backend is"):
        torch.compile(layer, backend="aot_eager")(torch.randn(1, 20, 16))
