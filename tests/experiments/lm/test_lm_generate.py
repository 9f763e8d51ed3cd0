"""Text from a trained model: the cache changes no token, and what cannot be continued is told."""

from itertools import islice
from math import log

import pytest
import torch

from experiments.lm.attention import resolve
from experiments.lm.generate import Sampler, generate
from experiments.lm.model import LanguageModel
from experiments.lm.run import make_model, train
from experiments.lm.settings import POSITIONS, Sizes
from experiments.lm.text import BYTE_END, load_codec, load_corpus
from experiments.training.state import WEIGHTS, load

VOCAB, CONTEXT, NEW = 100, 200, 48
CPU = torch.device("cpu")
# the fourth differs from head to head and from layer to layer, and with the length
MASKS = (
    None,
    "sliding:8",
    "global_tokens(4) | local(24)",
    "local(8) | random(0.3, block=16, per_head=True, per_layer=True)",
    "moba(32, 2)",
)


def model_of(mask, positions):
    """A model whose next token depends on what its attentions see."""
    torch.manual_seed(0)
    sizes, causal = Sizes(2, 32, 2), resolve(mask, causal=True)
    model = LanguageModel(sizes, VOCAB, CONTEXT, "sparse", causal, positions=positions).eval()
    with torch.no_grad():
        for block in model.layers:
            for part in (block.attention.q, block.attention.k, block.attention.v):
                part.weight.mul_(30)
            block.attention.out.weight.mul_(30)
    return model


@torch.no_grad()
def without_cache(model, prompt, count, vocab):
    """The most probable tokens after the prompt, each from a whole window as in training."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        window = torch.tensor([ids + [0] * (model.context - len(ids))])
        ids.append(int(model(window)[0, len(ids) - 1, :vocab].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", [9, 150])  # blocks have 64 and 128 tokens, chunks 32
@pytest.mark.parametrize("place", range(len(MASKS)))
def test_the_cache_changes_no_token(place, prompt, one_thread):
    mask, positions = MASKS[place], POSITIONS[(place + (prompt == 9)) % 2]
    model = model_of(mask, positions)
    ids = torch.randint(VOCAB, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    wanted = without_cache(model, ids, NEW, VOCAB)
    assert len(set(wanted)) > NEW // 4  # or a wrong one might not be seen
    for _ in range(2):  # the model is as before
        found = generate(model, ids, Sampler(VOCAB, 0, None, 0, CPU), "fp32")
        assert list(islice(found, NEW)) == wanted


@pytest.fixture
def text_of(run_program, capsys):
    """What the program prints of a run: its status, the text, and stderr."""

    def make(folder, *words, prompt="def f12(x)"):
        capsys.readouterr()  # of training
        return run_program(
            "lm.generate", f"run={folder}", f'prompt="{prompt}"', "device=cpu", *words
        )

    return make


RUNS = [
    {"provider": "standard", "packed": True, "positions": "rotary"},
    {"mask": "butterfly(8)", "packed": True, "tokenizer": "bpe:300"},
]


@pytest.mark.parametrize("changes", RUNS)
def test_a_run_continues_a_text(changes, settings, text_of):
    if "tokenizer" in changes:
        pytest.importorskip("tokenizers")
    made = settings(steps=20, lr=1e-2, **changes)
    train(made)
    corpus = load_corpus(made.data, made.tokenizer, made.cache_dir)
    model, _ = make_model(made, corpus)
    model.load_state_dict(load(made.folder / WEIGHTS)["model"])
    codec = load_codec(made.tokenizer, corpus.digest, made.cache_dir)
    wanted = without_cache(model.eval(), codec.encode("def f12(x)"), 20, corpus.vocab)
    assert corpus.end not in wanted and len(set(wanted)) > 2
    status, text, speed = text_of(made.folder, "tokens=20", "temperature=0")
    assert status == 0 and "20 tokens, " in speed and " tokens/s (" in speed
    assert text == "def f12(x)" + codec.decode(wanted) + "\n"
    drawn = [text_of(made.folder, "temperature=3", "tokens=20", f"seed={i}")[1] for i in (1, 1, 2)]
    assert drawn[0] == drawn[1] and len({text, *drawn}) == 3


def test_what_cannot_be_continued_is_one_line(settings, text_of, tmp_path):
    made = settings(steps=1)
    train(made)
    assert text_of(made.folder, "tokens=23", prompt="123456789")[0] == 0
    gone = settings(steps=1, name="gone", keep=False)
    encoder = settings(steps=1, model="bert-tiny")
    bins = tmp_path / "bins"
    bins.mkdir()
    for name in ("train.bin", "val.bin"):
        (bins / name).write_bytes(bytes(400))
    ids = settings(steps=1, data=str(bins), vocab=50_257)
    for each in (gone, encoder, ids):
        train(each)
    wrong = {
        "123456789": (made, "tokens=24", "give tokens=23 or fewer"),
        "1" * 32: (made, "tokens=1", "context of the run 32: give a shorter prompt"),
        "": (made, "tokens=1", "prompt is empty: give the text that the model continues"),
        "1": (gone, "tokens=1", "no weights there; give the folder of a run"),
        "2": (encoder, "tokens=1", "model=bert-tiny fills in hidden tokens"),
        "3": (ids, "tokens=1", "has ids without a tokenizer, which cannot read a prompt"),
    }
    for prompt, (run, words, why) in wrong.items():
        status, text, error = text_of(run.folder, words, prompt=prompt)
        assert status == 2 and not text and why in error and error.count("\n") == 1
    (made.folder / "run.json").write_text("{}")
    assert "run.json is not the file of a run" in text_of(made.folder)[2]


def test_a_tokenizer_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match="what bpe:300 learned: name its folder with cache_dir="):
        load_codec("bpe:300", "0" * 12, str(tmp_path))


def test_draws_follow_temperature_and_top_k():
    logits = torch.tensor([0.0, log(2.0), log(4.0), 9.0])  # the last is no token of the data

    def draws(temperature, top_k=None):
        pick = Sampler(3, temperature, top_k, 0, CPU)
        return torch.bincount(torch.tensor([pick(logits) for _ in range(2000)]), minlength=3) / 2000

    for temperature, weights in ((1.0, [1, 2, 4]), (0.5, [1, 4, 16])):
        wanted = torch.tensor(weights) / sum(weights)
        torch.testing.assert_close(draws(temperature), wanted, atol=0.03, rtol=0)
    torch.testing.assert_close(draws(1.0, 2), torch.tensor([0, 1, 2]) / 3, atol=0.03, rtol=0)
    for greedy in (draws(0), draws(1e-300), draws(1.0, 1)):
        assert greedy.tolist() == [0, 0, 1]


def test_text_comes_in_whole_characters_and_ends_with_its_document(settings, text_of, monkeypatch):
    made = settings(steps=1)
    train(made)
    name = "experiments.lm.generate.generate"
    for tokens, text in (
        ([*b" yes", BYTE_END, *b"no"], " yes"),
        ([*"né€😀".encode()], "né€😀"),
        ([*b"a\xe2\x82"], "a\N{REPLACEMENT CHARACTER}"),
    ):
        monkeypatch.setattr(name, lambda *given, tokens=tokens: iter(tokens))
        assert text_of(made.folder, "tokens=12")[1] == f"def f12(x){text}\n"
