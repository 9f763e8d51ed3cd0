"""Questions: answers stand in the sequence, streams differ, places are uniform; masks of a study
have their density, and a run on questions learns, continues and makes rows.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import masks
from experiments.common.files import write_json_lines
from experiments.common.rows import OK, frame, read
from experiments.lm.questions import DIGITS, MARK, NONE, TASKS, asks, synthetic
from experiments.lm.run import make_model, train
from experiments.lm.settings import compose_settings
from experiments.studies import which_mask
from experiments.studies.which_mask import DENSITIES, FAMILIES, NEAR, PARTS, facts, nearest
from experiments.sweep import planned

EVERY = ["mqar:16", "recall:0", "recall:20", "fuzzy:3", "copy:8", "memory", "compress"]
EVERY += ["passkey:5", "variables:2"]


@pytest.mark.parametrize("text", EVERY)
@pytest.mark.parametrize("length", [128, 512])
def test_the_answer_stands_in_the_sequence(text, length):
    task = synthetic(text, length)
    tokens, places, answers, sources = task.make("test", 300)
    assert tokens.shape == (300, length) and 0 <= tokens.min() and tokens.max() < task.vocab
    asked = answers != NONE
    assert asked.any() and places.max() < length
    if text != "memory":  # whose values stand nowhere
        there = np.take_along_axis(tokens, np.where(asked, sources, 0), 1)
        assert (there == answers)[asked].all() and (sources <= places)[asked].all()
    # the same again, and a longer list begins with a shorter one
    again = task.make("test", 2000)
    assert all((a == b[:300]).all() for a, b in zip((tokens, answers), again[::2], strict=True))
    # splits and seeds are other streams
    for other in (task.make("train", 300), task.make("val", 300), task.make("test", 300, seed=1)):
        assert not (other.tokens == tokens).all(1).any()


def test_a_document_is_read_from_its_end():
    tokens, _, answers, sources = synthetic("passkey:5@1024", 256).make("test", 4000)
    there = sources[:, 0] != NONE
    assert abs(there.mean() - 246 / 1014) < 0.03  # the mark is at one of so many places
    assert (np.take_along_axis(tokens, np.maximum(sources, 0), 1) == answers)[there].all()
    assert ((tokens == MARK).sum(1) == there).all()
    whole, other = (synthetic(text, 256).make("test", 50) for text in ("passkey:5@256", "passkey"))
    assert all((a == b).all() for a, b in zip(whole, other, strict=True))
    for text in ("passkey:5@128", "mqar:16@512", "passkey:5@x"):
        with pytest.raises(ValueError, match=text):
            synthetic(text, 256)


def test_recall_follows_the_rule_of_zoology():
    task = synthetic("mqar:16", 256)
    tokens, places, answers, _ = task.make("test", 4000)
    keys, values = tokens[:, 0:32:2], tokens[:, 1:32:2]
    assert keys.min() >= 1 and keys.max() < 256 <= values.min()
    assert all(len(np.unique(row)) == 16 for row in keys[:50])
    assert (np.take_along_axis(tokens, places, 1) == keys).all() and (answers == values).all()
    gaps = (places - 32) // 2
    assert all(len(np.unique(row)) == 16 for row in gaps[:50]) and gaps.max() < 112
    # the first gap of the power law is taken more often than the last ones
    counts = np.bincount(gaps.ravel(), minlength=112)
    assert counts[0] > 0.9 * 4000 and counts[0] > 5 * counts[100]
    p = np.arange(1, 113) ** -0.99
    drawn = np.random.default_rng(0)
    expected = [drawn.choice(112, 16, replace=False, p=p / p.sum()) for _ in range(4000)]
    other = np.bincount(np.ravel(expected), minlength=112)
    assert np.abs(counts - other).max() < 6 * np.sqrt(2 * other.max())


def test_fuzzy_recall_follows_its_rule():
    task, among, sizes = synthetic("fuzzy:3", 512), [], []
    for tokens, places, answers, sources in zip(*task.make("test", 60), strict=True):
        starts = np.flatnonzero(np.diff(tokens >= 7, prepend=True) & (tokens < 7))  # of keys
        wanted, seen = {}, {}
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            word = tokens[start:end].tolist()
            key, value = (tuple(t for t in word if (t < 7) == own) for own in (True, False))
            at = start + len(key)
            if key in seen:
                assert end == len(tokens) or value == tuple(tokens[slice(*seen[key])])
                wanted |= {at - 1 + i: (t, seen[key][0] + i) for i, t in enumerate(value)}
                among += [1 / (8 - i) for i in range(len(value))]
            seen[key] = at, end
            sizes += [len(key), 3 + len(value)][: 2 * (end < len(tokens))]
            assert len({*key}) == len(key) and len({*value}) == len(value)
        asked = answers != NONE
        found = zip(places[asked], answers[asked], sources[asked], strict=True)
        assert {p: (a, s) for p, a, s in found} == wanted
    assert np.mean(among) == pytest.approx(task.chance, abs=0.005)  # of a guess
    shares = np.bincount(sizes)[1:] / len(sizes)
    assert len(shares) == 6 and abs(6 * shares - 1).max() < 0.1


def test_needles_are_uniform_and_values_balanced():
    task = synthetic("passkey:5", 512)
    tokens, _, answers, _ = task.make("test", 20_000)
    at = (tokens == MARK).argmax(1)
    assert at.min() == 0 and at.max() == 512 - 11
    tenths = np.histogram(at, 10, (0, 502))[0]
    assert abs(tenths / 2000 - 1).max() < 0.12
    digits = np.bincount(answers.ravel(), minlength=DIGITS) / answers.size
    assert abs(digits - task.chance).max() < 0.01


def test_chance_is_what_guesses_score():
    rng = np.random.default_rng(0)
    for text in ("mqar:16", "variables:2"):  # one of the values that were seen
        task = synthetic(text, 256)
        answers = task.make("test", 4000).answers
        guess = np.take_along_axis(answers, rng.integers(0, answers.shape[1], answers.shape), 1)
        assert abs((guess == answers).mean() - task.chance) < 0.02


def test_variables_follow_their_chain():
    task = synthetic("variables:3", 256)
    tokens, places, answers, _ = task.make("test", 50)
    for row, where, wanted in zip(tokens, places, answers, strict=True):
        let = np.flatnonzero(row == 64)
        value = {}
        for i in let:
            value[row[i + 1]] = value.get(row[i + 2], row[i + 2])
        assert len(let) == 16 and [value[row[p]] for p in where] == wanted.tolist()


@pytest.mark.parametrize(
    ("text", "length", "words"),
    [("mqar:0", 256, "mqar:0"), ("mqar:100", 256, "400"), ("copy:x", 64, "copy:x"),
     ("passkey", 33, "33")],
)  # fmt: skip
def test_tasks_refuse_what_they_cannot_have(text, length, words):
    with pytest.raises(ValueError, match=words):
        synthetic(text, length)
    assert not asks("stdlib") and set(TASKS) == {t.partition(":")[0] for t in EVERY}


# ---- masks of the study


def test_masks_have_their_density_or_say_why_not():
    n, block, refused = 256, 16, []
    for family in FAMILIES:
        for target in DENSITIES:
            try:
                text, density = nearest(family, target, n, block)
            except ValueError as error:
                assert family in str(error)
                refused.append((family, target))
                continue
            assert abs(density / target - 1) <= NEAR
            if not text.startswith(("moba", "nsa", "top_k")):
                dense = masks.parse(text).build(n).to_dense().reshape(n, n)
                assert dense.sum() == pytest.approx(density * n * (n + 1) / 2)
                assert not np.triu(dense, 1).any() and dense.diagonal().all()
                far = dense.reshape(n // block, block, n // block, block)
                whole = np.asarray(far.all((1, 3)) | ~far.any((1, 3)))
                assert whole[~np.eye(n // block, dtype=bool)].all()  # of whole blocks
    assert ("butterfly", 0.08) in refused and ("window", 0.5) not in refused


def test_facts_of_a_mask():
    dense, window = facts("passkey:5", 512, 2, "dense"), facts("passkey:5", 512, 2, "sliding(64)")
    assert dense == {"direct": 1.0, "seen": 1.0, "reach": 1}
    assert window["direct"] == pytest.approx(59 / 502, abs=0.05) and window["reach"] == 9
    assert window["seen"] == pytest.approx(1 - (1 - 127 / 512) ** 2, abs=0.01)
    # an answer that stands at several places is seen where one of them is
    text, sees = "sinks(24) & causal()", []
    tokens, _, answers, _ = synthetic("recall:20", 128).make("test", 512)
    for row, wanted in zip(tokens, answers, strict=True):
        keys = row[::2]
        for i in np.flatnonzero(wanted != NONE):
            before = 2 * np.flatnonzero(keys[:i] == keys[i]) + 1
            sees.append((before < 24).any())
    assert facts("recall:20", 128, 2, text)["direct"] == pytest.approx(np.mean(sees))


def test_compression_is_decoded_from_the_last_token():
    overrides = ["data=compress", "context=32", "model=micro", "layers=1", "provider=sdpa"]
    settings = compose_settings([*overrides, "mask='local(7, 0)'"])
    model, task = make_model(settings, synthetic("compress", 32)), synthetic("compress", 32)
    tokens, places, answers, _ = map(torch.from_numpy, task.make("test", 2))
    assert (answers == tokens[:, :31]).all()
    logits = model(tokens.long(), places=places.long())
    assert logits.shape[:2] == (2, 31) and not logits[:, 0].equal(logits[:, 1])
    for place, changes in ((20, False), (26, True)):  # the last token sees 24 to 31
        other = tokens.long()
        other[:, place] = (other[:, place] + 1) % 15
        differs = (model(other, places=places.long()) != logits).any(-1)
        assert differs.all() if changes else not differs.any()


# ---- runs


def test_a_run_learns_continues_and_makes_rows(tmp_path, monkeypatch):
    part = which_mask.Part(
        "small", ("memory",), (32,), (0.5,), (16,), families=("window", "NSA"), seeds="0",
        recipe=("batch=16", "steps=120", "lr=1e-2", "warmup=10", "eval_every=40",
                "val_tokens=2048", "stop_at=0.9"),
    )  # fmt: skip
    monkeypatch.setitem(which_mask.PARTS, "first", part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(which_mask, "_choice", lambda *_: (0.5, "moba(16, 1)"))
    runs = planned(which_mask.sweep_of("first"))
    assert [run.settings.mask for run in runs] == ["dense", "moba(16, 1)"]
    every: list[Any] = [run.settings for run in runs]
    results = [train(settings) for settings in every]
    dense = results[0]["result"]
    assert dense["accuracy"] > 0.5 and dense["steps"] <= 120
    rows = tmp_path / "rows.jsonl"
    which_mask.collect(which_mask.Options(name="which_mask", rows=str(rows)))
    found = read(rows)
    assert [row["family"] for row in found] == ["dense", "window", "NSA"]
    assert all(row["status"] == OK and row["direct"] is None for row in found[1:])
    tables = which_mask.tables(frame(found))
    assert "window" in tables["first"] and "90 %" in tables["first"]
    first = rows.read_bytes()
    write_json_lines(rows, [row | {"device": "another"} for row in found], "rows")  # seeds again
    which_mask.collect(which_mask.Options(name="which_mask", rows=str(rows)))
    assert rows.read_bytes() == first
    trained = []
    monkeypatch.setattr(which_mask.sweep, "train", lambda runs, *_, **__: trained.extend(runs))
    which_mask.collect(which_mask.Options(name="which_mask", part="first", runs="elsewhere"))
    assert {run.settings.runs for run in trained} == {"elsewhere"}


def test_figures_show_means_of_seeds():
    case = {"status": OK, "context": 1024, "block": 16, "layers": 4, "dim": 64, "chance": 0.1}
    case |= {"recipe": "steps=9", "target": 0.25}
    rows, parts = [], ("first", "density", "depth", "blocks", "lengths")
    for family, density, reach in (("dense", 1.0, 1), ("window", 0.25, 8), ("random", 0.25, None)):
        for seed, accuracy in enumerate((0.9, 1.0)):
            solved = None if family == "random" and seed else 500 * (seed + 1)
            row = case | {"family": family, "density": density, "reach": reach, "solved": solved}
            row |= {"data": "passkey:5", "direct": density, "ms_step": 20.0, "accuracy": accuracy}
            rows += [row | {"part": part} for part in parts]
    other = rows[0] | {"recipe": "steps=99", "accuracy": 0.5}  # the tables tell it apart
    rows += [other, {"part": "first", "status": "no mask", "family": "strided"}]
    lines = which_mask.tables(frame(rows))["first"].splitlines()
    assert [x.split("|")[1] for x in lines if "95.0" in x] == [" dense ", " window ", " random "]
    assert [x.split("|")[1] for x in lines if "50.0" in x] == [" dense, steps=99 "]
    drawn = {}
    for name, figure in which_mask.figures(frame(rows)).items():
        lines = figure.axes[0].get_legend_handles_labels()
        drawn[name.removeprefix("which-mask-")] = {
            label: next(zip(*getattr(line, "lines", [line])[0].get_data(), strict=True))
            for line, label in zip(*lines, strict=True)
        }
        plt.close(figure)
    assert drawn["first-direct"]["window"] == (0.25, pytest.approx(95))
    assert drawn["density-density"]["random"] == (0.25, pytest.approx(95))
    assert drawn["density-density"]["dense"][1] == drawn["blocks-signal"]["dense"][1]
    assert drawn["density-density"]["chance"][1] == 10
    assert drawn["depth-depth"]["window"][0] == 0.5 and drawn["depth-depth"]["dense"][0] == 4
    assert drawn["depth-depth"]["random"][0] == which_mask.NEVER
    assert drawn["blocks-signal"]["window"][0] == pytest.approx(2**0.5)
    assert drawn["lengths-context"]["window"] == (1024, pytest.approx(95))
    assert drawn["density-seconds"]["window"] == (0.25, 15)
    assert drawn["density-seconds"].keys() == {"dense", "window"}


def test_every_part_is_a_sweep(monkeypatch):
    monkeypatch.setattr(which_mask, "STATIC", {"window": which_mask.STATIC["window"]})
    for name in PARTS:
        part, families = PARTS[name], ("window", "MoBA")
        if name == "first" or part.width is not None:
            families = ("window",)
        lengths = (512,) if part.width is None else part.lengths[:1]
        small = replace(part, families=families, lengths=lengths, few={})
        monkeypatch.setitem(PARTS, name, small)
        runs = planned(which_mask.sweep_of(name), ["seed=0"])
        assert runs and runs[0].settings.mask == "dense" and runs[0].program == "lm"


def test_selectors_attend_to_what_is_counted():
    q, k = torch.randn(2, 1, 1, 128, 16)
    for text in ("moba(32, 2)", "nsa(2, 32)", "top_k(2, 32)"):
        selector: Any = which_mask.resolve(text)
        chosen = selector(q, k).to_block_mask().to_dense().reshape(128, 128)
        assert chosen.sum() == which_mask.picked_pairs(128, 32, 2)
        assert not np.triu(chosen, 1).any() and chosen.diagonal().all()
    with pytest.raises(ValueError, match="data=mqar:x"):
        compose_settings(["data=mqar:x"])
