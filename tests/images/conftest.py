"""Fixtures of the image tests."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
