"""A config.yaml with settings that were removed: the run resumes if they had their default."""

from pathlib import Path

import pytest
import runs

from shared.config import options
from shared.errors import UserError
from shared.run import same_run

OLDER = {"fused_qkv": False, "image_decoder": "pillow"}


@pytest.fixture
def recipe():
    return runs.load_recipe("image_classification")


def test_a_checkpoint_of_an_older_version_resumes_unless_it_used_a_removed_setting(recipe):
    config = recipe.Config()
    stored = options.plain(config) | OLDER
    assert options.differences(stored, config) == {}
    for changed in ({"fused_qkv": True}, {"image_decoder": "torchcodec"}):
        ((name, value),) = changed.items()
        with pytest.raises(
            UserError, match=f"out belongs to a run with --{name} {value}, a setting that was removed: "
        ):
            same_run.refuse_another_run(stored | changed, config, Path("out"))


def test_a_setting_that_never_existed_is_a_difference(recipe):
    config = recipe.Config()
    assert options.differences(options.plain(config) | {"unheard_of": 1}, config) == {"unheard_of": (1, None)}


def test_the_file_of_an_older_version_is_read_and_can_be_given_as_config(recipe, tmp_path):
    config, file = recipe.Config(seed=3), tmp_path / "config.yaml"
    options.save(config, file)
    older = file.read_text() + "fused_qkv: false\nimage_decoder: pillow\n"
    file.write_text(older)
    assert options.load(file) == options.plain(config)
    assert options.parse(recipe.Config, ["--config", str(file)]) == config
    file.write_text(older.replace("fused_qkv: false", "fused_qkv: true"))
    with pytest.raises(
        UserError, match=r"config.yaml: fused_qkv is not a setting: this setting was removed: leave it out"
    ):
        options.parse(recipe.Config, ["--config", str(file)])
