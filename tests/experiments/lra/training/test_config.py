"""Settings: recipes, the small scale, folders, and values that are none."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import experiments.conf
from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.lra.settings import make_settings, model_sizes
from experiments.lra.tasks.load import NAMES as TASKS
from experiments.training.optim import learning_rates

CONF = Path(experiments.conf.__path__[0])
CHOICES = {group: sorted(p.stem for p in (CONF / group).glob("*.yaml")) for group in
           ("task", "attention", "recipe")}  # fmt: skip


def settings(*given):
    with initialize_config_module("experiments.conf", version_base="1.3"):
        return make_settings(compose("train", list(given)), list(given))


def test_every_task_and_attention_has_a_config():
    assert CHOICES["attention"] == sorted(ATTENTIONS)
    assert {*CHOICES["task"]} == {*TASKS, "text4k", "text_held_out", "imdb_whole"}


@pytest.mark.parametrize("recipe", CHOICES["recipe"])
@pytest.mark.parametrize("task", CHOICES["task"])
def test_recipes(task, recipe):
    given = f"task={task}", f"recipe={recipe}"
    with initialize_config_module("experiments.conf", version_base="1.3"):
        config = compose("train", list(given))
    full, small = (
        make_settings(OmegaConf.merge(config, {"scale": scale}), [*given, f"scale={scale}"])
        for scale in ("full", "small")
    )
    assert full.recipe == recipe and model_sizes(full)
    assert full.label == task.replace("_", "-") or "_movie" in task
    assert (recipe != "nystrom") == (recipe in str(full.folder))
    assert not full.scaled and full.eval_every <= full.steps
    assert small.steps < full.steps and small.batch <= full.batch
    assert "small" in str(small.folder) and small.identity() != full.identity()


def test_peak_rates_of_the_google_recipes():
    full = settings("task=listops", "recipe=google", "scale=full")
    rates = learning_rates(full.schedule, full.lr, full.warmup, full.steps)
    assert rates.max().item() == pytest.approx(1.58e-3, rel=0.01)


def test_small_is_for_a_cpu_and_leaves_what_is_given(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    auto = settings("task=listops", "steps=77", "task.max_length=300")
    assert auto.scale == "small" and auto.precision == "fp32" and not auto.graph
    assert auto.steps == 77 and auto.task["max_length"] == 300 and auto.task["generate"]
    assert auto.scaled["task.generate"] == (False, True)
    assert auto.scaled["lr"][0] == 1e-4
    full = settings("task=listops", "scale=full")
    assert full.task["generate"] is False and not full.scaled


def test_what_is_given_comes_before_the_recipe():
    given = settings("task=image", "recipe=google", "scale=full", "lr=3", "model.dim=16")
    assert (given.lr, given.model["dim"]) == (3, 16)
    assert (given.batch, given.model["layers"], given.model["setting"]) == (256, 1, "google")
    table = {"image": {"lr": 1e-3, "model": {"dim": 8}, "depth": 2}}
    with initialize_config_module("experiments.conf", version_base="1.3"):
        config = compose("train", ["task=image"])
    config.by_task = table
    with pytest.raises(ValueError, match="setting='depth': choose from"):
        make_settings(config)
    config.by_task = {"text": {}}
    with pytest.raises(ValueError, match="recipe=nystrom with task='image': choose from text"):
        make_settings(config)


def test_folders_tell_runs_apart():
    def folder(*given):
        return settings("task=image", "scale=full", *given).folder.as_posix()

    assert folder("attention=local") == "runs/train/image/local/seed0"
    assert folder("attention=local", "seed=3", "name=try") == "runs/train/image/local-try/seed3"
    masked = folder("mask=local:256+butterfly")
    assert masked.startswith("runs/train/image/sparse-local-256-butterfly-")
    assert folder("mask=local:256*butterfly") != masked
    assert "image-masked/" in folder("pretrain=masked")


def test_the_identity_is_what_changes_the_result():
    def digest(*given):
        return repr(settings("task=image", *given).identity())

    free = ("minutes=3", "name=a", "micro_batch=2", "log_every=7", "runs=x", "compile=false")
    default = digest()
    assert all(digest(one) == default for one in free)
    bound = ("steps=7", "lr=1", "seed=1", "task.order=hilbert", "model.dim=32", "attention=local")
    assert len({digest(one) for one in bound} | {default}) == 1 + len(bound)


@pytest.mark.parametrize(
    "given, words",
    [
        ("steps=0", "steps=0 tests the weights of init_from: give it, or at least 1 step"),
        ("steps=-1", "steps=-1: give a whole number, at least 0"),
        ("steps=1.5", "steps=1.5: give a whole number"),
        ("batch=true", "batch=True: give a whole number"),
        ("compile=no", "compile='no': give true, false or null"),
        ("compile=None", "compile='None': give true, false or null"),
        ("graph=1", "graph=1: give true, false or null"),
        ("tensorboard=maybe", "tensorboard='maybe': give true, false or null"),
        ("task.generate=no", "task.generate='no': give true, false or null"),
        ("model.causal=no", "model.causal='no': give true, false or null"),
        ("model.layers=0", "model.layers is 0; it must be a whole number, at least 1"),
        ("model.layers=x", "model.layers is 'x'; it must be a whole number"),
        ("model.layers=true", "model.layers is True; it must be a whole number"),
        ("model.dim=x", "model.dim is 'x'; it must be a whole number"),
        ("model.dim=1.5", "model.dim is 1.5; it must be a whole number"),
        ("model.heads=[2]", r"model.heads is \[2\]; it must be a whole number"),
        ("model.dropout=x", r"model.dropout is 'x'; it must be a number in \[0, 1\)"),
        ("model.dropout=1", r"model.dropout is 1; it must be a number in \[0, 1\)"),
        ("model.embedding_std=x", "model.embedding_std is 'x'; it must be a number above 0"),
        ("model.pool=best", "model.pool is 'best'; choose one of mean, mean_tokens"),
        ("model.positions=axial", "model.positions is axial: that takes images"),
        ("model.embedding=smooth", "model.embedding is smooth: that takes images"),
        ("+model.layer=3", r"setting of the model='layer': .*did you mean layers"),
        ("+model.lm_head=true", "setting of the model='lm_head': choose from"),
        ("model=3", "model=3: give its settings, model.NAME="),
        ("model=null", "model=None: give its settings"),
        ("runs=0", "runs=0: give a path, and write runs=./0 for that name"),
        ("init_from=0", "init_from=0: give a path"),
        ("cache_dir=[a]", r"cache_dir=\['a'\]: give a path"),
        ("weight_decay=x", "weight_decay='x': give a number, at least 0"),
        ("weight_decay=-1", "weight_decay=-1: give a number, at least 0"),
        ("mask_share=x", "mask_share='x': give a number from 0 to below 1"),
        ("mask_share=0", "mask_share=0 hides no token"),
        ("betas=[0.9,x]", "betas='x': give a number from 0 to below 1"),
        ("betas=[0.9,2]", "betas=2: give a number from 0 to below 1"),
        ("warmup=-1", "warmup=-1: give a whole number, at least 0"),
        ("lr=0", "lr=0: give a number above 0"),
        ("lr=fast", "lr='fast': give a number above 0"),
        ("scale=smal", r"scale='smal': choose from .*\(did you mean small\?\)"),
        ("schedule=cosin", r"schedule='cosin': .*did you mean cosine"),
        ("precision=fp16", "precision='fp16': choose from bf16, fp32"),
        ("pretrain=words", "pretrain='words': choose from masked, causal"),
        ("pretrain=causal", "pretrain=causal with model.causal=false: a causal model takes"),
        ("mask_share=1", "mask_share=1: give a number from 0 to below 1"),
        ("init_head=new", "init_head='new': choose from fresh"),
        ("init_head=fresh", "init_head=fresh needs init_from=FOLDER"),
        ("betas=[0.9]", r"betas=\[0.9\]: give two numbers"),
        ("micro_batch=7", "micro_batch=7 does not divide batch="),
        ("device=tpu", "device='tpu': choose from cpu, cuda"),
        ("device=cuda", "device='cuda': torch finds no GPU here"),
        ("+sed=1", r"setting='sed': choose from .*did you mean seed"),
        ("~seed", "the setting seed is missing"),
        ("name=a/b", "name='a/b' is part of a folder's name: use letters"),
        ("mask=loca:256", "loca.*local"),
        ("mask=local:256+", "does not read as an expression"),
    ],
)
def test_bad_values(given, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=words) as caught:
        settings("task=listops", given)
    assert "\n" not in str(caught.value) or "mask" in given  # a mask shows the place


@pytest.mark.parametrize(
    "task, head_dim, words",
    [("listops", 31, "model.head_dim is 31; rotary takes an even one"),
     ("pathfinder32", 30, "model.head_dim is 30; rotary of images takes a multiple of 4")],
)  # fmt: skip
def test_rotary_needs_pairs_of_features(task, head_dim, words):
    given = "model.rotary=true", f"model.head_dim={head_dim}"
    with pytest.raises(ValueError, match=words):
        settings(f"task={task}", *given)
    assert settings("task=listops", "model.rotary=true", "model.head_dim=30")


def test_heads_need_not_divide_the_width():
    """The width of a head is a setting of its own."""
    assert settings("task=listops", "model.heads=3", "model.dim=64").model["heads"] == 3


def test_a_mask_is_for_sparse_attention():
    with pytest.raises(ValueError, match="mask=local:9 is for attention=sparse; linear takes none"):
        settings("attention=linear", "mask=local:9")
