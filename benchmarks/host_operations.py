"""Count the operators that the host calls in each micro-batch and step of a recipe, beside a bare loop.

    python benchmarks/host_operations.py --rounds 5 --output_dir out/host_operations

A small model on a large GPU trains as fast as the host calls its operators. The recipe is `main` with its default
options: recipes/nlp.py trains the two-layer ModernBERT of the demo, recipes/image_classification.py its small ResNet.
The bare loop is plain PyTorch on the same batches, with the same optimizer. Its model is as transformers makes it,
without the changes of shared/. Both loops augment images in the same way, because that is part of the work.

`operators` are those that Python or autograd calls, `all` includes those that operators call, `python` are calls of
Python functions and of functions written in C, and `runtime` are calls of the CUDA runtime. The recipe also reads and
collates its batches; the bare loop gets them collated. On a GPU, other processes do that by default. Calls between the
request for a batch and the request for the next one belong to the micro-batch.
All others belong to the step, with a reading of the monitor at every tenth step. CPU time is that of the whole process,
measured without the profiler. Flags that the benchmark does not have go to the recipe. Writes host_operations.json and
host_operations.md into the output folder.
"""

import copy
import gc
import os
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds
from benchmarks.harness.alternating_loops import LastStepDone
from benchmarks.harness.image_variants import probabilities
from benchmarks.harness.launching import flag_words

WORKS = {"nlp": "recipes.nlp", "images": "recipes.image_classification"}
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WARMUP = 3  # steps; the first one makes the state of the optimizer
MARK = "one micro-batch"
Counts = dict[str, float]


@dataclass
class Work:
    """What both loops train. A run of the recipe fills it in.

    Attributes:
        model: as transformers makes it, on the CPU.
        batches: by step, the micro-batches with their batches on the host.
        compute: (model, autocast, micro-batch, batch on the device) -> its share of the mean loss of the step.
    """

    config: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    batches: dict[int, list[tuple[Any, dict[str, Tensor]]]] = field(default_factory=dict)
    compute: Callable[[nn.Module, Any, Any, dict[str, Tensor]], Tensor] = field(default=lambda *_: torch.empty(0))


@dataclass(frozen=True)
class Case:
    """One comparison of the two loops: a key of `WORKS` and one of `PRECISIONS`; more flags for the recipe."""

    name: str
    precision: str
    flags: tuple[str, ...] = ()
    work: Work = field(default_factory=Work)


class Meter:
    """Counts, or times, the steps of a loop after the first `WARMUP`; then it ends the loop by `LastStepDone`.

    Args:
        steps: number of steps that are measured.
        count: count operators; otherwise measure the CPU time of each step.
    """

    def __init__(self, steps: int, count: bool) -> None:
        self.steps, self.count = steps, count
        self.step, self.micro_batches = -1, 0
        self.times: list[float] = []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.profiler: Any = profile(activities=activities) if count else None
        self.python: Counter[str] = Counter()  # calls by part
        self.part = "step"

    def begin_step(self) -> None:
        """Mark the beginning of a step, which is the end of the one before."""
        self.step += 1
        if self.step >= WARMUP:
            self.times.append(time.process_time())
        if self.profiler and self.step == WARMUP:
            self.profiler.__enter__()
            sys.setprofile(self._count_call)
        if self.step == WARMUP + self.steps:
            if self.profiler:
                sys.setprofile(None)
                self.profiler.__exit__(None, None, None)
            raise LastStepDone

    def _count_call(self, _: Any, event: str, __: Any) -> None:
        self.python[self.part] += event in ("call", "c_call")

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """What happens inside belongs to one micro-batch."""
        self.micro_batches += self.step >= WARMUP
        with record_function(MARK) if self.profiler else nullcontext():
            self.part = "micro_batch"
            yield
            self.part = "step"

    def counts(self) -> Counts:
        """Calls of each kind: per micro-batch, and per step outside of its micro-batches."""
        events = [event for event in self.profiler.events() if event.device_type == DeviceType.CPU]
        marks = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == MARK)
        starts, ends = [start for start, _ in marks], [end for _, end in marks]
        found: Counter[str] = Counter()
        for event in events:
            kinds = kinds_of(event)
            place = bisect_right(starts, event.time_range.start) - 1
            inside = place >= 0 and event.time_range.start < ends[place]
            found.update(f"{kind}_per_{'micro_batch' if inside else 'step'}" for kind in kinds)
        found.update({f"python_per_{part}": calls for part, calls in self.python.items()})
        kinds = ["operators", "all", "python"] + ["runtime"] * torch.cuda.is_available()
        parts = {"micro_batch": self.micro_batches, "step": self.steps}
        return {f"{kind}_per_{part}": found[f"{kind}_per_{part}"] / n for part, n in parts.items() for kind in kinds}

    def seconds(self) -> float:
        """CPU seconds of a step, the median over the steps."""
        return statistics.median(later - before for before, later in zip(self.times, self.times[1:], strict=False))


def kinds_of(event: Any) -> list[str]:
    """The counts to which an event of the profiler adds."""
    if event.name.startswith("cuda"):
        return ["runtime"]
    if not event.name.startswith("aten::"):
        return []
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return ["all"] if parent else ["operators", "all"]


