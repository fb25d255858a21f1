"""A checkpoint is complete or absent, and a run that was killed and resumed equals an uninterrupted run."""

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from shared.checkpoints import folders, resuming, saving
from shared.checkpoints.folders import PARTIAL
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.disk import remove_unfinished
from shared.errors import UserError
from shared.plan.batches import Plan
from shared.processes import agreement

STEPS = 24  # of 12 samples; an epoch has 160, so the second one begins within step 13
FLAGS = [
    *(*runs.TINY, "--max_train_steps", STEPS, "--eval_steps", STEPS, "--logging_steps", 2),
    *("--checkpointing_steps", 3, "--save_total_limit", "None", "--ema_decay", 0.5),
]


def distance(run, other):
    """Relative distance of the exported weights."""
    return runs.distance(runs.weights_that_learn(run), runs.weights_that_learn(other))


@pytest.fixture(scope="module")
def outputs(texts, tmp_path_factory):
    """Folders of runs of one config, with dropout: an uninterrupted run on two processes, and resumed runs."""
    folder = tmp_path_factory.mktemp("killed")
    bert = runs.write_bert_with_dropout(folder / "bert", texts)
    flags = [*texts, *FLAGS, "--model_name_or_path", bert, "--learning_rate", 1e-3]
    context = runs.begin_many(2, {"resumed": flags}, folder)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "resumed-2/checkpoints/step_00000006/manifest.json").exists():
            assert all(process.is_alive() for process in context.processes), (folder / "output-2.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        runs.kill(context)
    assert not (folder / "resumed-2/model").exists(), "it had finished before it was killed"
    shutil.copytree(folder / "resumed-2", folder / "killed")
    shutil.copytree(folder / "resumed-2", folder / "shrunk-1")
    shutil.copytree(folder / "resumed-2", folder / "elastic-3")
    runs.train_until(15, "nlp", folder / "elastic-3", *flags)
    outputs = runs.run_many(2, dict.fromkeys(("resumed", "whole"), flags), folder)
    ninth = folder / "whole3-3/checkpoints/step_00000009"
    three = {"elastic": flags, "whole3": flags, "resumed3": [*flags, "--resume_from_checkpoint", ninth]}
    outputs |= runs.run_many(3, three, folder)
    return outputs | {"killed": folder / "killed", "shrunk": folder / "shrunk-1", "flags": flags}


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one_bit_by_bit(outputs):
    whole, resumed = (outputs[name] / "model/model.safetensors" for name in ("whole", "resumed"))
    assert resumed.read_bytes() == whole.read_bytes()


def test_a_resumed_run_on_three_processes_has_the_weights_of_an_uninterrupted_one_bit_by_bit(outputs):
    """With three or more processes, the order in which DDP sums gradients depends on its earlier steps."""
    whole, resumed = (outputs[name] / "model/model.safetensors" for name in ("whole3", "resumed3"))
    assert set(resuming.checkpoints_of(outputs["resumed3"])) == set(range(12, STEPS + 1, 3))
    assert resumed.read_bytes() == whole.read_bytes()


def test_a_run_on_two_then_one_then_three_processes_has_the_same_samples_and_weights_to_1e_5(outputs):
    worlds = [
        resuming.read_state(path)["world_size"]
        for _, path in sorted(resuming.checkpoints_of(outputs["elastic"]).items())
    ]
    assert sorted(set(worlds), key=worlds.index) == [2, 1, 3]
    assert distance(outputs["elastic"], outputs["whole"]) < 1e-5
    whole, elastic = (runs.training_lines(outputs[name]) for name in ("whole", "elastic"))
    for key in ("step", "samples", "learning_rate"):
        assert [line[key] for line in elastic] == [line[key] for line in whole]


def test_a_run_killed_at_several_steps_has_the_same_weights_bit_by_bit(outputs, tmp_path):
    """Kills in the first step of the run and of an epoch, with and without workers; no random state is kept."""
    flags = [*outputs["flags"], "--save_total_limit", 2]
    runs.train("nlp", tmp_path / "whole", *flags)
    often = [*flags, "--checkpointing_steps", 1, "--dataloader_num_workers"]
    for step, workers in ((1, 0), (5, 2), (14, 0), (15, 2)):
        runs.train_until(step, "nlp", tmp_path / "killed", *often, workers)
    runs.train("nlp", tmp_path / "killed", *often, 0)
    whole, killed = (tmp_path / name / "model/model.safetensors" for name in ("whole", "killed"))
    assert killed.read_bytes() == whole.read_bytes()
    assert set(resuming.checkpoints_of(tmp_path / "killed")) == {STEPS - 1, STEPS}


def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(outputs):
    whole, resumed = (runs.metrics(outputs[name]) for name in ("whole", "resumed"))
    assert [line["step"] for line in whole] == [*range(2, STEPS, 2), STEPS, STEPS, STEPS]
    for key in ("step", "samples", "learning_rate", "grad_norm", "skipped_updates", "eval_loss", "eval_accuracy"):
        assert [line.get(key) for line in resumed] == [line.get(key) for line in whole], key
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (resumed, whole)]
    newest = max(resuming.checkpoints_of(outputs["killed"]))
    across = newest // 2  # the mean over steps before and after the kill is summed in a different order
    assert losses[0][:across] == losses[1][:across]
    assert losses[0][across] == pytest.approx(losses[1][across], rel=1e-6)
    assert losses[0][across + 1 :] == losses[1][across + 1 :]


