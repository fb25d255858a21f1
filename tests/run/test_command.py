"""A recipe uses the folder shared/ that lies beside it, or beside its folder, and no other one."""

import os
import shutil
import sys

import pytest
import runs


@pytest.mark.parametrize("recipe", ["x.py", "recipes/x.py"])
def test_a_recipe_refuses_an_installed_shared_if_its_own_lies_beside_its_folder(tmp_path, recipe):
    """PYTHONPATH stands for an editable installation: both come after the folder of the recipe."""
    shutil.copytree(runs.ROOT / "shared", tmp_path / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / recipe
    script.parent.mkdir(exist_ok=True)
    shutil.copy(runs.ROOT / "docs/examples/diabetes.py", script)
    command = [sys.executable, script, "--dry_run", "--output_dir", tmp_path / "out"]
    installed = f"{runs.ROOT}{os.pathsep}{runs.packages_path()}"
    found = runs.run(command, tmp_path, PYTHONPATH=installed)
    if recipe == "recipes/x.py":
        assert found.returncode == 2, found.stderr
        assert f"would use {runs.ROOT / 'shared'}, which is installed in this environment" in found.stderr
        assert f"start it with PYTHONPATH={tmp_path}" in found.stderr
        assert "Traceback" not in found.stderr
        found = runs.run(command, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{installed}")
    assert found.returncode == 0, found.stderr
