"""All ways to start a recipe give the same run, and every run ends cleanly."""

import os
import re
import signal

import psutil
import pytest
import runs

pytestmark = pytest.mark.usefixtures("launched_by_nobody")


def printed_processes(printed):
    """The processes on the launch card, which only one process prints."""
    (found,) = re.findall(r"^ *processes +(.*)$", printed, re.M)
    return found


def check(output, printed, alone):
    """Check that two processes made the run in `output`, that it has all files, and that it equals the run `alone`."""
    assert printed_processes(printed) == "2, DDP over gloo"
    left = {path.name for path in output.iterdir()}
    assert left == {*runs.FILES, "curves.png", "mistakes.json"}
    assert len(runs.training_lines(output)) == 4
    for line, other in zip(runs.metrics(output), runs.metrics(alone), strict=True):
        for name in ("loss", "eval_loss"):
            assert line.get(name) == pytest.approx(other.get(name), abs=1e-4)
        for name in ("step", "learning_rate", "samples"):
            assert line.get(name) == other.get(name)


LAUNCHES = {
    "torchrun": lambda: runs.torchrun(2, "recipes/nlp.py"),
    "multi_cpu": lambda: runs.accelerate_launch("multi_cpu", "recipes/nlp.py"),
    "multi_gpu": lambda: runs.accelerate_launch("multi_gpu", "recipes/nlp.py", flags=["--mixed_precision", "no"]),
}
LAUNCHERS = [pytest.param(name, marks=pytest.mark.clusters) for name in ("torchrun", "multi_cpu")]


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "multi_gpu"])
def test_two_launched_processes_give_the_same_run_as_one_and_exit_with_0(launcher, texts, alone, tmp_path):
    flags = [*runs.TINY, *texts, "--expect_processes", 2, "--output_dir", tmp_path / "run"]
    (tmp_path / "tmp").mkdir()
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    printed = runs.succeed([*LAUNCHES[launcher](), *flags], **environment)
    check(tmp_path / "run", printed, alone)
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert not [name for name in left if not name.startswith("torch")]  # torchrun has a folder of logs, torch of caches


def test_a_dry_run_without_a_launcher_is_one_process_and_writes_no_file(texts, tmp_path):
    flags = [*runs.TINY, *texts, "--expect_processes", 1, "--output_dir", tmp_path / "run", "--dry_run"]
    codes, printed = runs.run_forked(1, "recipes/nlp.py", flags, tmp_path)
    assert codes == [0], printed
    assert printed_processes(printed) == "1"
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.campaign
def test_a_hundred_runs_of_two_processes_exit_with_0(texts, tmp_path):
    flags = [*runs.TINY, *texts, "--max_train_steps", 2, "--checkpointing_steps", "no"]
    for number in range(100):
        command = [*runs.torchrun(2, "recipes/nlp.py"), *flags, "--output_dir", tmp_path / str(number)]
        runs.succeed(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


@pytest.mark.clusters
def test_ctrl_c_saves_a_checkpoint_and_leaves_no_process_behind(texts, tmp_path):
    flags = [*runs.TINY, *texts, "--max_train_steps", 1_000_000, "--dataloader_num_workers", 1]
    command = [*runs.torchrun(2, "recipes/nlp.py"), *flags, "--output_dir", tmp_path]
    launcher = runs.start(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    started = []
    try:
        runs.wait_for_steps(launcher, tmp_path, 1)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) >= 4  # two training processes and a loader worker of each
        os.killpg(launcher.pid, signal.SIGINT)
        _, alive = psutil.wait_procs([psutil.Process(launcher.pid), *started], timeout=15)
        assert not alive
        out, err = launcher.communicate()
        assert str(runs.ROOT / "recipes") not in err  # no traceback from our files
        (step,) = re.findall(r"interrupted at step (\d+): checkpoint saved, start again to resume", out + err)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"config.yaml", "launch_card.txt", "metrics.jsonl", "checkpoints", "PREEMPTED"}
        assert (tmp_path / f"checkpoints/step_{int(step):08d}/manifest.json").is_file()
    finally:
        for process in started:
            if process.is_running():
                process.kill()
        runs.end(launcher)


REFUSALS = {
    "before the group exists": (["--nonsense", "3"], "unknown flag --nonsense"),
    "on every process": (["--train_file", "nowhere.csv"], "nowhere.csv"),
    "of the number of processes": (["--global_batch_size", "1"], "--global_batch_size 1"),
    "on the main process": (["--seed", "3"], "--seed was 0, is 3"),
}


@pytest.mark.parametrize("found", REFUSALS)
def test_a_refusal_is_printed_once_ends_every_process_with_2_and_changes_no_file(found, texts, alone, tmp_path):
    output = alone if found == "on the main process" else tmp_path / "run"
    before = runs.files(alone)
    flags, message = REFUSALS[found]
    flags = [*runs.TINY, *texts, *flags, "--output_dir", output]
    codes, printed = runs.run_forked(2, "recipes/nlp.py", flags, tmp_path, timeout=60)
    assert codes == [2, 2], printed
    assert printed.count(message) == 1, printed
    assert printed.count("error: ") == 1
    assert "Traceback" not in printed
    assert runs.files(alone) == before
