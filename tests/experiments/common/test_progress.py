"""What takes long says how long."""

import time

from experiments.common.progress import progress


def test_progress_is_silent_for_what_is_quick(capsys, monkeypatch):
    assert list(progress("abc", 3, "letters")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    clock = iter(range(0, 1000, 11))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert list(progress("abc", 3, "letters")) == ["a", "b", "c"]
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "letters: 1 of 3, 44 s left",
        "letters: 2 of 3, 16 s left",
        "letters: 3 in 44 s",
    ]
