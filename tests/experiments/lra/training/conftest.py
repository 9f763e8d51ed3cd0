"""What the tests of training share: the backend, a folder of data, runs that are killed."""

from functools import partial

import pytest
import torch

from tests.experiments.lra.training.cases import Trained, assert_same, killed_at, write_data


@pytest.fixture(autouse=True, scope="module")
def as_on_a_cpu():
    """The backend that users have, not Triton's interpreter; one thread, as all is tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparseflash.backends.triton.unsupported", lambda *call: "interpreted")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, which all runs here share."""
    folder = tmp_path_factory.mktemp("lra")
    (folder / "data").mkdir()
    write_data(folder / "data")
    return folder


@pytest.fixture
def ran(place):
    """Trains a run in that folder."""
    return partial(Trained, place)


RESULTS = ("train", "val", "test")  # kinds of lines


@pytest.fixture
def killed(place):
    """Trains a run that ends after three steps."""
    return partial(killed_at, 3, place)


@pytest.fixture
def assert_resumes(ran, killed):
    """A run that is killed after three steps and started again ends with the same bits."""

    def check(*names, name="uncut", **changes):
        whole = ran(*names, name=name, **changes)
        assert whole.result["complete"] and whole.result["steps"] == 4
        assert 0 <= whole.result["accuracy"] <= 1
        changes["name"] = f"{name}-cut"
        killed(*names, **changes)
        cut = ran(*names, **changes)
        kept = ("model", "optimizer", "sums", "random", "best", "step", "logged")
        states = whole.state, cut.state
        assert_same(*({name: state[name] for name in kept} for state in states))
        assert [x["kind"] for x in cut.journal].count("resume") == 1
        told = "loss accuracy lr grad_norm grad_norm_max epoch kind step".split()
        ours, theirs = (
            [{k: x.get(k) for k in told} for x in run.journal if x["kind"] in RESULTS]
            for run in (whole, cut)
        )
        assert ours == theirs

    return check
