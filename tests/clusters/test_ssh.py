"""clusters/ssh.sh starts a launch on two machines (two sshd in network namespaces) and ends both together.

`make test-clusters` runs this. It needs root, iproute2 and openssh-server, which it installs with apt if possible.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import runs

pytestmark = pytest.mark.clusters
STEPS, PAUSE = 16, 8
FLAGS = [*runs.TINY, "--max_train_steps", STEPS, "--eval_steps", STEPS, "--checkpointing_steps", "no"]
PASSED_ON = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
PASSED_ON |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # there is no name server in the namespace


@pytest.fixture
def machines(hosts, tmp_path):
    """(a clone, the command that starts ssh.sh for two machines on the first of them, its environment)."""
    if not shutil.which("sshd"):
        subprocess.run("apt-get update -qq && apt-get install -qq -y openssh-server", shell=True, check=False)
    if not shutil.which("sshd"):
        pytest.skip("no sshd, and apt cannot install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)  # the empty folder that sshd's unprivileged process needs
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("clusters", "recipes", "shared", "tests"):
        (clone / name).symlink_to(runs.ROOT / name)
    (clone / ".venv").symlink_to(runs.BIN.parent)
    (tmp_path / "ssh_config").write_text(
        f"IdentityFile {tmp_path}/key\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    (tmp_path / "hosts.txt").write_text("".join(f"{address}  # {name}\n" for name, address in hosts))
    servers = []
    for number, (name, address) in enumerate(hosts):
        settings = [f"ListenAddress {address}", f"HostKey {tmp_path}/host_key", f"PidFile {tmp_path}/sshd{number}.pid"]
        settings += [f"AuthorizedKeysFile {tmp_path}/key.pub", "StrictModes no", "UsePAM no", "PermitRootLogin yes"]
        settings += [f"SetEnv GLOO_SOCKET_IFNAME=host{number}"]
        (tmp_path / f"sshd{number}.conf").write_text("\n".join(settings) + "\n")
        command = ["ip", "netns", "exec", name, shutil.which("sshd"), "-D", "-e", "-f", tmp_path / f"sshd{number}.conf"]
        with (tmp_path / f"sshd{number}.log").open("w") as log:
            servers.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
    environment = PASSED_ON | {"SSH": f"ssh -F {tmp_path}/ssh_config", "PROCESSES": "1", "PAUSE_FOLDER": str(tmp_path)}
    environment |= {"PAUSES": str(PAUSE), "EXPORT": " ".join([*PASSED_ON, "PAUSE_FOLDER", "PAUSES"])}
    command = ["ip", "netns", "exec", hosts[0][0], "clusters/ssh.sh", tmp_path / "hosts.txt", "--"]
    try:
        yield clone, command, environment
    finally:
        for server in servers:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(server.pid).children(recursive=True):
                    process.kill()
            server.kill()
            server.wait()
        for process in left(clone):
            process.kill()


def left(clone):
    """The processes whose working directory is the clone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(clone) and process.pid != os.getpid():
                found.append(process)
    return found


def wait_for_pause(launch, folder):
    notes, deadline = folder / "starts.jsonl", time.monotonic() + 240
    while not (notes.exists() and notes.read_text().count(f'"step": {PAUSE}') == 2):
        assert launch.poll() is None, launch.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_machines_start_together_save_together_and_resume_to_the_weights_of_one_process(machines, texts, tmp_path):
    clone, command, environment = machines
    flags = [*FLAGS, *texts]
    launch = runs.start(
        [*command, "tests/clusters/paused_recipe.py", *flags, "--output_dir", "run"], folder=clone, **environment
    )
    try:
        wait_for_pause(launch, tmp_path)
        launch.send_signal(signal.SIGTERM)
        out, err = launch.communicate(timeout=120)
        assert launch.returncode == 143, (out, err)
    finally:
        runs.end(launch)
    assert (clone / "run/PREEMPTED").exists()
    assert not left(clone)

    runs.succeed([*command, "recipes/nlp.py", *flags, "--output_dir", "run"], folder=clone, **environment)
    runs.succeed([sys.executable, "recipes/nlp.py", *flags, "--output_dir", tmp_path / "one"], OMP_NUM_THREADS="1")
    assert runs.distance(runs.weights(clone / "run"), runs.weights(tmp_path / "one")) < 1e-5
    assert not (clone / "run/PREEMPTED").exists()


def test_a_failure_on_one_machine_ends_the_launch_on_all(machines, texts, tmp_path):
    clone, command, environment = machines
    launch = runs.start(
        [*command, "tests/clusters/paused_recipe.py", *FLAGS, *texts, "--output_dir", "run"],
        folder=clone,
        **environment,
    )
    try:
        wait_for_pause(launch, tmp_path)
        worker = next(p for p in left(clone) if p.environ().get("RANK") == "1" and "paused_recipe" in str(p.cmdline()))
        worker.kill()
        _, err = launch.communicate(timeout=180)
        assert launch.returncode not in (0, 143)
        assert "ending all machines" in err
    finally:
        runs.end(launch)
    assert not left(clone)
