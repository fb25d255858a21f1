"""`make demo` chooses the config by the number of GPUs."""

import subprocess

import pytest
import runs

from shared.config import options


@pytest.fixture
def make(tmp_path):
    """Run a target of the Makefile with programs that only print: the words of the launch."""

    def call(target, gpus):
        for name, answer in (("python", f'[ "$1" != -c ] || echo {gpus}'), ("accelerate", 'echo "$@"')):
            (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
            (tmp_path / name).chmod(0o755)
        said = subprocess.run(
            ["make", "--silent", "--old-file=setup", target, f"BIN={tmp_path}"],
            cwd=runs.ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return said.stdout.split()

    return call


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
def test_a_demo_starts_its_recipe_with_the_config_for_the_gpus(make, target, recipe, gpus):
    words = make(target, gpus)
    script = words.index(f"recipes/{recipe}.py")
    fitting = ("cpu", "single_gpu", "multi_gpu")[gpus]
    assert words[:3] == ["launch", "--config_file", f"accelerate_configs/{fitting}.yaml"]
    options.parse(runs.load_recipe(recipe).Config, words[script + 1 :])


def test_several_gpus_get_a_process_each(make):
    words = make("demo", 2)
    assert words[3:5] == ["--num_processes", "2"]
    assert words[words.index("--expect_processes") + 1] == "2"
