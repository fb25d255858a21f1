"""Fixtures of the tests that call the recipes for texts."""

import shutil

import pytest
import runs


@pytest.fixture(scope="module")
def nlp():
    return runs.load_recipe("nlp")


@pytest.fixture(scope="module")
def mlm():
    return runs.load_recipe("mlm")


@pytest.fixture
def train(nlp, texts):
    """A function that trains on the small data set, with further flags."""
    return lambda output, *flags: runs.train(nlp, output, *runs.TINY, *texts, *flags)


@pytest.fixture(scope="module")
def models(alone, tmp_path_factory):
    """A folder with a working text classifier, damaged copies of it, and folders that hold other things."""
    from transformers import AutoTokenizer, ResNetConfig

    folder = tmp_path_factory.mktemp("models")
    (folder / "empty").mkdir()
    ResNetConfig().save_pretrained(folder / "images")
    for name in ("good", "cut off", "other tokenizer"):
        shutil.copytree(alone / "model", folder / name)
    with (folder / "cut off/model.safetensors").open("r+b") as file:
        file.truncate(5000)
    tokenizer = AutoTokenizer.from_pretrained(alone / "model")
    tokenizer.add_tokens(["another", "vocabulary"])
    tokenizer.save_pretrained(folder / "other tokenizer")
    return folder
