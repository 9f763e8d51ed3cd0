"""Files that are there whole or not at all."""

import resource

import pytest
import torch
from matplotlib import pyplot as plt

from experiments.common.figures import save
from experiments.common.files import write_whole


def test_tensors_that_do_not_fit_the_disk_leave_the_old_file_and_say_so(tmp_path):
    """torch.save hides what the system says behind an error of its own."""
    path, tensor = tmp_path / "some.pt", torch.zeros(2**16)
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot write .*File too large.*with runs="):
            write_whole(path, lambda file: torch.save(tensor, file), "runs")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_figure_that_does_not_fit_the_disk_leaves_the_old_one(tmp_path):
    path = tmp_path / "some.png"
    path.write_bytes(b"old")
    figure = plt.figure()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot write .*some\.png.*with plots="):
            save(figure, tmp_path / "some", option="plots")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_place_below_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file/new .*another place with out="):
        write_whole(tmp_path / "file" / "new", lambda file: None, "out")
