"""Programs of experiments, as a user starts them."""

import sys
from copy import deepcopy
from importlib import import_module

import pytest
import torch
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource as ConfigSource,
)

from experiments.common.figures import RC


@pytest.fixture(autouse=True, scope="session")
def coarse_figures():
    """PNG files of a tenth of the pixels, with their margins, which are drawn in a fraction of the
    time: what cuts margins off draws twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RC, "savefig.dpi", 90)
        patch.setitem(RC, "savefig.bbox", "standard")
        yield


@pytest.fixture(autouse=True, scope="session")
def configs_are_read_once():
    """Hydra reads and parses its files for every command line, and takes half of its time so."""
    load, found = ConfigSource.load_config, {}

    def load_once(source, name):
        key = source.provider, source.path, name
        if key not in found:
            found[key] = load(source, name)
        return deepcopy(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigSource, "load_config", load_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def bytecode_of_processes(pytestconfig):
    """Processes that tests start share bytecode in pytest's cache, where none may be written beside
    the sources: each would compile torch for longer than it runs.
    """
    cache = getattr(pytestconfig, "cache", None)  # -p no:cacheprovider
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode and cache is not None:
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(cache.mkdir("bytecode")))
        yield


@pytest.fixture
def run_program(monkeypatch, capsys):
    """Runs a program, or its main, in this process: its exit status, and what it wrote to stdout
    and stderr.
    """

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", [str(module), *words])
        main = module if callable(module) else import_module(f"experiments.{module}").main
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def one_thread():
    """For tiny calls, whose threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
