"""Training on a GPU: the step as a CUDA graph, compiled or not, and runs that go on."""

import pytest
import torch

from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.lra.models.attention import make_attention
from experiments.training import state as checkpoint
from experiments.training.device import capture, warm_up
from tests.experiments.lra.training.cases import (
    assert_processes_train_as_one,
    journal,
    killed_at,
    settings,
    train,
)
from tests.gpu_calls import GPU

pytestmark = GPU

SIZES = {
    "task__max_length": 240, "task__examples": "[96,32,32]", "batch": 8, "steps": 12, "lr": 1e-3,
    "model__head_dim": 32, "model__dim": 64, "model__mlp_dim": 128,
    "eval_every": 6, "checkpoint_every": 6,
}  # fmt: skip
EAGER = {"compile": "false", "graph": "false"}
GRAPH = {"compile": "false", "graph": "true"}
COMPILED = {"compile": "true", "graph": "true"}
NO_DROPOUT = {"model__dropout": 0.0, "model__attention_dropout": 0.0}


def losses(place, attention, **changes):
    """The losses of a run, and what its file says of its first session."""
    run = train(place, "listops", attention, **SIZES | changes)
    lines = journal(settings(place, "listops", attention, **SIZES | changes).folder)
    return [x["loss"] for x in lines if x["kind"] == "train"], run["sessions"][0]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_captured_step_does_what_an_eager_one_does(attention, tmp_path):
    """Without dropout, and with the hashes and features of the same random stream."""
    eager, _ = losses(tmp_path, attention, name="eager", **NO_DROPOUT, **EAGER)
    captured, start = losses(tmp_path, attention, name="graph", **NO_DROPOUT, **GRAPH)
    assert start["captured"] and not start["compiled"]
    elsewhere = attention in ("performer", "reformer", "smyrf")  # draw from another offset
    assert captured == pytest.approx(eager, rel=0.2 if elsewhere else 2e-2)


@pytest.mark.parametrize("attention", ["flash", "sparse"])
def test_skipped_padding_trains_compiled_and_captured(attention, tmp_path):
    hide = NO_DROPOUT | {"model__layers": 2, "attention__padding": "hide"}
    skip = hide | {"attention__padding": "skip"}
    hidden, _ = losses(tmp_path, attention, name="hide", **hide, **EAGER)
    eager, _ = losses(tmp_path, attention, name="eager", **skip, **EAGER)
    assert eager == pytest.approx(hidden, rel=2e-2)
    for name, how in (("graph", GRAPH), ("both", COMPILED)):
        found, start = losses(tmp_path, attention, name=name, **skip, **how)
        assert start["captured"] and start["compiled"] == (how is COMPILED)
        assert found == pytest.approx(eager, rel=2e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["flash", "sparse"])
