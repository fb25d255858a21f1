"""A job of clusters/slurm/train.sbatch reaches its time limit, on a real SLURM with two nodes on this machine."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time

import pausing
import psutil
import pytest
import runs
from pausing import wait_for

pytestmark = pytest.mark.clusters
THREADS = 2  # set, so that a node with one process uses as many as a machine with two
CONFIG = """
ClusterName=recipes
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
KillWait=5
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={node0} CPUs=1 State=UNKNOWN
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP
"""
MUNGE = ("socket", "key", "pid", "log", "seed")


def output_of(*command, **environment):
    """The output of a short command, which must succeed."""
    env = os.environ | environment
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def slurm(tmp_path):
    """The environment in which sbatch finds a controller and two nodes, which run until the end of the test."""
    pausing.require("slurmctld", "slurm-wlm munge")
    folder = tmp_path / "slurm"
    for name in ("state", "spool-node0", "spool-node1"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    ports = {name: runs.free_port() for name in ("controller", "node0", "node1")}
    (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), folder=folder, **ports))
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{kind}{'-file' * (kind != 'socket')}={folder}/munge.{kind}" for kind in MUNGE]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "node0"],
        ["slurmd", "-D", "-N", "node1"],
    ]
    try:
        for command in daemons:
            with (folder / f"{command[0]}{command[-1]}.out".replace("/", "-")[-40:]).open("w") as out:
                subprocess.Popen(
                    command, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True, cwd=folder
                )
            time.sleep(1)
        state = ("sinfo", "-h", "-o", "%D %t")
        wait_for(lambda: output_of(*state, **environment).split() == ["2", "idle"], folder / "slurmctld.log")
        yield environment
    finally:
        end_all(environment["SLURM_CONF"], folder)


def end_all(configuration, folder):
    """Kill each process that was started with this configuration or key, whatever its parent is."""
    for _ in range(3):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("SLURM_CONF") == configuration
                if (ours and process.pid != os.getpid()) or any(str(folder) in word for word in process.cmdline()):
                    process.send_signal(signal.SIGKILL)
        time.sleep(0.3)


def test_a_job_that_reaches_its_time_limit_is_requeued_and_ends_with_the_same_weights(slurm, texts, tmp_path):
    clone, flags = runs.write_clone(tmp_path / "clone"), [*pausing.FLAGS, *texts]
    # The job pauses before step 8 until it gets a signal. The time limit is lowered when it has reached the pause.
    environment = slurm | {"PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "PATH": f"{runs.BIN}:{os.environ['PATH']}"}
    environment |= pausing.environment(tmp_path, pausing.PAUSE, threads=THREADS) | {"PYTHONPATH": ""}
    job = output_of(
        *("sbatch", "--parsable", "--chdir", clone, "--job-name", "limited", "--nodes", "2", "--cpus-per-task", "1"),
        *("--time", "60", "clusters/slurm/train.sbatch", pausing.RECIPE, *flags),
        **environment,
    ).strip()
    log = clone / "limited.log"
    wait_for(lambda: pausing.paused(tmp_path), log)
    hours, minutes, _ = field(job, "RunTime", slurm).split(":")
    output_of("scontrol", "update", f"JobId={job}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}", **slurm)
    wait_for(lambda: field(job, "JobState", slurm) == "PENDING", log)
    # By default SLURM waits two minutes before a requeued job starts, because a node refuses a step that starts in the
    # second in which the one before ended ("Job credential revoked": the job is FAILED). Two seconds are enough.
    time.sleep(2)
    output_of("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60", **slurm)
    under_way = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    state = wait_for(lambda: (found := field(job, "JobState", slurm)) not in under_way and found, log)
    assert state == "COMPLETED", log.read_text()[-5000:]
    assert field(job, "Restarts", slurm) == "1"
    text = log.read_text()
    assert f"job {job} requeues itself" in text
    assert len({line["step"] for line in runs.training_lines(clone / "out/limited")}) == pausing.STEPS // 2
    assert not (clone / "out/limited/PREEMPTED").exists()

    command = runs.torchrun(2, "recipes/nlp.py", *flags, "--expect_processes", 2, "--output_dir", tmp_path / "whole")
    runs.succeed(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS=str(THREADS))
    assert (runs.weights(clone / "out/limited") == runs.weights(tmp_path / "whole")).all()


def field(job, name, environment):
    """A field of `scontrol show job`."""
    shown = output_of("scontrol", "show", "job", job, **environment)
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))
