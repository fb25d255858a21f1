"""Several processes write a checkpoint together: the same bytes as one process writes, or no checkpoint."""

import json
import os
import resource
import signal
import threading

import pytest
import runs
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.checkpoints import digests, files, resuming, saving
from shared.checkpoints.buffers import Buffers
from shared.checkpoints.files import Channel
from shared.checkpoints.layout import Layout, divide, lay_out
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.checkpoints.writer import Job, partials_in, write
from shared.config.options import Options
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

MODEL, OPTIMIZER = "model.safetensors", "optimizer.bin"
PLAN = Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1)


@given(st.lists(st.integers(0, 9 * digests.PART), min_size=1, max_size=4), st.integers(1, 9))
def test_each_part_has_one_writer_and_the_leader_writes_what_depends_on_all_parts(sizes, processes):
    layouts = {str(i): Layout(size, [], [], []) for i, size in enumerate(sizes)}
    for layout in layouts.values():
        layout.records = [(0, 0, (0, max(layout.size - 100, 0)))]
    shares = divide(layouts, processes)
    written = sorted((name, part) for share in shares for name, parts in share.items() for part in parts)
    assert written == [(name, i) for name, layout in layouts.items() for i in range(len(digests.parts_of(layout.size)))]
    for name, layout in layouts.items():
        assert (layout.size - 1) // digests.PART in shares[0][name] or not layout.size
    lengths = [sum(map(len, share.values())) for share in shares]
    assert max(lengths[1:], default=0) <= -(-len(written) // processes)
    assert shares == divide(layouts, processes)


def connected(number):
    """Channels of the leader to others, and of the others to the leader."""
    pipes, addresses = files.offer(number)
    theirs = [Channel(files.accept(address)) for address in addresses]
    for _, *descriptors in addresses:
        for descriptor in descriptors:
            os.close(descriptor)
    return [Channel(pipe) for pipe in pipes], theirs


class Net(nn.Module):
    """Tied weights, a transposed and a half-precision parameter, an empty one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(301, 50)
        self.head = nn.Linear(50, 301)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(50, 50).T)
        self.sixteen_bits = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, ids):
        hidden = self.embedding(ids) @ self.transposed
        return self.head(hidden).sum() + self.sixteen_bits.float().sum() + self.empty.sum()


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_the_files_of_several_processes_are_those_of_one(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "PART", 4096 + 4)  # checksums cross the border of two parts
    torch.manual_seed(0)
    model = Net()
    optimizer = make_optimizer(model, Options(learning_rate=0.01))
    layouts = None
    for step in (1, 2):
        model(torch.arange(6)).backward()
        optimizer.step()
        states = {MODEL: model.state_dict()}, {OPTIMIZER: optimizer.state_dict()}
        layouts = layouts or lay_out(*states)
        for number in (1, processes):
            memory = [Buffers(layouts, share) for share in divide(layouts, number)]
            for each in memory:
                assert each.copy(each.values_of(states[0] | states[1])).wait()
            channels, others = connected(number - 1)
            threads = [
                threading.Thread(target=files.write_share, args=(each.images, other, number))
                for each, other in zip(memory[1:], others, strict=True)
            ]
            for thread in threads:
                thread.start()
            final = tmp_path / f"{number}/step_{step:08d}"
            final.parent.mkdir(exist_ok=True)
            write(Job(final, memory[0].images, {"state.json": b"{}"}), channels)
            for thread in threads:
                thread.join()
            for each in (*memory, *channels, *others):
                each.close()
        one, several = (tmp_path / f"{number}/step_{step:08d}" for number in (1, processes))
        for name in (MODEL, OPTIMIZER, "manifest.json"):
            assert (several / name).read_bytes() == (one / name).read_bytes()
        assert resuming.problem_with(several) is None
        loaded = torch.load(several / OPTIMIZER, weights_only=True)
        assert str(loaded) == str(optimizer.state_dict())


def test_nobody_waits_for_a_process_that_has_ended(tmp_path):
    (channel,), (other,) = connected(1)
    other.close()
    with pytest.raises(OSError, match=r"process 1 of those that write it has ended; 0\.0 MB are needed"):
        write(Job(tmp_path / "step_00000003", {}, {"state.json": b"{}"}), [channel])
    assert list(tmp_path.iterdir()) == []
    (channel,), (other,) = connected(1)
    with pytest.raises(OSError, match="No such file or directory"):
        write(Job(tmp_path / "lost/mount/step_00000003", {}, {}), [channel])
    assert files.write_share({}, other, 2) == "the leader could not begin"
    channel.close()
    with pytest.raises(EOFError):
        files.write_share({}, other, 2)


def stop(process):
    """Stop a process, and return when it stands still."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def trained(accelerator):
    """A model of more than one part, after a step that is the same on any number of processes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, make_optimizer(model, Options(learning_rate=0.01)))
    model(torch.randn(2, 1200)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def on_two(accelerator, folder):
    """Returns all that the tests look at, because starting the processes takes seconds."""
    rank, said = accelerator.process_index, {}
    trained(accelerator)
    saver = Saver(accelerator, Options(output_dir=str(folder), save_total_limit=None), PLAN)

    def save(step, during=lambda: None):
        saver.save(Progress(step=step), {})
        saver.copy.wait()
        saver.poll()  # tells the writer
        torch.distributed.barrier()
        during()
        saver._look(wait=True)
        torch.distributed.barrier()
        return saver.problem

    def killed_while_it_stands_still():
        saver.staging.writer.process.kill()

    said["saved"] = save(2)
    images = saver.staging.buffers.images
    said["parts"] = {name: image.parts for name, image in images.items()}
    said["memory"] = sum(512 * os.fstat(image.descriptor).st_blocks for image in images.values())
    for step, victim in ((4, 1), (8, 0)):
        if rank == victim:
            stop(saver.staging.writer.process)
        said[f"killed {victim}"] = save(step, killed_while_it_stands_still if rank == victim else lambda: None)
        said[f"after {victim}"] = save(step + 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # the disk is full for the other process only
        resource.prlimit(saver.staging.writer.process.pid, resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    said["full"] = save(12)
    said["left"] = sorted(path.name for path in (folder / "checkpoints").iterdir())

    def repair(_):
        resource.prlimit(saver.staging.writer.process.pid, resource.RLIMIT_FSIZE, before)

    sleep, saving.time.sleep = saving.time.sleep, repair
    saver.finish()
    saving.time.sleep = sleep
    said["complete"] = sorted(resuming.complete(folder))
    accelerator.free_memory()
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    return folder, runs.in_group(on_two, 2, folder)


@pytest.fixture
def alone():
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.free_memory()


def test_two_processes_write_the_files_of_one_and_one_resumes_from_them(saved, alone, tmp_path):
    folder, (first, second) = saved
    assert first["saved"] is None
    assert first["parts"] == {MODEL: [1], OPTIMIZER: [1, 2]}
    assert second["parts"] == {MODEL: [0], OPTIMIZER: [0]}
    model, _ = trained(alone)
    saver = Saver(alone, Options(output_dir=str(tmp_path)), PLAN)
    saver.save(Progress(step=2), {})
    saver.finish()
    mine, theirs = (resuming.path_of(each, 2) for each in (tmp_path, folder))
    for name in (MODEL, OPTIMIZER):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes()
    lines = [json.loads((each / "manifest.json").read_text()) for each in (mine, theirs)]
    assert [line[MODEL] for line in lines] == [lines[0][MODEL]] * 2
    assert [line[OPTIMIZER] for line in lines] == [lines[0][OPTIMIZER]] * 2
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    path, state = resuming.find(alone, Options(output_dir=str(folder)))
    assert state["step"] == 12
    resuming.load(alone, path)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    whole = sum((mine / name).stat().st_size for name in (MODEL, OPTIMIZER))
    for each in (first, second):
        assert each["memory"] < 0.8 * whole


def test_a_killed_writer_of_any_process_leaves_no_checkpoint_and_the_next_save_works(saved):
    folder, (first, _) = saved
    assert "(process 1 of those that write it has ended; " in first["killed 1"]
    assert "(the process that writes it ended with exit code -9)" in first["killed 0"]
    assert (first["after 1"], first["after 0"]) == (None, None)
    assert set(first["left"]) == {f"step_{step:08d}" for step in (2, 6, 10)}
    assert first["complete"] == [2, 6, 10, 12]
    assert partials_in(folder / "checkpoints") == []
    for step in first["complete"]:
        assert resuming.problem_with(resuming.path_of(folder, step)) is None


def test_a_disk_that_is_full_for_one_process_is_a_warning_and_the_last_save_insists(saved):
    first, second = saved[1]
    assert "File too large" in first["full"]
    assert "MB are needed, and in" in first["full"]
    assert second["full"] is None  # the leader tells it
    assert 12 in first["complete"]
