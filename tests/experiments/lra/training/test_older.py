"""Runs from before a setting was there: they are read, and go on."""

import pytest
from omegaconf import OmegaConf

from experiments.lra.settings import read_settings
from tests.experiments.lra.training.cases import settings, train


def without(path, *keys):
    """Takes settings out of a config.yaml."""
    values = OmegaConf.load(path)
    for key in keys:
        section, _, name = key.rpartition(".")
        del (values[section] if section else values)[name]
    OmegaConf.save(values, path)


def test_settings_without_the_newest_are_read(place, ran):
    run = ran(name="newest", deterministic="true")
    without(run.folder / "config.yaml", "deterministic")
    assert read_settings(run.folder / "config.yaml") == settings(place, name="newest")


def test_a_run_without_an_option_goes_on_with_its_default(place, killed, ran):
    older = {"attention": "flash", "name": "older"}
    killed(**older)
    path = settings(place, **older).folder / "config.yaml"
    without(path, "attention.padding", "model.causal", "deterministic")
    for changes, words in (
        ({"attention__padding": "hide"}, r"\(attention.padding auto -> hide\)"),
        ({"model__causal": "true"}, r"\(model.causal None -> True\)"),
    ):
        with pytest.raises(ValueError, match=words):
            train(place, **older, **changes)
    assert ran(**older).result["complete"]
