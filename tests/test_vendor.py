"""`python -m shared.vendor`: a copied recipe runs alone, with the files and packages that it needs and no others."""

import sys

import pytest
import runs

from shared import vendor
from shared.errors import UserError

PACKAGES = {"torch", "accelerate", "transformers", "sentencepiece", "pytorch-optimizer", "PyYAML", "wandb"}


def copied(tmp_path, *modules, recipe="recipes/nlp.py"):
    target = tmp_path / "new/copy"
    said = vendor.vendor(runs.ROOT / recipe, target, modules)
    return target, said, {line.partition("==")[0] for line in (target / "requirements.txt").read_text().splitlines()}


def test_a_copied_recipe_trains_without_this_project(texts, tmp_path):
    target, said, packages = copied(tmp_path)
    assert "of shared/ with" in said
    assert packages >= PACKAGES | {"scikit-learn", "scipy"}  # of metrics, which import them when they compute
    assert (target / "LICENSE").is_file()
    assert {path.name for path in (target / "shared/demo_data").glob("*.[mp]*")} >= {"embedded.md", "texts.parquet"}
    flags = [*texts, *runs.TINY, "--max_train_steps", 2, "--eval_steps", 2, "--output_dir", tmp_path / "run"]
    config = target / "accelerate_configs/cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "nlp.py", *flags]
    runs.succeed(launch, folder=target)
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_a_copy_has_no_more_than_the_recipe_imports(tmp_path):
    target, _, packages = copied(tmp_path, recipe="docs/examples/diabetes.py")
    rooms = {path.name for path in (target / "shared").iterdir() if path.is_dir()}
    assert "run" in rooms
    assert not rooms & {"text", "images", "predictions", "report"}
    assert not packages & {"evaluate", "onnx", "peft", "pillow", "pytorch-optimizer"}


def test_further_modules_are_copied_with_what_they_import(tmp_path):
    modules = ("shared.preflight", "shared.compare", "shared.report", "shared.export", "shared.vendor")
    target, _, packages = copied(tmp_path, *modules, recipe="docs/examples/diabetes.py")
    assert (target / "shared/preflight.py").is_file()
    assert (target / "shared/report/__main__.py").is_file()
    assert packages >= {"onnx", "onnxscript", "onnxruntime"}
    found = runs.run([sys.executable, "-m", "shared.compare"], target)
    assert "usage: python -m shared.compare" in found.stderr
    found = runs.run([sys.executable, "-m", "shared.vendor", "diabetes.py", "another"], target)
    assert (found.returncode, (target / "another").exists()) == (2, False)


def test_what_cannot_be_copied_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "new/copy").mkdir(parents=True)
    for recipe, modules, said in (
        ("none", (), "recipes/none.py: .*No such file"),
        ("nlp", ("shared.prdict",), "shared.prdict: No module named shared.prdict"),
        ("mlm", (), "new/copy: .*File exists"),
    ):
        with pytest.raises(UserError, match=said):
            copied(tmp_path, *modules, recipe=f"recipes/{recipe}.py")
    assert [*tmp_path.glob("**/*.py")] == []
