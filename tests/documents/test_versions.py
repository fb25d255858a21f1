"""pyproject.toml is the one source of versions: pip, uv and the images install what it pins."""

import json
import re
import subprocess
import sys
import tomllib

import runs

PROJECT = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_every_requirement_is_pinned_and_pip_reads_the_same_list():
    for requirement in [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]:
        assert re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+|accelerate-recipes\[export(,s3)?\]", requirement)
    files = {path.stem: path.read_text().splitlines()[-1] for path in runs.ROOT.glob("requirements*.txt")}
    assert files == {"requirements": "-e ."} | {f"requirements-{extra}": f"-e .[{extra}]" for extra in EXTRAS}


def test_the_lock_of_uv_is_up_to_date(tmp_path):
    """Without a network and a cache: a lock that pyproject.toml does not fit would need both."""
    check = [sys.executable, "-m", "uv", "lock", "--check", "--offline", "--cache-dir", tmp_path]
    found = subprocess.run(check, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"run uv lock\n{found.stderr}"


def test_the_images_have_the_versions_of_the_project():
    dockerfile = (runs.ROOT / "Dockerfile").read_text()
    devcontainer = json.loads((runs.ROOT / ".devcontainer/devcontainer.json").read_text())
    pythons = {re.search(r":3\.(\d+)-", image)[1] for image in (dockerfile, devcontainer["image"])}
    least, below = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    assert all(least <= int(minor) < below for minor in pythons)
    assert set(re.findall(r"pip install .*?(\S+==\S+)", dockerfile)) <= {*EXTRAS["dev"]}
    assert "torch" not in " ".join(re.findall("^(?:FROM|RUN) .*", dockerfile, re.MULTILINE)), "uv.lock has torch"
    assert len(re.findall("uv sync --frozen", dockerfile)) == 2


def test_the_dockerfile_passes_a_linter_and_copies_only_existing_files():
    dockerfile = runs.ROOT / "Dockerfile"
    done = subprocess.run([runs.BIN / "hadolint", dockerfile], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in re.findall(r"^COPY (.+)$", dockerfile.read_text(), re.MULTILINE):
        assert all((runs.ROOT / source).exists() for source in line.split()[:-1]), line
