"""A folder of text, and settings of runs of seconds."""

import pytest
from omegaconf import OmegaConf

from experiments.lm.settings import Settings, make_settings
from experiments.training.clock import Interrupted
from experiments.training.train import Session

LINES = "def f{0}(x):\n    return x + {0}\n"


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch):
    """Attention takes the CPU backend, as in a program; Triton's interpreter is slow."""
    monkeypatch.setattr("sparseflash.backends.triton.unsupported", lambda *call: "interpreted")


@pytest.fixture
def interrupted(monkeypatch):
    """Trains a run that a signal ends at its first checkpoint from that step on."""

    def end(train, settings, step=0):
        saved = Session._save

        def stop(self):
            saved(self)
            if self.trainer.step >= step:
                raise Interrupted("SIGTERM")

        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Session, "_save", stop)
            train(settings)

    return end


@pytest.fixture
def texts(tmp_path):
    """A folder of twenty files, each with fifteen lines of its own."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        text = "".join(LINES.format(100 * i + j) for j in range(15))
        (folder / f"{i}.txt").write_text(text)
    return folder


@pytest.fixture
def options(texts, tmp_path):
    """Options of a program, with changes."""

    def make(**changes):
        found = OmegaConf.to_container(OmegaConf.structured(Settings))
        tiny = {"model": "tiny", "context": 32, "batch": 2, "steps": 12, "val_tokens": 64}
        places = {"runs": str(tmp_path / "runs"), "cache_dir": str(tmp_path / "cache")}
        fixed = {"device": "cpu", "data": str(texts), "eval_every": 6, "log_every": 2}
        assert isinstance(found, dict)
        return {**found, **tiny, **places, **fixed, **changes}

    return make


@pytest.fixture
def settings(options, one_thread):
    """Settings of a run, with changes."""
    return lambda **changes: make_settings(options(**changes))