def run_recipe(work: Work, recipe: ModuleType, flags: list[str], meter: Meter) -> None:
    """Train with the recipe until the meter ends it, and fill in `work`."""
    from shared.config import options
    from shared.plan.loading import Loader, current_batch

    build_model, load_data = recipe.build_model, recipe.load_data
    set_learning_rate, micro_batches = recipe.set_learning_rate, Loader.micro_batches

    def build_model_and_copy(*arguments: Any) -> nn.Module:
        model = build_model(*arguments)
        work.model = copy.deepcopy(model)
        return model

    def load_data_and_note(config: Any) -> Any:
        loaded = load_data(config)
        work.compute = loss_of(recipe, config, loaded)
        return loaded

    def begin_step(*arguments: Any) -> None:
        meter.begin_step()
        set_learning_rate(*arguments)

    def marked(loader: Loader, step: int) -> Iterator[Any]:
        stream, work.batches[step], last = micro_batches(loader, step), [], False
        while not last:
            with meter.micro_batch():
                micro_batch, batch = next(stream)
                work.batches[step].append((micro_batch, dict(current_batch.batch)))
                yield micro_batch, batch
            last = micro_batch.last
        next(stream, None)  # its end notes which step comes next

    work.config = options.parse(recipe.Config, flags)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Loader, "micro_batches", marked))
        for name, changed in (
            ("build_model", build_model_and_copy),
            ("load_data", load_data_and_note),
            ("set_learning_rate", begin_step),
        ):
            stack.enter_context(mock.patch.object(recipe, name, changed))
        try:
            recipe.main(work.config)
        except LastStepDone:
            return
    raise AssertionError("the recipe ended before its last step")


def loss_of(recipe: ModuleType, config: Any, loaded: Any) -> Callable[[nn.Module, Any, Any, dict[str, Tensor]], Tensor]:
    """`Work.compute` as a bare loop does it, from what `load_data` of the recipe returned."""

    def of_texts(model: nn.Module, autocast: Any, micro_batch: Any, batch: dict[str, Tensor]) -> Tensor:
        targets = batch.pop("labels")
        with autocast:
            return F.cross_entropy(model(**batch).logits, targets, reduction="sum") / micro_batch.normalizer

    def of_images(model: nn.Module, autocast: Any, micro_batch: Any, batch: dict[str, Tensor]) -> Tensor:
        train, _, augmentation = loaded
        images, targets = augmentation.training(micro_batch, batch)
        mixed = targets.others is not None
        target = probabilities(targets, len(train.source.names)) if mixed else targets.labels
        how = {"reduction": "sum", "label_smoothing": config.label_smoothing}
        with autocast:
            return F.cross_entropy(model(pixel_values=images).logits, target, **how) / micro_batch.normalizer

    return of_images if "image" in recipe.__name__ else of_texts


def run_bare_loop(work: Work, dtype: torch.dtype | None, meter: Meter) -> None:
    """Train with plain PyTorch on the batches of `work` until the meter ends it."""
    from shared.optimization.optimizers import make_optimizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = copy.deepcopy(work.model).to(device).train()
    optimizer = make_optimizer(model, work.config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    steps = [*work.batches.values()]
    try:
        for batches in [*steps, steps[0]]:
            meter.begin_step()
            for micro_batch, on_host in batches:
                with meter.micro_batch():
                    batch = {name: moved(tensor, device) for name, tensor in on_host.items()}
                    autocast = torch.autocast(device.type, dtype) if dtype else nullcontext()
                    scaler.scale(work.compute(model, autocast, micro_batch, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), work.config.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    except LastStepDone:
        return
    raise AssertionError("there are too few batches")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def measure(case: Case, ours: bool, folder: Path, steps: int, count: bool) -> Counts:
    """Run a loop in this process: its counts, or the CPU time of a step. The recipe has to run before the bare loop."""
    meter = Meter(steps, count)
    if ours:
        last = WARMUP + steps + 1  # which the meter does not let the loop reach
        flags = {"max_train_steps": last, "eval_steps": last, "checkpointing_steps": "no"}
        flags |= {"mixed_precision": case.precision, "output_dir": folder}
        run_recipe(case.work, import_module(WORKS[case.name]), [*case.flags, *flag_words(flags)], meter)
    else:
        run_bare_loop(case.work, PRECISIONS[case.precision], meter)
    gc.collect()
    return meter.counts() if count else {"cpu_ms_per_step": 1e3 * meter.seconds()}


def compare(rows: list[rounds.Row], cases: list[str]) -> dict[str, Any]:
    """The figures of the recipe divided by those of the bare loop."""
    figures = [key for key in rows[0] if rounds.is_figure(key, rows[0][key])]
    return {
        f"{case}: {figure}, ours / bare": rounds.compare(rows, figure, f"{case}: ours", f"{case}: bare")
        for case in cases
        for figure in figures
    }


def main() -> None:
    parser = rounds.parser(__doc__, "out/host_operations")
    parser.add_argument("--steps", type=int, default=20, help=f"steps of each loop, after {WARMUP} that are left out")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[*WORKS])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS][: 3 if on_gpu else 2])
    arguments, flags = parser.parse_known_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    torch.set_num_threads(1)
    cases = {f"{name}, {p}": Case(name, p, tuple(flags)) for name in arguments.works for p in arguments.precisions}
    counts: dict[str, Counts] = {}

    def run(contestant: str, round_: int) -> rounds.Row:
        name, _, loop = contestant.partition(": ")
        place = folder / f"{name.replace(', ', '-')}-{round_}"
        how = partial(measure, cases[name], loop == "ours", steps=arguments.steps)
        if contestant not in counts:
            counts[contestant] = how(place.with_suffix(".counted"), count=True)
        return counts[contestant] | how(place, count=False)

    rows = []
    for name in cases:  # the recipe comes first, because the bare loop takes its batches
        rows += rounds.take_turns([f"{name}: ours", f"{name}: bare"], arguments.rounds, run)
    rounds.save(arguments, "host_operations", 1, rows, compare(rows, [*cases]))


if __name__ == "__main__":
    main()
