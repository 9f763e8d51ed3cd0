"""The parts of training: flat AdamW, schedules, order, checkpoint, journal."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experiments.lra.models.classifier import Classifier, ModelConfig
from experiments.lra.run import Predict, classify, fingerprint
from experiments.lra.tasks.task import Split, Task
from experiments.training import state as checkpoint
from experiments.training.device import MIB, peak_mib, reset_memory
from experiments.training.distributed import Group
from experiments.training.evaluate import DeviceSplit, Evaluator, Order
from experiments.training.run_file import Log
from experiments.training.step import AHEAD, FlatParameters, Trainer, learning_rates, make_adamw

CPU = torch.device("cpu")


def rates(schedule, warmup=10, steps=40, lr=0.5):
    return learning_rates(schedule, lr, warmup, steps).tolist()


@pytest.mark.parametrize("warmup, steps", [(10, 40), (40, 40)])
def test_onecycle_is_that_of_torch(warmup, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=steps, pct_start=warmup / steps, anneal_strategy="linear",
        cycle_momentum=False,
    )  # fmt: skip
    for rate in rates("onecycle", warmup, steps):
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-5, abs=1e-7)
        optimizer.step()
        if schedule.last_epoch < steps - 1:
            schedule.step()


def test_other_schedules_have_their_landmarks():
    cosine = rates("cosine")
    assert cosine[0] == pytest.approx(0.05) and cosine[10] == pytest.approx(0.5)
    assert cosine[25] == pytest.approx(0.25) and cosine[39] < 0.002
    rsqrt = rates("rsqrt")
    assert max(rsqrt) == pytest.approx(0.5 / 10**0.5) == rsqrt[9]
    assert rsqrt[39] == pytest.approx(0.5 / 40**0.5)
    assert rates("constant")[9:] == [0.5] * 31
    assert rates("rsqrt", warmup=80)[39] == pytest.approx(0.5 * 0.5 / 80**0.5)  # in warm-up


def test_flat_adamw_is_adamw_with_clipping():
    torch.manual_seed(0)

    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))

    plain, flat_model = model(), model()
    reference = torch.optim.AdamW(plain.parameters(), 1e-2, (0.8, 0.9), 1e-6, weight_decay=0.1)
    flat = FlatParameters(flat_model)
    optimizer = make_adamw(flat, (0.8, 0.9), 1e-6, 0.1)
    optimizer.param_groups[0]["lr"].fill_(1e-2)
    for most in (0.5, 1e4, 0.5, 1e4):  # above and below the norm
        x = torch.randn(6, 5)
        reference.zero_grad()
        plain(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), most)
        reference.step()
        for i, half in enumerate(x.chunk(2)):  # in two pieces
            flat.gradients(flat_model(half).square().sum(), add=i > 0)
        assert flat.clip(most) == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
    for ours, theirs in zip(flat_model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.data_ptr() % 16 == 0
        assert ours.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()


def simple_settings(batch: int, steps: int, micro_batch: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        clip=None, seed=3, precision="fp32", batch=batch, micro_batch=micro_batch, eps=1e-8,
        betas=(0.9, 0.99), weight_decay=0.0, schedule="cosine", lr=0.1, warmup=4, steps=steps,
    )  # fmt: skip


def test_every_step_has_its_own_rate_and_examples():
    """Beyond the examples that are copied to the device at a time, too."""
    steps, n = AHEAD + 3, 5
    settings = simple_settings(batch=2, steps=steps)
    labels = np.arange(n)
    data = DeviceSplit((np.zeros((n, 3), np.uint8), None, labels), CPU)
    seen = []

    def objective(model, batch, weights):
        seen.append(batch[2].tolist())
        loss = model(torch.ones(2, 1)).sum()
        return loss, torch.zeros(()), torch.tensor(2.0)

    model = nn.Linear(1, 1)
    trainer = Trainer(model, data, objective, settings, Group(0, 1, CPU))  # pyright: ignore
    used, weights = [], [model.weight.item()]
    for _ in range(steps):
        trainer.advance()
        used.append(trainer.rate.item())
        weights.append(model.weight.item())
    assert used == rates("cosine", 4, steps, 0.1)
    # AdamW moves a weight of constant gradient by the rate that the step had
    assert [a - b for a, b in pairwise(weights)] == pytest.approx(used, rel=1e-3, abs=1e-5)
    assert seen == Order(n, 2, seed=3).rows(0, steps).tolist()


def test_parameters_that_a_loss_does_not_use_keep_still():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    flat = FlatParameters(model)
    flat.gradients(model["a"](torch.ones(1, 2)).sum(), add=False)
    assert flat.grad.abs().sum() > 0 and flat.grad[-64:].abs().sum() == 0


def test_an_epoch_takes_every_example_once_whatever_the_pieces():
    order = Order(10, 4, seed=3)
    rows = order.rows(0, 10).flatten()
    for epoch in range(4):
        assert sorted(rows[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))
    assert not torch.equal(rows[:10], rows[10:20])
    pieces = [Order(10, 4, seed=3).rows(i, i + 1) for i in range(10)]
    assert torch.equal(torch.cat(pieces).flatten(), rows)
    assert not torch.equal(Order(10, 4, seed=4).rows(0, 10).flatten(), rows)
    assert Order(3, 8, seed=0).rows(0, 2).shape == (2, 8)  # a batch of several epochs


def split(n=11, length=6, classes=3):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, (n, length)).astype(np.uint8)
    return Split(tokens, rng.integers(0, classes, n), np.full(n, length, np.int32))


def evaluator(model, data, batch):
    group = Group(0, 1, CPU)
    return Evaluator(
        model, DeviceSplit(data.arrays, CPU), classify, group, batch=batch, dtype=torch.float32
    )


class Counting(nn.Module):
    """Logits from counts of tokens; notes how it is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, tokens, lengths):
        assert not self.training and not torch.is_grad_enabled()
        torch.rand(1)  # as hashes do
        return nn.functional.one_hot(tokens.long(), 5).float().sum(1) @ self.weight


