"""Registration: one file adds an attention, and its annotations check its options."""

from pathlib import Path
from typing import Literal

import pytest
import torch

import experiments
from experiments.lra import published
from experiments.lra.models.attention import KINDS, Attention, make_attention, options_of
from experiments.lra.models.attention.base import register
from experiments.lra.models.classifier import Classifier


@pytest.fixture
def mean():
    """An attention that takes the mean of v, registered for the time of a test."""

    @register("mean", label="mean of v", style=("#123456", "o", "-"))
    class Mean(Attention):
        def __init__(
            self,
            *,
            kind: Literal["all", "real"] = "all",
            weight: float | None = None,
            times: int = 1,
            sharp: bool = False,
            **sizes,
        ):
            super().__init__(**sizes)
            self.kind, self.times = kind, times

        def attend(self, q, k, v, lengths):
            return self.times * v.mean(2, keepdim=True).expand_as(q)

    yield Mean
    del KINDS["mean"]


def test_a_registered_class_is_an_attention_of_the_models(mean):
    layer = make_attention("mean", heads=2, head_dim=4, length=8, times=3, kind=None)
    assert isinstance(layer, mean) and (layer.times, layer.kind) == (3, "all")
    assert options_of("mean") == {"kind": "all", "weight": None, "times": 1, "sharp": False}
    model = Classifier(20, 8, 3, attention={"name": "mean", "times": 2})
    assert model(torch.randint(20, (2, 8))).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "none"}, "kind is 'none'; choose from all, real"),
        ({"weight": -1}, "weight is -1; it must be a number of at least 0"),
        ({"weight": "1"}, "weight is '1'"),
        ({"times": 0}, "times is 0; it must be a positive integer"),
        ({"times": 1.5}, "times is 1.5"),
        ({"sharp": 1}, "sharp is 1; it must be True or False"),
        ({"blur": 1}, "no option blur; it has kind, weight, times, sharp"),
    ],
)
def test_annotations_check_the_options(options, message, mean):
    with pytest.raises(ValueError, match=message):
        make_attention("mean", heads=2, head_dim=4, length=8, **options)


def test_labels_styles_and_configurations_follow_the_registration():
    assert list(published.ATTENTIONS)[:3] == ["standard", "flash", "sparse"]
    assert {name: kind.label for name, kind in KINDS.items()} == published.ATTENTIONS
    assert published.STYLES["flash"].color == KINDS["flash"].style[0]
    assert len({kind.style for kind in KINDS.values()}) == len(KINDS)
    groups = Path(experiments.__file__).parent / "conf" / "attention"
    assert {path.stem for path in groups.glob("*.yaml")} == set(KINDS)
