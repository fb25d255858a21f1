"""multi_node.yaml connects two machines, simulated by network namespaces; errors name the cause of a failed connection.

`make test-clusters` runs this. It needs root, iproute2 and nftables, which it installs with apt if possible.
"""

import re
import shutil
import subprocess
import sys

import pytest
import runs

pytestmark = pytest.mark.clusters


def on_both(hosts, command, changes=({}, {})):
    """Run a command on both machines, with `changes` to the environment of each; return the outputs and exit codes."""
    started = []
    try:
        for number, (name, _) in enumerate(hosts):
            environment = {"GLOO_SOCKET_IFNAME": f"host{number}", "RES_OPTIONS": "timeout:1 attempts:1"}
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | changes[number]
            words = [str(word).replace("NUMBER", str(number)) for word in command]
            started.append(runs.start(["ip", "netns", "exec", name, *words], **environment))
        printed = ["".join(one.communicate(timeout=240)) for one in started]
    finally:
        for one in started:
            runs.end(one)
    return printed, [one.returncode for one in started]


def preflight(hosts, first, second):
    """Run the preflight on both machines, as ranks 0 and 1, with MASTER_ADDR `first` and `second`."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29512"}
    changes = [common | {"RANK": str(rank), "MASTER_ADDR": one} for rank, one in enumerate((first, second))]
    return on_both(hosts, [sys.executable, "-m", "shared.preflight", "--timeout", "20"], changes)


def test_machines_that_can_connect_are_ready(hosts):
    printed, codes = preflight(hosts, "10.77.0.1", "10.77.0.1")
    assert codes == [0, 0], printed
    assert "rendezvous  10.77.0.1:29512" in printed[0]
    assert "ready: 2 processes" in printed[0]


def test_an_address_that_no_machine_has_is_an_error_on_both(hosts):
    printed, codes = preflight(hosts, "10.77.0.9", "10.77.0.9")
    assert codes == [2, 2], printed
    assert "Cannot assign requested address" in printed[0]
    assert "cannot connect to rank 0 at 10.77.0.9:29512 (No route to host)" in printed[1]


def test_a_firewall_between_the_machines_is_an_error_on_both(hosts):
    if not shutil.which("nft"):
        subprocess.run("apt-get update -qq && apt-get install -qq -y nftables", shell=True, check=False)
    rules = "add table inet t; add chain inet t c { type filter hook input priority 0; }; "
    rules += "add rule inet t c iifname host0 tcp dport 29512 drop"
    nft = ["ip", "netns", "exec", hosts[0][0], "nft"]
    if not shutil.which("nft") or subprocess.run([*nft, rules], check=False, capture_output=True).returncode:
        pytest.skip("this kernel, or apt, has no nftables")
    try:
        printed, codes = preflight(hosts, "10.77.0.1", "10.77.0.1")
    finally:
        subprocess.run([*nft, "delete table inet t"], check=True)
    assert codes == [2, 2], printed
    assert "rank 1 did not connect to 10.77.0.1:29512" in printed[0]
    assert "cannot connect to rank 0 at 10.77.0.1:29512 (timed out)" in printed[1]


def multi_node(hosts, flags, output):
    """Run on both machines with multi_node.yaml; return their outputs."""
    launcher = [runs.BIN / "accelerate", "launch", "--config_file", runs.ROOT / "accelerate_configs/multi_node.yaml"]
    launcher += ["--num_processes", 2, "--machine_rank", "NUMBER", "--main_process_ip", hosts[0][1]]
    launcher += ["--mixed_precision", "no", "recipes/nlp.py", *flags, "--expect_processes", 2, "--output_dir", output]
    printed, codes = on_both(hosts, launcher)
    assert codes == [0, 0], printed
    return printed


@pytest.fixture(scope="module")
def flags_and_one(texts, tmp_path_factory):
    """The flags of a run with gradients of 2 MB, and the weights of that run on one process."""
    flags = [*runs.TINY, *texts, "--hidden_size", "256", "--logging_steps", "1"]
    output = tmp_path_factory.mktemp("one") / "run"
    runs.succeed([sys.executable, "recipes/nlp.py", *flags, "--output_dir", output], OMP_NUM_THREADS="1")
    return flags, runs.weights(output)


def test_multi_node_yaml_gives_the_run_of_one_process(hosts, flags_and_one, tmp_path):
    flags, one = flags_and_one
    multi_node(hosts, flags, tmp_path / "run")
    assert runs.distance(runs.weights(tmp_path / "run"), one) < 1e-5


@pytest.fixture
def shape(hosts):
    """A function that limits both ends of the cable with tc. It skips the test if the kernel cannot do that."""

    def shape(*discipline):
        for number, (name, _) in enumerate(hosts):
            tc = ["tc", "-n", name, "qdisc", "replace", "dev", f"host{number}", "root", *discipline]
            done = subprocess.run(tc, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{' '.join(tc)}: {done.stderr.strip()}")

    yield shape
    for number, (name, _) in enumerate(hosts):
        tc = ["tc", "-n", name, "qdisc", "del", "dev", f"host{number}", "root"]
        subprocess.run(tc, capture_output=True, check=False)


@pytest.mark.parametrize("megabits", [1000, 100])
def test_a_limited_link_changes_the_time_and_not_the_run(megabits, hosts, shape, flags_and_one, tmp_path):
    flags, one = flags_and_one
    shape("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")
    printed = multi_node(hosts, flags, tmp_path / "run")
    assert runs.distance(runs.weights(tmp_path / "run"), one) < 1e-5
    assert re.search(r"where .* went: .*\d+ % communication", printed[0])
    on_the_wire = one.numel() * 4 * 8 / 1e6 / megabits  # the seconds in which each process sends all gradients once
    for line in runs.training_lines(tmp_path / "run"):
        assert line["step_seconds"] > 0.8 * on_the_wire  # the token bucket lets 256 kB pass without delay
        assert line["communication"] > 0


def test_a_link_with_delay_changes_the_time_and_not_the_run(hosts, shape, flags_and_one, tmp_path):
    flags, one = flags_and_one
    shape("netem", "delay", "20ms")
    multi_node(hosts, flags, tmp_path / "run")
    assert runs.distance(runs.weights(tmp_path / "run"), one) < 1e-5
    lines = runs.training_lines(tmp_path / "run")
    assert all(line["step_seconds"] > 0.04 for line in lines)  # at least one round trip
