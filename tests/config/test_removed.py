"""A config.yaml with settings that were removed: the run resumes if they had their default."""

from pathlib import Path

import pytest
import runs

from shared.config import options
from shared.config.options import Options
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.run import resume

OLDER = {"fused_qkv": False, "image_decoder": "pillow", "attention": None, "fixed_shapes": False}


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
            resume.refuse_another_run(stored | changed, config, Path("out"))


def test_a_setting_that_never_existed_is_a_difference(recipe):
    config = recipe.Config()
    assert options.differences(options.plain(config) | {"unheard_of": 1}, config) == {"unheard_of": (1, None)}


def test_the_file_of_an_older_version_is_read_and_can_be_given_as_config(recipe, tmp_path):
    config, file = recipe.Config(seed=3), tmp_path / "config.yaml"
    options.save(config, file)
    older = file.read_text() + "fused_qkv: false\nimage_decoder: pillow\nattention: null\nfixed_shapes: false\n"
    file.write_text(older)
    assert options.parse(recipe.Config, ["--config", str(file)]) == config
    file.write_text(older.replace("fused_qkv: false", "fused_qkv: true"))
    with pytest.raises(
        UserError, match=r"config.yaml: fused_qkv is not a setting: this setting was removed: leave it out"
    ):
        options.parse(recipe.Config, ["--config", str(file)])


def test_the_file_of_an_own_recipe_that_had_the_settings_of_data_and_extras_is_read(tmp_path):
    file = tmp_path / "config.yaml"
    options.save(DataOptions(seed=3), file)
    config = options.parse(Options, ["--config", str(file)])
    assert config == Options(seed=3)
    assert options.differences(options.load(file), config) == {}
    options.save(DataOptions(report_to=("wandb",)), file)
    with pytest.raises(UserError, match=r"config.yaml: report_to is not a setting"):
        options.parse(Options, ["--config", str(file)])
