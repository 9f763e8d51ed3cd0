"""Runs of language models: they learn, continue bit for bit, and say what they found."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.lm import run as lm_run
from experiments.lm.run import make_model, tail, train
from experiments.lm.settings import LAYERS, make_settings
from experiments.lm.text import load_corpus
from experiments.training import run_file
from experiments.training.clock import Interrupted
from experiments.training.state import load
from experiments.training.train import Session


def test_the_loss_decreases(settings):
    run = train(settings(steps=60, lr=3e-3, batch=8, warmup=5))
    result = run["result"]
    curve = [loss for _, loss in result["curve"]]
    assert curve[0] > 4 and result["train_loss"] < curve[0]
    assert curve[-1] < 3.4 and result["val_loss"] < 4.2
    assert result["saved_mib"] > 0 and run["task"]["manifest"][0]["name"] == "texts"
    # the training loss is that of the last hundred steps
    assert tail([(50, 9.0), (100, 4.0), (150, 2.0), (200, 1.0)], 200) == 1.5
    assert tail([(2, 3.0), (3, 6.0)], 3) == 4.0


@pytest.mark.parametrize("changes", [{}, {"packed": True, "dropout": 0.1}])
def test_a_run_continues_bit_for_bit(changes, settings, monkeypatch):
    whole = train(settings(name="whole", checkpoint_every=3, **changes))["result"]
    part = settings(name="part", checkpoint_every=3, **changes)
    saved = Session._save

    def stop(self):
        saved(self)
        if self.trainer.step == 6:
            raise Interrupted("SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_save", stop)
        with pytest.raises(Interrupted):
            train(part)
    torch.manual_seed(123)
    result = train(part)["result"]
    for name in ("curve", "positions", "val_loss", "train_loss"):
        assert result[name] == whole[name]
    ends = [load(s.folder / "checkpoint.pt") for s in (part, settings(name="whole", **changes))]
    for name in ("model", "optimizer"):
        for key, tensor in ends[0][name].items():
            assert torch.equal(tensor, ends[1][name][key])


def test_a_limit_of_time_and_then_the_rest(settings, monkeypatch, texts):
    slow = settings(minutes=1e-9, steps=50)
    run = train(slow)
    assert (run["complete"], run["reason"], run["result"]["steps"]) == (False, "minutes", 1)
    assert train(replace(slow, minutes=None))["complete"]
    with monkeypatch.context() as patch:
        patch.setattr(lm_run, "load_corpus", None)
        assert train(slow)["complete"]  # a complete run reads no data
    other = settings(minutes=1e-9, steps=20)
    train(other)
    (texts / "new.txt").write_text("something else")
    with pytest.raises(ValueError, match="was trained on other data than text of"):
        train(other)


def test_bad_settings_are_one_line(settings):
    for changes, text in (
        ({"provider": "flash"}, "choose from sparse, standard, sdpa"),
        ({"mask": "nothing:3"}, "unknown pattern"),
        ({"weight_decay": "x"}, "weight_decay: Value 'x'"),
        ({"tokenizer": "bpe:3"}, "choose bytes, or bpe:SIZE"),
        ({"val_tokens": 3}, r"give 32 \(context\) or more"),
        ({"plan": "equal_time"}, "run plan=masks first"),
        ({"mask": "moba(16, 2)", "provider": "standard"}, "needs provider=sparse"),
    ):
        with pytest.raises(ValueError, match=text):
            train(settings(**changes))


def test_the_validation_loss_is_that_of_the_validation_part(settings):
    here = settings(steps=8)
    result = train(here)["result"]
    corpus = load_corpus(here.data, "bytes", here.cache_dir)
    model = make_model(here, corpus)
    model.load_state_dict(load(here.folder / "weights.pt")["model"])
    tokens = torch.from_numpy(corpus.val[:65].astype(int))
    losses = model.eval()(tokens[:64].view(2, 32), tokens[1:].view(2, 32))
    assert result["val_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert result["positions"] == pytest.approx(losses.mean(0).tolist(), rel=1e-3)


def test_equal_time_is_that_of_the_dense_steps_of_plan_masks(settings):
    for mask, case, ms in (("dense", "dense", 30.0), ("sliding:8", "sliding", 10.0)):
        here = settings(steps=8, plan="masks", mask=mask, case=case)
        run = train(here)
        run_file.write(here.folder, run | {"result": run["result"] | {"ms_per_step": ms}})
    given = {"steps": 8, "plan": "equal_time"}
    assert settings(**given, mask="sliding:8", case="sliding").steps == 24
    assert settings(**given, mask="dense", case="dense").steps == 8


def test_nothing_of_a_run_stays_in_memory(settings, monkeypatch):
    """Else the peak of the next run of a process holds it."""
    kept, run = [], Session.run

    def watched(self):
        result = run(self)
        kept.extend(map(weakref.ref, (self.trainer, self.trainer.flat.values)))
        return result

    monkeypatch.setattr(Session, "run", watched)
    for provider in ("standard", "sdpa", "sparse"):
        train(settings(provider=provider, steps=2))
        gc.collect()
        assert all(ref() is None for ref in kept)


def test_what_is_compiled_and_captured(options, monkeypatch):
    monkeypatch.setattr("experiments.common.devices.find_device", lambda name: torch.device("cuda"))
    chosen = make_settings(options(mask="moba(16, 2)"))
    assert chosen.graph and not chosen.compile
    assert make_settings(options()).compile
    packed = make_settings(options(packed=True))
    assert not packed.graph and not packed.compile
    with pytest.raises(ValueError, match="compile='blocks': choose from"):
        make_settings(options(compile="blocks"))


def test_blocks_may_be_compiled_by_themselves(settings, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain = train(settings(steps=4))
    run = train(replace(settings(steps=4, name="layers"), compile=LAYERS))
    assert run["sessions"][0]["compiled"] == LAYERS and not plain["sessions"][0]["compiled"]
    loss = plain["result"]["train_loss"]
    assert run["result"]["train_loss"] == pytest.approx(loss, rel=1e-5)
