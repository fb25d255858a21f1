"""The cluster scripts pass the expected number of processes to the recipe if they know it; ssh and SLURM are fakes."""

import os
import re

import pytest
import runs

ECHO = 'echo "$@"'


def path(folder, **commands):
    """A PATH with fake commands, by their scripts. Those of SLURM print their arguments, or a host name."""
    for name, script in ({"srun": ECHO, "scontrol": "echo node-0"} | commands).items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("processes", "words", "expected"),
    [
        ("2", ["recipes/nlp.py", "--seed", "1"], ["6"]),
        ("gpu", ["recipes/nlp.py", "--seed", "1"], []),  # only the machines can count their GPUs
        ("2", ["-m", "shared.preflight"], []),  # the preflight does not know flags of a recipe
    ],
)
def test_a_known_number_of_processes_is_passed_to_the_recipe(processes, words, expected, tmp_path):
    (tmp_path / "hosts.txt").write_text("a\nb\nc\n")
    ssh = ["bash", runs.ROOT / "clusters/ssh.sh", tmp_path / "hosts.txt", "--", *words]
    said = runs.succeed(ssh, PROCESSES=processes, SSH="echo")
    assert said.count("torchrun") == 3
    slurm = {"SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "node-[0-2]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}
    sbatch = ["bash", runs.ROOT / "clusters/slurm/train.sbatch", *words]
    job = runs.succeed(sbatch, folder=tmp_path, PATH=path(tmp_path), PROCESSES=processes, **slurm)
    for one in (*said.splitlines(), job):
        assert re.findall(r"--expect_processes\W+(\d+)", one) == (expected if "torchrun" in one else [])
    assert words[-1] in job


def test_a_line_of_the_hostfile_with_more_than_a_name_is_refused(tmp_path):
    (tmp_path / "hosts.txt").write_text("  a  # the first\n\nnode1 slots=8\n")
    ended = runs.run(["bash", runs.ROOT / "clusters/ssh.sh", tmp_path / "hosts.txt", "--", "x.py"], SSH="echo")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {tmp_path}/hosts.txt: 'node1 slots=8': write only the name of the machine")


def test_ssh_notices_a_lost_connection(tmp_path):
    (tmp_path / "hosts.txt").write_text(" a\t\n")
    fake = path(tmp_path, ssh=ECHO)
    said = runs.succeed(["bash", runs.ROOT / "clusters/ssh.sh", tmp_path / "hosts.txt", "--", "x.py"], PATH=fake)
    assert said.startswith("-o ServerAliveInterval=30 a bash -c ")


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("CANCELLED", False)])
def test_a_preempted_job_requeues_itself_unless_it_was_cancelled(state, requeued, tmp_path):
    fakes = {
        "srun": "mkdir -p out/job; touch out/job/PREEMPTED; exit 1",
        "scontrol": f'[ "$1" != show ] || echo "   JobState={state} Reason=None"; [ "$1" != requeue ] || echo again $2',
        "sleep": "",
    }
    slurm = {"SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    sbatch = ["bash", runs.ROOT / "clusters/slurm/train.sbatch", "recipes/nlp.py"]
    ended = runs.run(sbatch, folder=tmp_path, PATH=path(tmp_path, **fakes), **slurm)
    assert ended.returncode == 1
    assert ("again 7" in ended.stdout) == requeued
    assert ("was cancelled" in ended.stdout) != requeued