def test_a_run_resumed_on_fewer_processes_skips_a_damaged_checkpoint_and_has_the_same_weights_to_1e_5(outputs, capfd):
    newest = max(resuming.checkpoints_of(outputs["shrunk"]))
    runs.truncate(resuming.checkpoints_of(outputs["shrunk"])[newest] / "model.safetensors")
    runs.train("nlp", outputs["shrunk"], *outputs["flags"])
    said = capfd.readouterr()
    assert f"step_{newest:08d} is skipped: model.safetensors is damaged" in said.err
    assert f"resumed from step_{newest - 3:08d}" in said.out
    assert distance(outputs["shrunk"], outputs["whole"]) < 1e-5
    samples = [[line["samples"] for line in runs.training_lines(outputs[name])] for name in ("shrunk", "whole")]
    assert samples[0] == samples[1]


def test_a_checkpoint_has_the_state_of_the_run_and_a_manifest_of_all_files(outputs):
    folder = resuming.checkpoints_of(outputs["whole"])[6]
    state = json.loads((folder / "state.json").read_text())
    assert [state[name] for name in ("step", "epoch", "world_size", "threads", "seed")] == [6, 0, 2, 1, 0]
    assert set(state["versions"]) == {"python", *agreement.PACKAGES}
    assert state["config"]["global_batch_size"] == 12
    assert {"run_id", "best_step", "results", "seconds", "monitor"} < set(state)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert set(manifest) == files - {"manifest.json"}
    assert {"model.safetensors", "optimizer.safetensors", "registered_0.safetensors", "state.json"} < files
    assert manifest == folders.lines_of({name: folder / name for name in manifest})


# With a tiny model, in this process


@pytest.fixture
def model(accelerator):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]


def config(output_dir, **values):
    return Options(output_dir=str(output_dir), **values)


PLAN = Plan(num_samples=10, seed=0, global_batch_size=2, num_epochs=4)


def save_all(accelerator, config, steps, **progress):
    saver = Saver(accelerator, config, PLAN)
    for step in steps:
        saver.save(Progress(step=step, **progress), {})
    saver.finish()


