"""Rows in files, tables of them, and where they come from."""

import gzip
import multiprocessing
import subprocess

import pytest

from experiments.common import provenance
from experiments.common.rows import Rows, frame, last_versions, read
from experiments.common.tables import MISSING, pivot

KEY = ("name", "n", "round")


def row(name="a", n=1, source="s", **more):
    about = {"mask": "dense", "device": "cpu", "torch": "2", "triton": "", "source": source}
    return {"name": name, "n": n, "round": 1, **about, **more}


def test_rows_are_found_again_and_outlive_a_kill(tmp_path):
    rows = Rows(tmp_path / "new" / "rows.jsonl", KEY)
    rows.append(row(ms=1.23456789, status="failed"))
    rows.append(row(ms=2.5, word="Größe | x"))
    rows.append(row(n=2, density=1 / 3, ms=None))
    with open(rows.path, "a") as file:
        file.write('{"name": "a", "n"')  # half a line
    assert [r["ms"] for r in read(rows.path)] == [1.23457, 2.5, None]
    again = Rows(rows.path, KEY)
    assert again.rows == rows.rows == read(rows.path)
    assert again.find(row())["ms"] == 2.5  # the newest
    assert again.find(row(source="other")) is None and again.find(row(n=3)) is None
    again.append(row(n=3, a_new_field=[1, 2]))
    assert read(rows.path)[-1]["a_new_field"] == [1, 2]
    assert frame(rows.path).a_new_field.isna().tolist() == [True] * 3 + [False]
    packed = rows.path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(rows.path.read_bytes()))
    assert read(packed) == again.rows and frame(packed).equals(frame(rows.path))
    for other in (lambda: Rows(rows.path, ["page", "n"]), lambda: read(packed, "speed", ["page"])):
        with pytest.raises(ValueError, match=r"rows\.jsonl.*, row 1, lacks page"):
            other()  # rows of another program


def test_a_peers_row_depends_on_its_version_and_not_on_our_source(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", KEY)
    rows.append(row(version="1", ms=1))
    assert rows.find(row(source="changed", version="1")) and not rows.find(row(version="2"))


def append(path, name):
    rows = Rows(path, KEY)
    for n in range(20):
        rows.append(row(name, n, text=name * 9000))


def test_several_processes_write_to_one_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read(path)
    assert sorted((r["name"], r["n"]) for r in found) == [(c, n) for c in "abc" for n in range(20)]
    assert all(r["text"] == r["name"] * 9000 for r in found)


def test_other_places_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.touch()
    for name in ("rows.csv", "rows.jsonl.gz", "rows.jsonl/rows.jsonl"):
        with pytest.raises(ValueError, match=f"rows=.*{name}"):
            Rows(tmp_path / name, KEY)
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read(path)
    with pytest.raises(ValueError, match=r"missing\.jsonl.*python -m x"):
        read(tmp_path / "missing.jsonl", "python -m x")


def test_the_last_versions_of_what_was_measured_stay():
    rows = [
        row(source="old", round=1, ms=1),
        row("b", source="old", round=1, ms=2),  # not measured since
        row("peer", source="old", round=1, version="7", ms=3),
        row(source="new", round=1, ms=4),
        row(source="new", round=2, ms=5),
        row("peer", source="new", round=2, version="7", ms=6),
    ]
    assert last_versions(frame(rows), KEY).ms.tolist() == [2, 3, 4, 5, 6]
    without = [{k: v for k, v in r.items() if k != "version"} for r in rows]
    assert last_versions(frame(without), KEY).ms.tolist() == [2, 4, 5, 6]


def test_a_pivot_keeps_the_order_of_the_rows():
    rows = [row("b", 2, ms=1.0), row("a", 2, ms=2.0), row("b", None, ms=3.0), row("b", 2, ms=2.0)]
    table = pivot(frame(rows), ["n"], "name", lambda found: f"{found.ms.mean():g}")
    assert list(table.columns) == ["n", "b", "a"]
    assert table.b.tolist() == ["1.5", "3"] and table.a.tolist() == ["2", MISSING]


# ---- where rows come from


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
    assert provenance.code_version(("masks",))["commit"] == "abc"
