"""Fixtures of the tests of masks."""

import pytest

from masks.build import Cache


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `build` builds."""
    monkeypatch.setattr("masks.build.cache", Cache(max_items=1, max_bytes=1))