@pytest.mark.parametrize("batch", [4, 50])
def test_evaluation_counts_every_example_once(batch):
    torch.manual_seed(0)
    data, model = split(), Counting().train()
    before = torch.get_rng_state()
    found = evaluator(model, data, batch=batch)()
    assert torch.equal(torch.get_rng_state(), before) and model.training
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(data.tokens), None)
    labels = torch.from_numpy(data.labels)
    expected = nn.functional.cross_entropy(logits, labels).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_evaluations_draw_the_same_wherever_training_is():
    """As of hashes that are drawn at every call."""

    class Drawing(nn.Module):
        def forward(self, tokens, lengths):
            return torch.rand(len(tokens), 3)

    evaluate, found = evaluator(Drawing(), split(200), batch=7), []
    for seed in range(3):
        torch.manual_seed(seed)
        found.append(evaluate())
    assert found[0] == found[1] == found[2]


def test_evaluation_of_some_draws_them_once():
    """The same ones in any number of processes, and not the first."""
    data = split(20)
    data.labels[:] = np.arange(20)

    class Alone(Group):
        def sum(self, tensor):
            return tensor

    def drawn(world):
        found = []

        def note(model, batch, weights):
            found.extend(batch[2][weights > 0].tolist())
            return torch.zeros(()), torch.zeros(()), weights.sum()

        for rank in range(world):
            given = nn.Identity(), DeviceSplit(data.arrays, CPU), note, Alone(rank, world, CPU)
            Evaluator(*given, batch=3, dtype=torch.float32, examples=9)()
        return sorted(found)

    alone = drawn(1)
    assert len(set(alone)) == 9 and alone != list(range(9)) and drawn(2) == alone


