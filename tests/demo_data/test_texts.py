"""The demo texts are collected from docstrings, split, and built once. This takes 10 s, or 20 s without a cache."""

import importlib.util
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shared.demo_data import libraries, pairs, tagged_functions, texts
from shared.errors import UserError

LIBRARIES = ["planted_a", "planted_b", "planted_c", "planted_d"]
ROOT = Path(texts.__file__).parents[2]


def sentence(library: str, number: int) -> str:
    return f"Docstring {number} of {library}, which is long enough to be kept: it has more than eighty characters."


def planted() -> set[str]:
    return {sentence(library, number) for library in LIBRARIES for i in range(6) for number in (i, 1000 + i)}


def plant(site: Path, library: str) -> None:
    """Write an installed library; each of its files leaves a trace when it is imported."""
    package = site / library
    package.mkdir(parents=True)
    trace = f"open({str(site / 'imported')!r}, 'w')\nraise RuntimeError\n"
    (package / "__init__.py").write_text(trace)
    for number in range(6):
        function = f'def f():\n    """{sentence(library, 1000 + number)}"""\n'
        (package / f"m{number}.py").write_text(f'"""{sentence(library, number)}"""\n{function}{trace}')
    (site / f"{library}-1.0.dist-info").mkdir()
    (site / f"{library}-1.0.dist-info" / "METADATA").write_text(f"Name: {library}\nVersion: 1.0\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Four planted libraries, found by `load` instead of the real ones, and an empty cache."""
    site = tmp_path / "site"
    for library in LIBRARIES:
        plant(site, library)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(libraries, "LIBRARIES", {name: name for name in LIBRARIES})
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))
    return site


def roots(site: Path) -> dict[str, Path]:
    return {library: site / library for library in LIBRARIES}


def test_docstrings_of_modules_classes_and_functions_are_found_wherever_they_are_defined():
    source = b'''"""Module."""
"not a docstring"
name = """nor this"""
class A:
    """Class.

        Indented.
    """
    async def method(self):
        """Method."""
        def inner():
            """Inner."""
try:
    if name:
        pass
    else:
        def g(): "In else."
except ImportError:
    def h(): "In except."
finally:
    with name:
        def k(): "In with."
'''
    expected = {"Module.", "Class.\n\nIndented.", "Method.", "Inner.", "In else.", "In except.", "In with."}
    assert {text for text in texts.docstrings(source) if text} == expected
    assert texts.docstrings(rb'"""a\ud800b\xe9"""') == ["abé"]  # only the invalid part is lost


@pytest.mark.parametrize("parse", [texts.docstrings, pairs.functions, tagged_functions.tagged_functions])
@pytest.mark.parametrize("source", [b"print 'Python 2'", b"x = '\0'", b"\xff\xfe", b"# coding: nonsense\n"])
def test_a_file_that_cannot_be_parsed_has_no_texts(parse, source):
    assert not any(parse(source))


def test_the_rows_and_their_order_do_not_depend_on_the_order_of_the_files(site, monkeypatch):
    first = texts.gather(roots(site))
    real = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(real(self, pattern))))
    monkeypatch.setattr(libraries, "FILES_PER_PROCESS", 5)
    second = texts.gather(dict(reversed(roots(site).items())))
    assert second == first
    labels = [row["label"] for row in first]
    assert labels != sorted(labels)  # shuffled: the first rows are a sample


def test_a_source_file_is_in_one_split_and_stays_there_when_files_are_added(site):
    before = {row["file"]: row["split"] for row in texts.gather(roots(site))}
    for number in range(100, 140):
        (site / "planted_a" / f"m{number}.py").write_text(f'"""{sentence("planted_a", number)}"""')
    rows = texts.gather(roots(site))
    after = {(row["file"], row["split"]) for row in rows}
    assert len(after) == len({row["file"] for row in rows}) == len(before) + 40
    assert before.items() <= after
    files = [f"library/module{number}.py" for number in range(20)]
    assert [i for i, file in enumerate(files) if libraries.split_of(file) == "validation"] == [4, 10, 13, 17, 18]


def test_duplicates_are_kept_once_and_texts_that_two_libraries_share_are_dropped(site):
    again = sentence("planted_a", 3).replace(" ", "\n  ")
    shared = "A sentence that two of the libraries have, so that nobody can tell from which of the two it comes."
    (site / "planted_a" / "again.py").write_text(f'"""{again}"""\nclass A:\n    """{shared}"""')
    (site / "planted_b" / "again.py").write_text(f'"""{shared}\n"""\nclass A:\n    """Too short to say much."""')
    rows = texts.gather(roots(site))
    keys = Counter(" ".join(row["text"].split()) for row in rows)
    assert keys == dict.fromkeys(planted(), 1)


