"""Processes that cannot connect get an error with the likely cause, within their own timeout."""

import contextlib
import re
import socket
import threading
from unittest import mock

import pytest
import runs
from torch.distributed import HashStore

from shared import preflight
from shared.checkpoints.progress import Progress
from shared.compat import of_torch
from shared.config.options import Options
from shared.errors import UserError
from shared.options.data_options import ExtraOptions
from shared.processes import agreement, ending
from shared.processes.agreement import Place
from shared.run.resume import refuse_changed_data


@pytest.fixture
def listener():
    """A socket that listens on a port and accepts no connection."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        yield server


def place(rank, port, processes=2, address="127.0.0.1"):
    return Place(rank, processes, address, port, serves=rank == 0)


# The causes of a failed connection


@pytest.mark.parametrize(
    ("rank", "address", "message"),
    [
        (1, "node-0.invalid", r"cannot connect to rank 0 at node-0\.invalid:\d+ \(Name or service not known\)"),
        (1, "127.0.0.1", r"cannot connect to rank 0 at 127.0.0.1:\d+ \(Connection refused\): start rank 0 there"),
        (1, "255.255.255.255", r"cannot connect to rank 0 at 255.255.255.255:\d+ \(Network is unreachable\)"),
        (0, "192.0.2.1", r"rank 0 cannot open its port on .*: \[Errno 99\] Cannot assign requested .*192.0.2.1"),
    ],
)
def test_an_address_that_cannot_work_is_named_with_the_cause(rank, address, message):
    with pytest.raises(UserError, match=message):
        preflight.find_rank_0(place(rank, runs.free_port(), address=address), 0.5)


def test_a_port_in_use_is_named(listener):
    port = listener.getsockname()[1]
    with pytest.raises(UserError, match=rf"cannot open its port on .* Address already in use .* {port}"):
        preflight.find_rank_0(place(0, port), 5)


def test_dropped_packets_time_out(listener):
    # Linux does not answer while its queue of unaccepted connections is full. A firewall can do the same.
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(listener.getsockname())
        with pytest.raises(UserError, match=r"at 127.0.0.1:\d+ \(timed out\): .* open the port"):
            preflight.find_rank_0(place(1, listener.getsockname()[1]), 0.5)


def test_another_server_at_the_port_is_recognized(listener):
    # It accepts a connection and closes it, like a server of another protocol.
    def serve():
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(UserError, match=r"what answers at \S+ is not rank 0 of this launch"):
        preflight.find_rank_0(place(1, listener.getsockname()[1]), 3)
    listener.shutdown(socket.SHUT_RDWR)


def test_missing_ranks_and_a_rank_of_two_processes_are_named():
    alone = place(0, runs.free_port(), processes=3)
    store = HashStore()
    with pytest.raises(UserError, match=r"of 3 processes, rank 1, 2 did not connect to .* within 0.5 s \(rank 0 did\)"):
        agreement.exchange(store, alone, {}, 0.5, "start")
    with pytest.raises(UserError, match=r"two processes have RANK 0, .*--machine_rank"):
        agreement.exchange(store, alone, {}, 0.2, "start")


def test_processes_that_reach_rank_0_but_cannot_form_a_group_get_the_likely_cause(monkeypatch):
    alone = place(0, runs.free_port(), processes=1)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_CPU": "true"}
    launched |= {"MASTER_ADDR": alone.address, "MASTER_PORT": str(alone.port)}
    for name, value in (launched | {"GLOO_SOCKET_IFNAME": "no-such-card"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"processes reach 127.*, but not each other; .*IFNAME.*no-such-card"):
        preflight.connect(Options(), alone, 5)


def test_the_time_limit_ends_a_call_that_hangs(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import time\nfrom shared.preflight import time_limit\nwith time_limit(0.2, 'stood still'): time.sleep(60)"
    )
    assert runs.run_forked(1, script, [], tmp_path) == ([2], "error: stood still\n")


# What must be the same on all machines


def in_a_launch(accelerator, folder):
    """The message of each case in which two processes differ in settings, code, versions or data; None if none."""
    rank, errors = accelerator.process_index, {}
    cases = {
        "nothing": ({}, {}),
        "workers": ({"dataloader_num_workers": 1}, {"dataloader_num_workers": 2}),
        "seed": ({"seed": 1}, {"seed": 2}),
        "logging": ({"logging_steps": 1}, {"report_to": "wandb", "dry_run": True}),
        "folders": ({"output_dir": "a"}, {"output_dir": "b"}),
        "own folders": [{"output_dir": each, "save_on_each_node": True} for each in "ab"],
        "precision": ({"mixed_precision": "bf16"}, {}),
        "code": ({}, {}),
    }
    code, versions = {"shared/new.py": "abc"} if rank else {}, {"torch": f"2.{rank}"}
    for name, settings in cases.items():
        me = ending.identity() | ({"host": f"machine-{rank}"} if name == "own folders" else {})
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(ending, "identity", lambda me=me: me)
            if name == "precision":
                changed.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if rank else "no")
            if name == "code":
                changed.setattr(agreement, "code_digests", lambda _: code)
                changed.setattr(agreement, "versions", lambda: versions)
            given = of_torch.default_store(), ExtraOptions(**settings[rank]), "cpu", 30
            errors[name] = runs.problem_of(agreement.compare_processes, *given)
    data = mock.MagicMock(digest=lambda: str(rank), __len__=lambda _: 1)
    errors["data"] = runs.problem_of(refuse_changed_data, accelerator, Progress(), data)
    return errors


def test_processes_of_one_launch_that_differ_are_refused_before_they_train(tmp_path):
    found = runs.in_group(in_a_launch, 2, tmp_path)
    assert found[0] == found[1], "not every process got the same messages"
    errors, host = found[0], socket.gethostname()
    for name in ("nothing", "workers", "own folders", "precision"):
        assert errors[name] is None, errors[name]
    assert errors["seed"] == f"--seed is 1 on {host} (rank 0), 2 on {host} (rank 1): make it the same on all processes"
    for part in ("--logging_steps is 1 on", "--report_to is none on", "--dry_run is False on"):
        assert part in errors["logging"]
    assert f"--output_dir is a on {host} (rank 0), b on" in errors["folders"]
    assert f"code shared/new.py is absent on {host} (rank 0), abc on {host} (rank 1)" in errors["code"]
    assert f"torch is 2.0 on {host} (rank 0), 2.1 on {host} (rank 1)" in errors["code"]
    assert errors["data"].startswith(f"rank 1 on {host} has other data than rank 0 on {host}: copy the files")


def test_the_compared_code_is_shared_and_the_recipe_unless_it_is_a_cell_of_a_notebook():
    found = agreement.code_digests(runs.load_recipe("nlp").Config())
    assert {"nlp.py", "shared/processes/starting.py", "shared/text/tokenized.py"} <= found.keys()
    assert not [name for name in agreement.code_digests(Options()) if not name.startswith("shared/")]
    cell = type("Config", (Options,), {"__module__": "a notebook"})
    assert agreement.code_digests(cell()) == agreement.code_digests(Options())


def test_a_recipe_that_is_no_file_or_another_file_is_refused():
    missing = runs.ROOT / "no.py"
    assert runs.refusal(preflight.check_machines, 1, missing, []).startswith(f"{missing} is not a file")
    for other in (runs.ROOT / "README.md", runs.ROOT / "shared/errors.py"):
        assert runs.refusal(preflight.check_machines, 1, other, []).startswith(f"{other} has no Config, so it is no ")


@pytest.mark.clusters
def test_processes_that_connect_print_their_setup_and_the_speed_of_communication(texts, tmp_path):
    flags = [*texts, "--global_batch_size", 12, "--output_dir", tmp_path / "run"]
    command = runs.torchrun(2, "-m", "shared.preflight", "recipes/nlp.py", *flags)
    said = runs.succeed(command, CUDA_VISIBLE_DEVICES="")
    for line in (
        r"processes +2, DDP over gloo",
        r"machines +1: \S+ \(ranks 0-1\)",
        r"precision +fp32",
        r"batch +global batch 12 = 2 processes x 1 micro-batch of ",
        r"tracker +none",
        rf"output +{tmp_path}/run, from the start",
        r"all-reduce +\d+ MiB in [\d.]+ ms, [\d.e-]+ GB/s in and out of each process",
        r"ready: 2 processes",
    ):
        assert len(re.findall(line, said)) == 1, said
    assert not list((tmp_path / "run").iterdir())