def predictor(pair: bool, calls: list) -> Classifier:
    """A model in float64 that notes the places that it is asked for."""
    torch.manual_seed(0)
    sizes = ModelConfig(dropout=0.0, attention_dropout=0.0, dim=8, lm_head=True)
    model = Classifier(9, 12, 2, pair, model=sizes).double()
    model.register_forward_pre_hook(lambda module, given: calls.append(given[2]))
    return model


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("lengths", [None, (12, 3, 7, 1)])
@pytest.mark.parametrize("pair", [False, True])
def test_self_pretraining_scores_what_it_predicts_and_no_padding(pair, lengths, weighted):
    calls: list[torch.Tensor] = []
    model = predictor(pair, calls)
    tokens = torch.randint(1, 9, (4, 12), generator=torch.Generator().manual_seed(1))
    size = torch.tensor(lengths or [12] * 4)
    weight = torch.tensor([1.0, 0.0] if pair else [1.0, 0.0, 1.0, 1.0]) if weighted else None

    def loss_of(tokens):
        shape = (2, 2) if pair else (4,)
        given = tokens.view(*shape, 12), size.view(shape) if lengths else None, torch.zeros(shape)
        torch.manual_seed(2)
        return Predict(0.5)(model, given, weight)

    loss, right, count = loss_of(tokens)
    each = [1.0] * 4 if weight is None else weight.repeat_interleave(4 // len(weight)).tolist()
    expected = torch.zeros(3, dtype=torch.float64)
    for row, n, places, own in zip(tokens, size.tolist(), calls[0], each, strict=True):
        asked = places.unique()
        assert len(asked) == max(1, round(0.5 * n))
        assert asked.max() < n  # padding is neither hidden nor predicted
        x = model.embedding(row)
        x[asked] = model.hidden_token
        x = (x + model.positions)[None, :n]
        for block in model.blocks:
            x = block(x, None)
        logits = model.lm_head(model.norm(x[0])).float()[asked]
        losses = F.cross_entropy(logits, row[asked], reduction="sum")
        hits = (logits.argmax(-1) == row[asked]).sum()
        expected += own * torch.tensor([losses.item(), hits.item(), len(asked)])
    found = torch.stack([loss, right, count])
    torch.testing.assert_close(found, expected.to(found.dtype))  # sums of float32
    loss.backward()
    assert model.lm_head.weight.grad.any()
    changed = torch.where(torch.arange(12) < size[:, None], tokens, 0)
    torch.testing.assert_close(loss_of(changed), (loss, right, count))


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_every_predicted_token_of_a_batch_counts_as_much(micro_batch):
    """Whatever the micro-batch that its sequence is in."""
    model = predictor(pair=False, calls=[])
    tokens = np.random.default_rng(0).integers(1, 9, (4, 12), np.uint8)
    lengths = np.array([12, 3, 7, 1], np.int32)
    data = DeviceSplit((tokens, lengths, np.zeros(4, np.int64)), CPU)
    settings = simple_settings(batch=4, micro_batch=micro_batch, steps=1)
    loss, right, count = Predict(1.0)(model, data.batch(torch.arange(4)), None)
    mean = loss / count
    expected = torch.autograd.grad(mean, list(model.parameters()), allow_unused=True)
    group = Group(0, 1, CPU)
    trainer = Trainer(model, data, Predict(1.0), settings, group)  # pyright: ignore
    trainer.advance()
    norm = torch.stack([grad.norm() for grad in expected if grad is not None]).norm()
    found = trainer.read_sums(1)
    assert found["loss"] == pytest.approx(mean.item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((right / count).item())
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert found["grad_norm_max"] == pytest.approx(norm.item(), rel=1e-6)
    assert not trainer.sums.any() and not trainer.steepest  # the next line begins anew


def test_the_peak_of_memory_is_that_of_the_run_and_not_of_one_before():
    before = np.ones(2**26)  # 512 MiB
    assert peak_mib(CPU) > before.nbytes / MIB
    del before
    reset_memory(CPU)
    base = peak_mib(CPU)
    again = np.ones(2**25)
    assert 200 < peak_mib(CPU) - base < 300
    del again


def test_fingerprint_sees_labels_and_tokens():
    found = set()
    for name, value in (("labels", 0), ("labels", 1), ("tokens", 0), ("tokens", 1)):
        data = split(300)
        data.tokens[0], data.labels[0] = 4, 2
        getattr(data, name)[0] = value
        splits = dict.fromkeys(("train", "val", "test"), data)
        found |= {fingerprint(Task("text", "official", 3, 5, splits)) for _ in range(2)}
    assert len(found) == 4


def test_a_folder_is_for_one_process(tmp_path):
    folder = tmp_path / "runs" / "task" / "run"
    with checkpoint.locked(folder):
        with pytest.raises(ValueError, match="another process trains in"):
            with checkpoint.locked(folder):
                pass
        (folder / "journal.jsonl").touch()
        (folder / ".checkpoint.pt.123").touch()  # as a killed process leaves it
    with checkpoint.locked(folder):
        assert {path.name for path in folder.iterdir()} == {".lock", "journal.jsonl"}
    with checkpoint.locked(tmp_path / "none" / "task" / "run"):
        pass
    assert not (tmp_path / "none").exists()


def test_the_journal_goes_on_where_the_checkpoint_left_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Log(tmp_path, 0)
    journal.write("train", 1, loss=1 / 3)
    kept = journal.sync()
    journal.write("train", 2, loss=float("nan"))
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"kind": "tr')  # as a kill leaves it
    journal = Log(tmp_path, kept)
    journal.write("train", 2, loss=0.25)
    journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"kind": "train", "step": 1, "loss": 0.333333},
        {"kind": "train", "step": 2, "loss": 0.25},
    ]
    with pytest.raises(ValueError, match="delete that checkpoint to start over"):
        Log(tmp_path, 10_000)


def test_flat_parameters_of_two_dtypes_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="one dtype"):
        FlatParameters(model)
    assert model[1].weight.dtype == torch.bfloat16
