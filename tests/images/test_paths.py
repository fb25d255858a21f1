"""The names of image files give their paths, in the order of the folders."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from shared.images.images import Images
from shared.images.sources import EXTENSIONS, images_below


@given(
    st.lists(st.text(st.sampled_from("aé\udcff./- "), min_size=1), max_size=9),
    st.sampled_from(["photos", "/", "/a/b", ".", "../c"]),
)
@settings(max_examples=20, deadline=None)
def test_any_names_give_the_paths_of_a_list(names, root):
    cells = pa.chunked_array([[os.fsencode(name) for name in names]], pa.binary())
    rows = np.arange(len(names))
    source = Images("photos", (), rows, rows, cells=cells, folder=Path(root))
    expected = [Path(root) / name for name in names]
    assert [source.stored(i) for i in rows] == expected
    assert [*source.files()] == [str(path.absolute()) for path in expected]


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
    below = [(path, path.relative_to(root).parts) for path in root.rglob("*")]
    hidden = [parts for _, parts in below if parts[-1][0] == "." and all(part[0] != "." for part in parts[:-1])]
    shown = [path for path, parts in below if all(part[0] != "." for part in parts)]
    files = [path for path in shown if path.is_symlink() or not path.is_dir()]
    assert found == sorted(path for path in files if path.suffix.lower() in EXTENSIONS and path.is_file())
    assert len(found) > 30
    assert passed_over == {"hidden": len(hidden), "of other kinds": len(files) - len(found)}
    linked = {*images_below(root, "FILE photos", Counter(), links=True)}
    assert {name.partition("/")[0] for name in linked if root / name not in found} == {"to_folder", "to_folder.png"}


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--train_dir a: .*No such file.*cat/deep"):
        [*images_below(tmp_path / "cat/deep", "--train_dir a", Counter())]
