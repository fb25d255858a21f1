"""A process can start a second run with other settings."""

import os

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from shared.config.options import Options
from shared.errors import UserError
from shared.processes import agreement, ending, starting


@pytest.fixture(autouse=True)
def a_new_process_without_a_gpu(fresh_accelerate_state, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(starting, "_pids_with_runs", set())


def main(config):
    """Start a run as a recipe does; return its precision."""
    with starting.freed_after():
        return starting.start(config).mixed_precision


def test_each_run_of_a_process_has_its_own_precision_and_leaves_no_state(tmp_path):
    Accelerator(cpu=True, mixed_precision="bf16")  # of other code
    for given, expected in (("bf16", "bf16"), ("no", "no"), ("bf16", "bf16"), ("launcher", "no")):
        assert main(Options(output_dir=str(tmp_path / "run"), mixed_precision=given)) == expected
        assert not AcceleratorState._shared_state, "notebook_launcher would refuse to start"


def test_notebook_launcher_is_refused_after_a_run_in_the_same_process(monkeypatch, tmp_path):
    config = Options(output_dir=str(tmp_path / "run"))
    main(config)
    main(config)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(UserError, match=r"notebook_launcher must come first: .*restart the kernel"):
        main(config)


def test_with_a_folder_on_each_machine_the_processes_of_one_must_name_the_same(monkeypatch):
    def of(host, rank, output):
        monkeypatch.setattr(ending, "identity", lambda: {"host": host})
        facts = agreement.own_facts(Options(save_on_each_node=True, output_dir=output), "cpu")
        return {"host": host, "rank": rank, "facts": facts}

    agreement.refuse_differences([of("a", 0, "x"), of("a", 1, "x"), of("b", 2, "y")])
    with pytest.raises(
        UserError, match=r"^--output_dir on a is x on a \(rank 0\), y on a \(rank 1\): make it the same"
    ):
        agreement.refuse_differences([of("a", 0, "x"), of("a", 1, "y")])
