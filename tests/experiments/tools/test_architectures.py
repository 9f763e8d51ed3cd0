"""The program that goes through the architectures of transformers tells its verdicts apart."""

from importlib import import_module

import pytest

pytest.importorskip("transformers", minversion="5.23")
measure = import_module("experiments.tools.architectures").measure
interface = import_module("transformers.modeling_utils").AttentionInterface
sparse = import_module("sparseflash.integrations.transformers")


def test_equal():
    row = measure("llama")
    assert row["verdict"] == "equal" and row["effect"] > 0.1
    assert max(row["steps"][f"padding on the {side}"] for side in ("left", "right")) < 1e-5
    assert row["steps"]["generate, dynamic cache"] < 1e-5
    assert row["steps"]["gradients"] < 1e-4


def test_refused():
    row = measure("t5")
    assert row["verdict"] == "refused" and "position_bias" in row["reason"]


@pytest.mark.parametrize("fault", ["wrong", "foreign"])
def test_faults(monkeypatch, fault):
    def attend(module, query, key, value, mask, **others):
        if fault == "foreign":
            return mask[:, :, 0]
        return sparse.attend(module, query, key, value, mask, **others | {"scaling": 0.3})

    monkeypatch.setitem(interface._global_mapping, sparse.NAME, attend)
    assert measure("llama")["verdict"] == fault