def find(output_dir, resume_from="auto"):
    """The checkpoint that a single process would resume from, and its state."""
    alone = SimpleNamespace(num_processes=1, is_main_process=True, is_local_main_process=True)
    return resuming.find(alone, config(output_dir, resume_from_checkpoint=str(resume_from)))


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A folder with the checkpoints of steps 3 and 6."""
    folder, accelerator = tmp_path_factory.mktemp("two"), Accelerator(cpu=True)
    accelerator.prepare(model := nn.Linear(3, 2), torch.optim.AdamW(model.parameters()))
    save_all(accelerator, config(folder), (3, 6))
    accelerator.free_memory()
    return folder


FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@pytest.mark.parametrize(
    ("damage", "file", "says"),
    [
        *((runs.truncate, file, f"{file} is damaged") for file in FILES),
        *((runs.flip_a_bit, file, f"{file} is damaged") for file in FILES),
        *((Path.unlink, file, "it cannot be read .*No such file") for file in FILES),
        (runs.truncate, "manifest.json", "it cannot be read"),
        (runs.flip_a_bit, "manifest.json", ""),
    ],
)
def test_a_damaged_newest_checkpoint_is_skipped_with_the_reason(two_saved, tmp_path, capsys, damage, file, says):
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints/step_00000006" / file)
    path, state = find(tmp_path)
    assert (path.name, state["step"]) == ("step_00000003", 3)
    said = capsys.readouterr().err
    assert re.match(f"checkpoint {tmp_path}/checkpoints/step_00000006 is skipped: {says}", said)
    with pytest.raises(UserError, match=f"--resume_from_checkpoint .*step_00000006: {says}.*use auto"):
        find(tmp_path, tmp_path / "checkpoints/step_00000006")


def test_an_incomplete_checkpoint_does_not_count_and_is_removed(accelerator, model, tmp_path):
    save_all(accelerator, config(tmp_path), (3, 6))
    (tmp_path / "checkpoints/step_00000006/manifest.json").unlink()
    left = tmp_path / "checkpoints/step_00000009.partial-0123abcd"
    shutil.copytree(tmp_path / "checkpoints/step_00000003", left)
    assert set(resuming.checkpoints_of(tmp_path)) == {3}
    save_all(accelerator, config(tmp_path), (6, 9))  # incomplete checkpoints do not prevent it
    assert set(resuming.checkpoints_of(tmp_path)) == {3, 6, 9}
    remove_unfinished(tmp_path / "checkpoints", PARTIAL)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"step_{step:08d}" for step in (3, 6, 9)}


def test_an_empty_folder_has_no_checkpoint_and_never_is_allowed_there(tmp_path):
    assert find(tmp_path) is None
    assert find(tmp_path, "never") is None


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
@pytest.mark.parametrize("flag", ["never", "PATH"])
def test_a_restart_resumes_from_the_newest_whatever_the_flag_is(two_saved, tmp_path, monkeypatch, name, flag):
    third = two_saved / "checkpoints/step_00000003"
    given = str(third) if flag == "PATH" else flag
    monkeypatch.setenv(name, "0")
    if flag == "PATH":
        assert find(two_saved, given)[0] == third
    monkeypatch.setenv(name, "1")
    path, state = find(two_saved, given)
    assert (path.name, state["step"]) == ("step_00000006", 6)
    # Killed before its first checkpoint: the flag still counts.
    first = find(tmp_path, given)
    assert first is None if flag == "never" else first[0] == third


@pytest.mark.parametrize("kind", ["a link", "a link that leads nowhere", "a file"])
def test_a_link_or_file_in_the_place_of_a_checkpoint_is_reported_and_stays(
    accelerator, model, tmp_path, monkeypatch, kind
):
    theirs, place = tmp_path / "theirs", tmp_path / "checkpoints/step_00000003"
    theirs.mkdir()
    (theirs / "manifest.json").write_text("{}")
    place.parent.mkdir()
    if kind == "a file":
        place.write_text("mine")
    else:
        place.symlink_to(theirs if kind == "a link" else "nowhere")
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    before = place.lstat()
    with pytest.raises(UserError, match=rf"cannot save {place} \(\[Errno 20\] .*: remove the file"):
        save_all(accelerator, config(tmp_path), (3,))
    assert (theirs / "manifest.json").exists()
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    after = place.lstat()  # the time of access changes where a link is followed
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)


def test_the_best_model_is_loaded_at_the_end_only_if_the_config_asks_for_it(accelerator, model, tmp_path):
    best = [p.clone() for p in model.parameters()]
    asked = config(tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=1)
    save_all(accelerator, asked, (3,), best_step=3)
    with torch.no_grad():
        model.weight += 1
    save_all(accelerator, asked, (6, 9), best_step=3)
    assert set(resuming.checkpoints_of(tmp_path)) == {3, 9}
    last = [p.clone() for p in model.parameters()]
    Saver(accelerator, config(tmp_path), PLAN).load_best(Progress(step=9, best_step=3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last, strict=True))
    Saver(accelerator, asked, PLAN).load_best(Progress(step=9, best_step=9))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last, strict=True))
    Saver(accelerator, asked, PLAN).load_best(Progress(step=9, best_step=3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), best, strict=True))


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"checkpointing_steps": "3"}, [3, 6, 9, 10]),
        ({"checkpointing_steps": "epoch"}, [5, 10]),
        ({"checkpointing_steps": "no"}, []),
        ({"checkpointing_steps": "no", "load_best_model_at_end": True, "metric_for_best_model": "loss"}, [7]),
    ],
)
def test_a_checkpoint_is_due_at_the_configured_steps(tmp_path, values, steps):
    plan = Plan(num_samples=50, seed=0, global_batch_size=10, num_epochs=2)
    saver = SimpleNamespace(config=config(tmp_path, **values), plan=plan)
    assert [step for step in range(1, 11) if Saver.is_due(saver, Progress(step, best_step=7))] == steps


def test_a_checkpoint_that_becomes_shorter_while_it_is_read_is_refused_with_one_line(accelerator, model, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    runs.truncate(file)
    with pytest.raises(UserError, match=r"cannot be loaded into this model \(.*\): it was saved by other code"):
        Saver(accelerator, config(tmp_path), PLAN).load(tmp_path)


def test_a_damaged_best_checkpoint_is_not_exported(accelerator, model, two_saved, tmp_path, capsys, monkeypatch):
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    path = resuming.path_of(tmp_path, 3)
    runs.truncate(path / "state.json")
    progress = Progress(step=6, best_step=3)
    monkeypatch.setattr(Saver, "load", None)  # it must not be called
    asked = config(tmp_path, load_best_model_at_end=True, metric_for_best_model="loss")
    Saver(accelerator, asked, PLAN).load_best(progress)
    assert capsys.readouterr().out == (
        f"warning: {path}, with the best model, cannot be read (state.json is damaged): model/ has the last one\n"
    )
    assert progress.best_step == 6
