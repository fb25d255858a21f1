"""The paths of image files are memory-mapped bytes; they give the same paths as a list."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from shared.datasets.prepared import mapped_file
from shared.images import paths as paths_module
from shared.images.paths import Paths


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))


def test_paths_are_those_of_the_list_they_were_made_from():
    names = [["cat/a.png", "cat/é.jpg"], [], ["/elsewhere/b.png", os.fsdecode(b"dog/\xff.png")]]
    paths = Paths.of(Path("photos"), names)
    expected = [Path("photos") / name for group in names for name in group]
    assert list(paths) == expected
    assert (paths[-1], paths[1:3]) == (expected[-1], expected[1:3])
    with pytest.raises(IndexError):
        paths[4]
    assert mapped_file(paths.names) is not None
    again = pickle.loads(pickle.dumps(paths))
    assert list(again) == expected
    assert mapped_file(again.ends) == mapped_file(paths.ends)


@pytest.mark.parametrize(
    "names", [["a/b/c.png", "a/b/d.png"], ["a/b/c.png", "a/d/e.png", "a/b.png"], ["/x/a.png", "y/b.png"]]
)
def test_the_common_folder_is_found_in_blocks(monkeypatch, names):
    monkeypatch.setattr(paths_module, "AT_ONCE", 1)
    paths = Paths.of(Path("here"), [names])
    expected = os.path.commonpath([path.absolute().parent for path in paths])
    assert paths.common_folder() == expected
    assert [*paths.absolute(np.array([1]))] == [str((Path("here") / names[1]).absolute())]
