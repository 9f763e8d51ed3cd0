"""The source digest of files, and what may be published."""

import subprocess

import pytest

from experiments.common import provenance


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with code as the project, without git."""
    (tmp_path / "masks").mkdir()
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    change(tmp_path, "a = 1\n")
    yield tmp_path
    clear()


@pytest.fixture
def repository(folder):
    """A small git repository as the project, with one commit."""
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def change(folder, code):
    (folder / "masks" / "a.py").write_text(code)
    clear()


def clear():
    for name in ("source_digest", "commit"):
        getattr(provenance, name).cache_clear()


def test_a_changed_file_has_another_digest_and_no_commit(repository):
    before = provenance.source_digest("masks")
    published = repository / "docs" / "speed.jsonl"
    published.write_text("a row\n")  # results alone do not make the code changed
    clear()
    assert provenance.source_digest("masks") == before and len(before) == 12
    provenance.check_published(published)
    change(repository, "a = 2\n")
    assert provenance.source_digest("masks") != before
    assert provenance.commit().endswith("+changes")
    with pytest.raises(ValueError, match=r"commit first, or allow it with allow_changes=true"):
        provenance.check_published(published)
    provenance.check_published(repository / "runs" / "speed.jsonl")
    change(repository, "a = 1\n")
    (repository / "masks" / "a.py").rename(repository / "masks" / "b.py")
    clear()
    assert provenance.source_digest("masks") != before


def test_patterns_of_the_users_own_count(folder, monkeypatch, tmp_path):
    """Another rule under the same text is measured again."""
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for code in (None, "a = 1", "a = 2"):
        if code is not None:
            (tmp_path / "own_patterns.py").write_text(code)
            monkeypatch.setenv("SPARSEFLASH_PATTERNS", "own_patterns,math")
        clear()
        digests.append(provenance.source_digest("masks"))
    assert len({*digests}) == 3
    monkeypatch.setenv("SPARSEFLASH_PATTERNS", "own_nowhere.patterns")
    clear()
    with pytest.raises(ValueError, match=r"own_nowhere\.patterns cannot be imported"):
        provenance.source_digest("masks")


def test_a_copy_without_git_names_its_commit(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"not a git checkout: give the commit.*SOURCE_COMMIT="):
        provenance.check_published(folder / "docs" / "speed.jsonl")
    monkeypatch.setenv(provenance.COMMIT, "abc")
    clear()
    provenance.check_published(folder / "docs" / "speed.jsonl")
    assert provenance.origin("cpu", "python", ("masks",))["commit"] == "abc"
