"""The cluster scripts pass the expected number of processes to the recipe if they know it; ssh and SLURM are fakes."""

import os
import re

import pytest
import runs

ECHO = '#!/bin/bash\necho "$@"\n'


@pytest.fixture
def path(tmp_path):
    """A PATH with fake commands of SLURM: srun prints its arguments, and scontrol prints a host name."""
    for name, script in {"srun": ECHO, "scontrol": "#!/bin/bash\necho node-0\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("processes", "words", "expected"),
    [
        ("2", ["recipes/nlp.py", "--seed", "1"], ["6"]),
        ("gpu", ["recipes/nlp.py", "--seed", "1"], []),  # only the machines can count their GPUs
        ("2", ["-m", "shared.preflight"], []),  # the preflight does not know flags of a recipe
    ],
)
def test_a_known_number_of_processes_is_passed_to_the_recipe(processes, words, expected, path, tmp_path):
    (tmp_path / "hosts.txt").write_text("a\nb\nc\n")
    ssh = ["bash", runs.ROOT / "clusters/ssh.sh", tmp_path / "hosts.txt", "--", *words]
    said = runs.succeed(ssh, PROCESSES=processes, SSH="echo")
    assert said.count("torchrun") == 3
    slurm = {"SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "node-[0-2]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}
    sbatch = ["bash", runs.ROOT / "clusters/slurm/train.sbatch", *words]
    job = runs.succeed(sbatch, folder=tmp_path, PATH=path, PROCESSES=processes, **slurm)
    for one in (*said.splitlines(), job):
        assert re.findall(r"--expect_processes\W+(\d+)", one) == (expected if "torchrun" in one else [])
    assert words[-1] in job