def test_the_number_of_files_per_library_is_limited_and_its_tests_are_left_out(site, monkeypatch):
    (site / "planted_a" / "tests").mkdir()
    (site / "planted_a" / "tests" / "test_a.py").write_text(f'"""{sentence("planted_a", 77)}"""')
    everything = texts.gather(roots(site))
    assert not any("tests" in row["file"] for row in everything)
    monkeypatch.setattr(libraries, "FILES_PER_LIBRARY", 4)
    some = texts.gather(roots(site))
    assert all(3 <= count <= 4 for count in Counter(file.split("/")[0] for file in {r["file"] for r in some}).values())
    assert [row for row in everything if row["file"] in {r["file"] for r in some}] == some


def test_load_limits_the_texts_per_library_and_documents_does_not(site, monkeypatch):
    everything = texts.documents()
    assert everything.column_names == ["text", "file", "split"]
    assert {*everything["text"].to_pylist()} == planted()
    assert everything.num_rows == 12 * len(LIBRARIES)
    monkeypatch.setattr(texts, "TEXTS_PER_LIBRARY", 5)
    train, validation = texts.load()
    assert train.column_names == validation.column_names == ["text", "label", "file"]
    labels = train["label"].to_pylist() + validation["label"].to_pylist()
    assert Counter(labels) == dict.fromkeys(LIBRARIES, 5)
    sides = dict(zip(everything["file"].to_pylist(), everything["split"].to_pylist(), strict=True))
    assert {sides[file] for file in train["file"].to_pylist()} == {"train"}
    assert {sides[file] for file in validation["file"].to_pylist()} <= {"validation"}
    assert not (site / "imported").exists()


def test_a_missing_library_is_refused_with_the_remedies(site, monkeypatch):
    (site / "only_a_folder").mkdir()
    monkeypatch.setitem(libraries.LIBRARIES, "only_a_folder", "no-such")
    with pytest.raises(UserError, match=r"need no-such, which is not installed.*requirements\.txt.*--train_file"):
        texts.load()


def test_a_new_version_of_a_library_is_read_again(site, capfd):
    before = texts.documents()
    assert capfd.readouterr().err.startswith(
        "reading docstrings, once per machine, from planted_a 1.0, planted_b 1.0, "
    )
    (site / "planted_a" / "new.py").write_text(f'"""{sentence("planted_a", 5000)}"""')
    assert texts.documents().equals(before)
    (site / "planted_a-1.0.dist-info" / "METADATA").write_text("Name: planted_a\nVersion: 1.1\n")
    assert texts.documents().num_rows == before.num_rows + 1


SCRIPT = """
import sys, threading, time
sys.path[:0] = [sys.argv[1], {root!r}]
from shared.demo_data import libraries, pairs, tagged_functions, texts
libraries.LIBRARIES = {libraries!r}
threading.Thread(target=time.sleep, args=(0.5,)).start()
train, validation = texts.load()
print("read", train.num_rows + validation.num_rows)
"""


def test_a_script_without_a_guard_on_its_name_reads_the_data_while_a_thread_runs(site, tmp_path):
    """To import the script again would fail, and to fork is unsafe. No module of the working folder is imported."""
    (tmp_path / "json.py").write_text("raise RuntimeError")
    (tmp_path / "shared.py").write_text("raise RuntimeError")
    script = SCRIPT.format(root=str(ROOT), libraries=libraries.LIBRARIES)
    command = [sys.executable, "-P", "-c", script, site]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=tmp_path).stdout
    assert printed == f"read {12 * len(LIBRARIES)}\n"


def test_the_installed_libraries_give_enough_balanced_text():
    """This takes up to 20 s if the user's cache has no data for the installed versions."""
    train, validation = texts.load()
    rows = train.to_pylist() + validation.to_pylist()
    assert len(rows) >= 8000
    labels = Counter(row["label"] for row in rows)
    assert len(labels) >= 4
    assert max(labels.values()) < 2 * min(labels.values())
    assert set(train["label"].to_pylist()) == set(validation["label"].to_pylist())
    assert 0.1 < validation.num_rows / len(rows) < 0.2
    for row in random.Random(0).sample(rows, 50):
        package = Path(importlib.util.find_spec(row["label"]).origin).parent
        assert row["text"] in texts.docstrings((package.parent / row["file"]).read_bytes())
    assert sum(len(text.encode()) for text in texts.documents()["text"].to_pylist()) > 5_000_000
