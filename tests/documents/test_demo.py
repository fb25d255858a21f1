"""`make demo` chooses the config by the number of GPUs."""

import pytest
import runs

from shared.config import options


@pytest.mark.parametrize("gpus", [0, 1, 2])
@pytest.mark.parametrize(
    ("target", "recipe"),
    [
        ("demo", "nlp"),
        ("demo-mlm", "mlm"),
        ("demo-tags", "token_classification"),
        ("demo-embeddings", "embeddings"),
        ("demo-images", "image_classification"),
    ],
)
def test_a_demo_starts_its_recipe_with_the_config_for_the_gpus(tmp_path, target, recipe, gpus):
    """The programs only print, so the output is the words of the launch."""
    for name, answer in (("python", f'[ "$1" != -c ] || echo {gpus}'), ("accelerate", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    done = runs.run(["make", "--silent", "--old-file=setup", target, f"BIN={tmp_path}"])
    words = done.stdout.split()
    script = words.index(f"recipes/{recipe}.py")
    fitting = ("cpu", "single_gpu", "multi_gpu")[gpus]
    assert words[:3] == ["launch", "--config_file", f"accelerate_configs/{fitting}.yaml"]
    assert words[3:script] == ["--num_processes", "2"] * (gpus == 2)
    config = options.parse(runs.load_recipe(recipe).Config, words[script + 1 :])
    assert config.expect_processes == (2 if gpus == 2 else None)
