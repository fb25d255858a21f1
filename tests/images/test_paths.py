"""The names of image files are memory-mapped; they give the same paths as a list."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from shared.images import paths
from shared.images.paths import EXTENSIONS, images_below, stored_names
from shared.images.sources import Source


@given(
    st.lists(st.text(st.sampled_from("aé\udcff./- "), min_size=1), max_size=9),
    st.sampled_from(["photos", "/", "/a/b", ".", "../c"]),
    st.integers(1, 4),
)
@settings(max_examples=20, deadline=None)
def test_any_names_give_the_paths_of_a_list(names, root, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "AT_ONCE", at_once)
        cells = stored_names(names)
    rows = np.arange(len(names))
    source = Source("photos", (), rows, rows, cells=cells, folder=Path(root))
    expected = [Path(root) / name for name in names]
    assert [source.stored(i) for i in rows] == expected
    assert [*source.files()] == [str(path.absolute()) for path in expected]


def listed_at_once(root):
    """The images below a folder, and the reasons for skipping others, from a list of all files."""
    found, passed_over = [], Counter()
    for parent, folders, files in os.walk(root):
        for entry in [*folders, *files]:
            path = Path(parent, entry)
            named_so = path.suffix.lower() in EXTENSIONS
            if entry.startswith("."):
                passed_over["hidden"] += 1
            elif path.is_dir() and not path.is_symlink():
                continue
            elif named_so and path.is_file():
                found.append(path)
            else:
                passed_over["no images"] += 1
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
    return sorted(found), passed_over


def test_a_folder_is_listed_in_the_order_of_the_paths_and_skipped_files_are_counted(tmp_path):
    root = tmp_path / "photos"
    for folder in ("a", "a/b", "a-b", "a.b", "B/é", "named.png", ".hidden", "a/.hidden"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for file in ("z.png", "A.JPG", "a", "b.txt", "b-.gif", ".c.png", "b!.png", "é.png", os.fsdecode(b"\xff.png")):
            (root / folder / file).touch()
    links = {"to_file.png": "a/z.png", "to_folder.png": "a", "to_folder": "a", "to_text": "a/b.txt"}
    for name, target in {**links, "broken.png": "gone", "loop.png": "loop.png"}.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe.png")
    passed_over = Counter()
    found = [root / name for name in images_below(root, "--train_dir photos", passed_over)]
    assert (found, passed_over) == listed_at_once(root)
    assert len(found) > 30
    assert len(passed_over) == 2


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "cat/deep").mkdir(parents=True)
    scan = os.scandir

    def fail(folder):
        if Path(folder).name == "deep":
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(UserError, match=r"--train_dir a: .*Permission denied.*cat/deep"):
        [*images_below(tmp_path, "--train_dir a", Counter())]
