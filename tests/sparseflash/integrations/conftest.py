"""Models of other libraries run on the backend that a user's CPU takes, not in an interpreter."""

import pytest


@pytest.fixture(autouse=True)
def without_the_interpreter_of_triton(no_interpreter):
    pass
