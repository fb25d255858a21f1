"""Only shared/compat uses private interfaces of libraries; the command in CONTRIBUTING.md finds such uses."""

import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = re.search(r"^ *(grep .*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[1]


def lines(command):
    """The lines that the command prints."""
    done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.splitlines()


def test_private_interfaces_are_used_only_in_shared_compat():
    assert lines(COMMAND) == [], "move these uses into functions of shared/compat, with tests"


def test_the_command_finds_private_uses():
    everywhere = lines(COMMAND.replace("--exclude-dir=compat", ""))
    for module in ("of_torch", "of_torch_models", "of_accelerate", "of_transformers", "of_datasets"):
        assert any(line.startswith(f"shared/compat/{module}.py:") for line in everywhere), module