def test_a_captured_layer_follows_the_lengths(attention, compiled):
    """What is made of the lengths is made again by every replay."""
    torch.compiler.reset()
    device = torch.device("cuda", 0)
    layer = make_attention(attention, heads=2, head_dim=32, length=1024)
    forward = torch.compile(layer, dynamic=False) if compiled else layer
    shape = (4, 1024, 2, 32)
    q, k, v, dout = (torch.randn(shape, device=device).bfloat16().transpose(1, 2) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    lengths = torch.full((4,), 700, dtype=torch.int32, device=device)
    found = []

    def body():
        out = forward(*inputs, lengths)
        found[:] = out, *torch.autograd.grad(out, inputs, dout)

    assert warm_up(body, device)
    captured = capture(body, device)
    kept = list(found)
    hide = make_attention(attention, heads=2, head_dim=32, length=1024, padding="hide")
    for some in ([1, 128, 129, 1024], [1024, 1023, 897, 896], [64, 512, 513, 2]):
        lengths.copy_(torch.tensor(some))
        captured.replay()
        replayed = [t.clone() for t in kept]
        body()
        for a, b in zip(replayed, found, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        real = (torch.arange(1024, device=device) < lengths[:, None])[:, None, :, None]
        expected = hide(*inputs, lengths)
        torch.testing.assert_close(replayed[0] * real, expected * real, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("n", [1024, 2048])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_compiled_layer_computes_the_same(attention, n):
    """Out and gradients, but for a token whose hash rounds to the other side."""
    torch.compiler.reset()
    layer = make_attention(attention, heads=2, head_dim=32, length=n).to("cuda").eval()
    layer.redraw = False
    q, k, v, dout = (torch.randn(4, 2, n, 32, device="cuda").bfloat16() for _ in range(4))
    inputs = [q, v] if layer.shared_qk else [q, k, v]
    for x in inputs:
        x.requires_grad_()
    lengths = torch.tensor([n, n // 2 + 1, 130, 17], dtype=torch.int32, device="cuda")
    real = (torch.arange(n, device="cuda") < lengths[:, None])[:, None, :, None]

    def results(forward):
        out = forward(q, q if layer.shared_qk else k, v, lengths)
        return [out * real, *torch.autograd.grad(out, inputs, dout * real)]

    compiled = results(torch.compile(layer, dynamic=False))
    for ours, theirs in zip(compiled, results(layer), strict=True):
        assert (ours - theirs).float().norm() < 2e-2 * theirs.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_compiled_step_trains(attention, tmp_path):
    found, start = losses(tmp_path, attention, compile="true", graph="true", steps=60, lr=3e-3)
    assert start["captured"] and start["compiled"]
    assert sum(found[-10:]) < sum(found[:10])


@pytest.mark.parametrize("how", [EAGER, GRAPH, COMPILED], ids=["eager", "graph", "compile+graph"])
@pytest.mark.parametrize(
    ("attention", "random"),
    [
        ("standard", {}),
        ("linear", {"model__dropout": 0.3}),
        ("standard", {"model__attention_dropout": 0.5}),
        ("flash", {"model__attention_dropout": 0.5}),
        ("sparse", {"model__attention_dropout": 0.5}),
        ("reformer", {}),
        ("smyrf", {}),
    ],
)
def test_every_step_draws_anew(how, attention, random, tmp_path):
    """One example, at a learning rate of almost nothing: only what is drawn tells steps apart."""
    still = NO_DROPOUT | {"lr": 1e-30, "task__examples": "[1,8,8]", "batch": 1, "steps": 8}
    found, _ = losses(tmp_path, attention, **still | random | how)
    if random or attention in ("reformer", "smyrf"):
        assert len({round(loss, 5) for loss in found}) > 5
    else:
        assert max(found) - min(found) < 1e-6


@pytest.mark.parametrize(
    ("attention", "task"),
    [
        *((name, "listops") for name in ("standard", "flash", "sparse")),  # of many lengths
        *((name, "pathfinder32") for name in ATTENTIONS),
    ],
)
@pytest.mark.parametrize("how", [GRAPH, COMPILED], ids=["graph", "compile+graph"])
def test_a_run_goes_on_to_the_same_bits(how, attention, task, tmp_path):
    """Of 1,024 tokens, for which gradients are added up in no fixed order without the option."""
    options = SIZES | how | {"deterministic": "true", "task__max_length": 1024}
    if task == "pathfinder32":
        del options["task__max_length"]
    for name in ("whole", "again"):
        train(tmp_path, task, attention, name=name, **options)
    killed_at(9, tmp_path, task, attention, name="cut", **options)
    train(tmp_path, task, attention, name="cut", **options)

    def weights(name):
        folder = settings(tmp_path, task, attention, name=name, **options).folder
        return checkpoint.load(folder / "checkpoint.pt")["model"]

    whole, again, cut = (weights(name) for name in ("whole", "again", "cut"))
    for name, value in whole.items():
        assert torch.equal(again[name], value), f"{name}: two whole runs differ"
        assert torch.equal(cut[name], value), f"{name}: the run that was cut differs"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("attention", ["linear", "sparse"])
@pytest.mark.parametrize("compile", [False, True], ids=["graph", "compile+graph"])
def test_all_gpus_train_as_one(tmp_path, attention, compile):
    changes = {"batch": 16, "precision": "fp32", "compile": str(compile).lower(), "graph": "true"}
    count = torch.cuda.device_count()
    assert_processes_train_as_one(tmp_path, count, "listops", attention, **changes)
