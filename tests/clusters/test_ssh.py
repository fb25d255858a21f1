"""clusters/ssh.sh starts a launch on two machines (two sshd in network namespaces) and ends both together."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pausing
import psutil
import pytest
import runs

pytestmark = pytest.mark.clusters


@pytest.fixture
def machines(hosts, tmp_path):
    """(a clone, the command that starts ssh.sh for two machines on the first of them, its environment)."""
    pausing.require("sshd", "openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)  # the empty folder that sshd's unprivileged process needs
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    clone = runs.write_clone(tmp_path / "clone")
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
    passed_on = pausing.environment(tmp_path, pausing.PAUSE)
    environment = {"SSH": f"ssh -F {tmp_path}/ssh_config", "PROCESSES": "1", "EXPORT": " ".join(passed_on)} | passed_on
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


@pytest.fixture
def launch(machines, texts, tmp_path):
    """A launch on both machines, which have reached the pause; the flags of the recipe."""
    clone, command, environment = machines
    flags = [*pausing.FLAGS, *texts]
    process = runs.start([*command, pausing.RECIPE, *flags, "--output_dir", "run"], folder=clone, **environment)
    try:
        pausing.wait_for(lambda: pausing.paused(tmp_path), alive=lambda: process.poll() is None)
        yield process, flags
    finally:
        runs.end(process)


def test_machines_start_together_save_together_and_resume_to_the_weights_of_one_process(machines, launch, tmp_path):
    clone, command, environment = machines
    process, flags = launch
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, (out, err)
    assert (clone / "run/PREEMPTED").exists()
    assert not left(clone)

    runs.succeed([*command, "recipes/nlp.py", *flags, "--output_dir", "run"], folder=clone, **environment)
    runs.succeed([sys.executable, "recipes/nlp.py", *flags, "--output_dir", tmp_path / "one"], OMP_NUM_THREADS="1")
    assert runs.distance(runs.weights(clone / "run"), runs.weights(tmp_path / "one")) < 1e-5
    assert not (clone / "run/PREEMPTED").exists()


def test_a_failure_on_one_machine_ends_the_launch_on_all(machines, launch):
    clone, (process, _) = machines[0], launch
    worker = next(p for p in left(clone) if p.environ().get("RANK") == "1" and "paused_recipe" in str(p.cmdline()))
    worker.kill()
    _, err = process.communicate(timeout=180)
    assert process.returncode not in (0, 143)
    assert "ending all machines" in err
    assert not left(clone)
