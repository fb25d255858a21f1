"""`make demo` chooses the config and the size of a micro-batch by the number of GPUs."""

import subprocess

import pytest
import runs

from shared.config import options

CPU, ONE, MANY = (
    "accelerate_configs/cpu.yaml",
    "accelerate_configs/single_gpu.yaml",
    "accelerate_configs/multi_gpu.yaml",
)


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


@pytest.mark.parametrize(
    ("target", "recipe", "gpus", "config", "budget"),
    [
        ("demo", "nlp", 0, CPU, 1024),
        ("demo", "nlp", 1, ONE, 4096),
        ("demo", "nlp", 2, MANY, 4096),
        ("demo-mlm", "mlm", 0, CPU, 2048),
        ("demo-mlm", "mlm", 1, ONE, 8192),
        ("demo-tags", "token_classification", 0, CPU, 2048),
        ("demo-tags", "token_classification", 1, ONE, 4096),
        ("demo-embeddings", "embeddings", 0, CPU, 2048),
        ("demo-embeddings", "embeddings", 1, ONE, 16384),
        ("demo-images", "image_classification", 0, CPU, 32),
        ("demo-images", "image_classification", 1, ONE, 32),  # batch norm depends on it
    ],
)
def test_a_gpu_gets_larger_micro_batches_of_texts_than_a_cpu(make, target, recipe, gpus, config, budget):
    words = make(target, gpus)
    script = words.index(f"recipes/{recipe}.py")
    assert words[:script][:3] == ["launch", "--config_file", config]
    parsed = options.parse(runs.load_recipe(recipe).Config, words[script + 1 :])
    assert getattr(parsed, "max_tokens_per_micro_batch", parsed.per_device_train_batch_size) == budget
    if gpus:
        longest = {"nlp": 96, "mlm": 128, "token_classification": 128, "embeddings": 2 * 64}.get(recipe, 0)
        assert budget >= parsed.global_batch_size * longest, "a step has several micro-batches"


def test_several_gpus_get_a_process_each(make):
    words = make("demo", 2)
    assert words[3:5] == ["--num_processes", "2"]
    assert words[words.index("--expect_processes") + 1] == "2"
