"""Each feature of Accelerate that the recipes do not use still behaves as docs/from_accelerate.md says.

If a test here fails, upstream has probably fixed something. Then remove the row from the page; our replacement may no
longer be necessary.
"""

import re

import pytest
import runs
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from shared.compat.of_accelerate import reset_state

pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")
PAGE = (runs.ROOT / "docs/from_accelerate.md").read_text()


def linear(accelerator, micro_batches):
    """A model whose gradient is 1 for every micro-batch, its optimizer, and a loader of this many micro-batches."""
    model = torch.nn.Linear(1, 1, bias=False)
    return accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(torch.ones(micro_batches, 1), batch_size=1)
    )


def test_accumulate_divides_the_last_short_window_by_the_nominal_count():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = linear(accelerator, 10)
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert gradients == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(("batches", "pattern"), [(1, "0011111111"), (3, "0001000100")])
def test_a_break_in_an_evaluation_loop_loses_updates_of_accumulate(batches, pattern):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = linear(accelerator, 10)
    evaluation = accelerator.prepare(DataLoader(torch.ones(batches, 1), batch_size=1))
    synced = ""
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            synced += str(int(accelerator.sync_gradients))
            optimizer.step()
            optimizer.zero_grad()
        if index == 1:
            for _ in evaluation:
                break
    assert synced == pattern  # without the evaluation it is 0001000101


def rest_of_epoch(setup, tmp_path):
    """The samples of the rest of epoch 1, in an uninterrupted run and in one resumed after 3 batches."""

    def build():
        from accelerate.utils import DataLoaderConfiguration

        reset_state(processes=True)
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**setup))
        return accelerator, accelerator.prepare(DataLoader(range(64), batch_size=4, shuffle=True))

    accelerator, loader = build()
    seen = [[], []]
    for epoch in range(2):
        loader.set_epoch(epoch)
        for index, batch in enumerate(loader):
            seen[epoch].append(batch.tolist())
            if (epoch, index) == (1, 2):
                accelerator.save_state(tmp_path)
    accelerator, loader = build()
    accelerator.load_state(tmp_path)
    loader.set_epoch(1)
    resumed = loader if setup.get("use_stateful_dataloader") else accelerator.skip_first_batches(loader, 3)
    return seen[1][3:], [batch.tolist() for batch in resumed]


def test_skip_first_batches_does_not_replay_the_order_of_a_shuffled_loader(tmp_path):
    whole, resumed = rest_of_epoch({}, tmp_path)
    assert len(whole) == len(resumed) == 13
    assert not any(batch in whole for batch in resumed)


def test_a_stateful_loader_does_not_replay_the_order_either(tmp_path):
    whole, resumed = rest_of_epoch({"use_stateful_dataloader": True}, tmp_path)
    assert len(whole) == 13
    assert not any(batch in whole for batch in resumed)


def test_non_finite_gradients_reach_the_weights():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("nan"))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert model.weight.isnan().all()


def test_load_state_accepts_a_missing_random_state(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path)
    (tmp_path / "random_states_0.pkl").unlink()
    accelerator.load_state(tmp_path)


def test_fp16_on_a_cpu_is_float32_without_a_warning(recwarn):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert model(torch.ones(1, 1)).dtype == torch.float32
    with accelerator.autocast():
        assert (model.weight @ torch.ones(1, 1)).dtype == torch.float32
    assert not [w for w in recwarn if "fp16" in str(w.message)]


def two_processes(accelerator, folder):
    """On 2 processes: learning rates of a prepared schedule, samples from gather_for_metrics and a prepared loader."""
    from torch.optim.lr_scheduler import LambdaLR

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 8))
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    class Batches(torch.utils.data.Sampler):
        """Batches of any size, as a token budget makes them."""

        def __init__(self, batch_size=None):
            if batch_size:
                self.batch_size, self.drop_last = batch_size, False

        def __iter__(self):
            return iter([[0, 1, 2, 3], [4, 5], [6, 7, 8], [9, 10, 11, 12], [13]])

        def __len__(self):
            return 5

    counted = []
    for sampler in (Batches(), Batches(4)):
        seen = []
        for batch in accelerator.prepare(DataLoader(range(14), batch_sampler=sampler)):
            padded = accelerator.pad_across_processes(batch, pad_index=-1)
            seen += [sample for sample in accelerator.gather_for_metrics(padded).tolist() if sample >= 0]
        counted.append([len(seen), len(set(seen))])
    fed = [batch.numel() for batch in accelerator.prepare(DataLoader(range(9), batch_size=2))]
    total = accelerator.reduce(torch.tensor(sum(fed)))
    return {"rates": rates, "counted": counted, "fed": int(total)}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return runs.in_group(two_processes, 2, tmp_path_factory.mktemp("two"))[0]


def test_a_prepared_schedule_advances_once_per_process_in_each_step(on_two):
    assert on_two["rates"] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]


def test_gather_for_metrics_counts_samples_twice_or_not_at_all_when_batches_vary(on_two):
    assert on_two["counted"] == [[18, 14], [13, 13]]


def test_a_prepared_loader_feeds_samples_twice_to_make_batches_even(on_two):
    assert on_two["fed"] == 12  # of 9


@pytest.mark.docs  # it starts a launcher to test a fact about Accelerate, not about the recipes
def test_accelerate_launch_with_cpu_starts_one_process_instead_of_two(tmp_path):
    script = tmp_path / "count.py"
    script.write_text("import os\nprint('started', os.environ.get('WORLD_SIZE', '1'))\n")
    command = [runs.BIN / "accelerate", "launch", "--cpu", "--num_processes", 2, script]
    assert re.findall(r"started (\d)", runs.succeed(command)) == ["1"]


def test_the_page_names_every_test_of_this_file_and_no_others():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    tests = {name for name in globals() if name.startswith("test_")}
    assert tests - named == {"test_the_page_names_every_test_of_this_file_and_no_others"}
    assert named <= tests
