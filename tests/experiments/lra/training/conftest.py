"""Settings of the tests of training."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def as_on_a_cpu():
    """The backend that users have, not Triton's interpreter; one thread, as all is tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparseflash.backends.triton.unsupported", lambda *call: "interpreted")
        yield
    torch.set_num_threads(before)
