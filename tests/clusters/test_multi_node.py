"""multi_node.yaml connects two machines, simulated by network namespaces.

`make test-clusters` runs this. It needs root and iproute2, which it installs with apt if possible.
"""

import re
import subprocess
import sys

import pytest
import runs

pytestmark = pytest.mark.clusters


def on_both(hosts, command, **common):
    """Run a command on both machines, with its number in place of NUMBER; return the outputs. It must succeed."""
    started = []
    try:
        for number, (name, _) in enumerate(hosts):
            environment = {"GLOO_SOCKET_IFNAME": f"host{number}", "RES_OPTIONS": "timeout:1 attempts:1"}
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            environment |= {name: value.replace("NUMBER", str(number)) for name, value in common.items()}
            words = [str(word).replace("NUMBER", str(number)) for word in command]
            started.append(runs.start(["ip", "netns", "exec", name, *words], **environment))
        printed = ["".join(one.communicate(timeout=240)) for one in started]
    finally:
        for one in started:
            runs.end(one)
    assert [one.returncode for one in started] == [0, 0], printed
    return printed


def test_machines_that_can_connect_are_ready(hosts):
    common = {"WORLD_SIZE": "2", "RANK": "NUMBER", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29512"}
    printed = on_both(hosts, [sys.executable, "-m", "shared.preflight", "--timeout", "20"], **common)
    assert "rendezvous  10.77.0.1:29512" in printed[0]
    assert "ready: 2 processes" in printed[0]


def multi_node(hosts, flags, output):
    """Run on both machines with multi_node.yaml; return their outputs."""
    launcher = [runs.BIN / "accelerate", "launch", "--config_file", runs.ROOT / "accelerate_configs/multi_node.yaml"]
    launcher += ["--num_processes", 2, "--machine_rank", "NUMBER", "--main_process_ip", hosts[0][1]]
    launcher += ["--mixed_precision", "no", "recipes/nlp.py", *flags, "--expect_processes", 2, "--output_dir", output]
    return on_both(hosts, launcher)


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
