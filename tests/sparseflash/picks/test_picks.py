"""Picks: what they accept, the lists made of them, and attention to them in the interpreter."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import masks
import sparseflash
from sparseflash import select
from sparseflash.picks import kernels as picked
from sparseflash.picks import operator as module
from sparseflash.picks.picks import Picks
from sparseflash.testing import make_qkv
from tests import picks_cases
from tests.op_cases import INTERPRETED
from tests.picks_cases import CASES, GATHERED

pytest.importorskip("triton")
pytestmark = INTERPRETED


# GATHERED has the likes of the others
BOTH_FORMS = "more queries than keys", "all blocks", "whole tiles, heads side by side"


@pytest.mark.parametrize(
    "name, gathers", [*((name, False) for name in CASES), *((name, True) for name in BOTH_FORMS)]
)
def test_attention(name, gathers, monkeypatch):
    """Both forms, whichever the call would choose."""
    monkeypatch.setattr(picked, "_gathers", lambda *given: gathers)
    picks_cases.check(CASES[name], "cpu")


@pytest.mark.parametrize("name", sorted(GATHERED.keys() - {"half, many queries"}))
def test_gathered_queries(name, monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: True)
    picks_cases.check(GATHERED[name], "cpu", seed=1)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "joined"])
def test_opcheck(gathers, monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: gathers)
    qkv = make_qkv(1, 2, 20, 20, 16, kv_heads=1, v_head_dim=24, requires_grad=True)
    call = select.nsa(1, 16).picks(*qkv[:2]).blocks, 16, True, 0.25
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward = torch.ops.sparseflash.picked_forward.default
    torch.library.opcheck(forward, (*qkv, *call), test_utils=utils)
    given = [t.detach() for t in qkv]
    results = torch.ops.sparseflash.picked_forward(*given, *call)
    backward = torch.ops.sparseflash.picked_backward.default
    backward_call = results[0], results[1], *given, *results, *call
    torch.library.opcheck(backward, backward_call, test_utils=utils)


def test_a_head_dim_that_is_not_the_innermost():
    qkv = make_qkv(1, 2, 20, 20, 16)
    picks = select.nsa(1, 16).picks(*qkv[:2])
    across = [t.mT.contiguous().mT.requires_grad_() for t in qkv]
    out = sparseflash.attention(*across, picks, backend="triton")
    found = torch.autograd.grad(out.square().sum(), across)
    qkv = [t.requires_grad_() for t in qkv]
    wanted = sparseflash.attention(*qkv, picks, backend="triton")
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), qkv))


def test_transforms_take_the_selection():
    qkv = make_qkv(1, 2, 20, 20, 16, kv_heads=1)
    picks = select.nsa(1, 16).picks(*qkv[:2])

    def attend(*qkv):
        return sparseflash.attention(*qkv, picks, backend="triton")

    def loss(*qkv):
        return attend(*qkv).square().sum()

    given = [t.clone().requires_grad_() for t in qkv]
    wanted = torch.autograd.grad(loss(*given), given)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1, 2))(*qkv), wanted)
    twice = torch.func.vmap(attend)(*(torch.stack([t, 2 * t]) for t in qkv))
    torch.testing.assert_close(twice[1], attend(*(2 * t for t in qkv)))
    with pytest.raises(RuntimeError, match="no forward-mode"):
        torch.func.jvp(attend, qkv, qkv)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode"):
        attend(forward_ad.make_dual(qkv[0], qkv[0]), *qkv[1:])


def test_a_long_list_has_parts(monkeypatch):
    """All queries pick the first block."""
    case = CASES["one list a key head"]._replace(batch=1)
    blocks = picks_cases.numbers(case, 0).clamp(min=0).sort(-1).values
    blocks[..., 0] = 0
    blocks[..., 1:][blocks[..., 1:] == 0] = -1
    monkeypatch.setattr(picks_cases, "numbers", lambda *given: blocks)
    monkeypatch.setattr(picked, "_PART", 0)
    monkeypatch.setattr(picked, "_SHORTEST", 6)
    lists = picked.inverse(Picks.of(blocks, 16, 20).blocks, 16, 20, causal=True)
    assert lists.parts(6)[0].diff().tolist() == [4, 1, 4, 1]
    picks_cases.check(case, "cpu")


@pytest.mark.parametrize(
    "selector, dtype", [(select.nsa(2, 16), torch.float32), (select.moba(16, 2, 16), torch.float64)]
)
def test_picks_of_a_selector(selector, dtype):
    """The lists are those of its exact selection; float64 has no kernels and becomes one."""
    qkv = make_qkv(1, 2, 40, 40, 16, kv_heads=1, dtype=dtype, requires_grad=True)
    q, k, v = qkv
    picks, selection = selector.picks(q, k), selector(q, k)
    assert picks.selection(2).to_block_mask().to_dense().tolist() == (
        selection.to_block_mask().to_dense().tolist()
    )
    backend = "triton" if dtype == torch.float32 else "auto"
    found = sparseflash.attention(q, k, v, picks, backend=backend)
    results = [found, sparseflash.attention(q, k, v, selection)]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(out.square().sum(), qkv) for out in results]
    torch.testing.assert_close(*grads)


def test_blocks_longer_than_those_of_a_mask():
    q, k, _ = make_qkv(1, 2, 700, 700, 16)
    picks = select.moba(512, 1).picks(q, k)
    seen = picks.selection(2).to_block_mask().to_dense()[0, 0]
    assert seen[600].nonzero()[0].tolist() == list(range(512, 601))


def test_what_other_options_do():
    q, k, v = make_qkv(1, 2, 48, 48, 16)
    picks = select.nsa(2, 16).picks(q, k)
    found = sparseflash.explain(q, k, v, picks, backend="triton")
    assert found == "forward, backward: triton, from the list of each query"
    found = sparseflash.explain(q, k, v, picks)
    assert found.startswith(
        "picks become a selection: lists for each query are for a GPU\nforward: "
    )
    wanted = sparseflash.attention(q, k, v, picks.selection(2))
    for option in ({}, {"backend": "reference"}, {"lengths": [48]}, {"return_max_scores": True}):
        found = sparseflash.attention(q, k, v, picks, **option)
        torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, wanted)
    text = sparseflash.explain(q, k, v, picks, dropout_p=0.5, backend="triton")
    assert "selection" in text.splitlines()[0] and "dropout" in text.splitlines()[0]


def test_the_gradient_of_the_lse_alone():
    qkv = make_qkv(1, 2, 20, 20, 16, requires_grad=True)
    picks = select.nsa(1, 16).picks(*qkv[:2])
    out, lse = sparseflash.attention(*qkv, picks, return_lse=True, backend="triton")
    expected = torch.autograd.grad(0 * out.sum() + lse.sum(), qkv, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), qkv), expected)


def test_no_second_derivative():
    q, k, v = make_qkv(1, 2, 16, 16, 16, requires_grad=True)
    picks = select.nsa(1, 16).picks(q, k)
    out = sparseflash.attention(q, k, v, picks, backend="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(dq.sum(), k)


def test_a_pick_that_comes_twice_counts_twice(monkeypatch):
    """`Picks.of` allows none; made by hand they are the same in both forms."""
    qkv = make_qkv(1, 2, 20, 20, 16, requires_grad=True)
    blocks = torch.tensor([0, 0, 1], dtype=torch.int32).expand(1, 2, 20, 3)
    found = []
    for gathers in (True, False):
        monkeypatch.setattr(picked, "_gathers", lambda *given, form=gathers: form)
        results = sparseflash.attention(
            *qkv, Picks(blocks, 16, 20), return_lse=True, backend="triton"
        )
        grads = torch.autograd.grad(results[0].square().sum() + results[1].sum(), qkv)
        found.append((*results, *grads))
    torch.testing.assert_close(*found)


def test_a_compiled_function_takes_any_length():
    def attend(q, k, v, blocks):
        picks = Picks.of(blocks, 16, k.shape[2])
        return sparseflash.attention(q, k, v, picks, backend="triton")

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (17, 20):
        qkv = make_qkv(1, 1, n, n, 16, requires_grad=True)
        blocks = torch.arange(n).view(1, 1, n, 1) % 2
        found, wanted = (
            torch.autograd.grad(function(*qkv, blocks).square().sum(), qkv)
            for function in (compiled, attend)
        )
        assert all(map(torch.equal, found, wanted))


def test_wide_heads_and_distant_tokens_become_a_selection():
    picks = Picks.of(torch.zeros(1, 1, 2, 1, dtype=torch.int32), 16, 2)
    apart = torch.empty(2**23 + 16).as_strided((1, 1, 2, 16), (0, 0, 2**23, 1))
    near = apart.contiguous()
    wide, wider = torch.empty(1, 1, 2, 257), torch.empty(1, 1, 2, 300)
    for q, k, v, message in (
        (wide, wide, wide, "up to 256, not 257"),
        (near, near, wider, "up to 256, not 300"),
        (near, apart, near, "strides below 2**23"),
        (near, near, near, "None"),
    ):
        reason = module.why_not(q, k, v, picks, {"backend": "triton"})
        assert message in str(reason)


def test_numbers_in_any_order():
    given = torch.tensor([[[[3, -1, 0], [2, 1, 3]]]])
    picks = Picks.of(given, 16, 64)
    assert picks.blocks.tolist() == [[[[0, 3, picks.none], [1, 2, 3]]]]


GOOD = torch.zeros(1, 2, 48, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    "given, block, n_k, message",
    [
        (GOOD, 24, 48, "block is 24: give a multiple of 16"),
        (GOOD, 16, 0, "n_k is 0"),
        (GOOD.float(), 16, 48, "blocks is torch.float32 .*: give ints"),
        (GOOD + 2**32, 16, 48, "blocks has 96 numbers"),
        (GOOD + 3, 16, 48, "blocks has 96 .* come twice in a list, or are not in -1 .. 2"),
        (GOOD.expand(-1, -1, -1, 2), 16, 48, "blocks has 96 numbers that come twice"),
    ],
)
def test_bad_numbers(given, block, n_k, message):
    with pytest.raises(ValueError, match=message):
        Picks.of(given, block, n_k)


def test_picks_that_do_not_fit():
    q, k, v = make_qkv(1, 4, 48, 48, 16, kv_heads=2)
    for given, message in (
        (Picks.of(GOOD, 16, 64), "48 queries and 64 keys do not fit"),
        (Picks.of(GOOD[:, :, :40], 16, 48), "40 queries and 48 keys do not fit"),
        (Picks.of(GOOD.expand(3, -1, -1, -1), 16, 48), "picks of batch 3"),
        (Picks.of(GOOD[:, :1], 16, 48), "1 heads picked: give a multiple of the 2 of k"),
        (Picks.of(GOOD.repeat(1, 4, 1, 1), 16, 48), "8 heads picked"),
        (Picks(GOOD.int().to("meta"), 16, 48), "the picks are on meta, q on cpu: pick from q"),
    ):
        with pytest.raises(ValueError, match=message):
            sparseflash.attention(q, k, v, given)
    with pytest.raises(ValueError, match="picks have no plan"):
        sparseflash.plan(Picks.of(GOOD, 16, 48), q, k, v)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="2 heads picked, of 3"):
        Picks.of(GOOD, 16, 48).selection(3)
    for selector in (select.nsa(2, 16, union=True), select.nsa(2, 16, within=masks.local(3))):
        with pytest.raises(ValueError, match="picks have none"):
            selector.picks(q, k)


def test_long_lists_are_those_of_fewer_queries(monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: False)
    monkeypatch.setattr(picked, "_MOST_JOINED", 16)
    picks_cases.check(CASES["two lists a key head, more keys"], "cpu")
