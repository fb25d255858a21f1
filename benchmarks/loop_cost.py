"""Measure what the loop of recipes/nlp.py adds to a step: beside a bare loop, Accelerate, Fabric and Trainer.

    python benchmarks/loop_cost.py --rounds 5 --output_dir out/loop_cost

The model is Linear(8, 2), in one process of one thread, so that almost all the time is the loop's. The contestant
"ours" is `main` of recipes/nlp.py with all its default options; only its model and its data are replaced. The others
read the same rows with the same collate function through a DataLoader and make the same update: gradients clipped at 1,
fused AdamW with one group with weight decay and one without, and a linear schedule. A hook at the end of each optimizer
step takes the times of all of them. The figure is the median over blocks of 50 steps of the mean in a block, so that it
includes what a loop does at every tenth step only. Writes loop_cost.json and loop_cost.md into the output folder.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, rounds

BLOCK, WARMUP, ROWS, LENGTH = 50, 200, 32, 8
OTHERS = ("bare", "accelerate", "fabric", "trainer")


class LastStepDone(Exception):
    """Raised from the optimizer's hook after the last step; it ends any loop."""


def tiny_data(folder: Path, steps: int) -> Any:
    """Rows of eight random tokens: more than the steps need, so that no epoch ends."""
    import numpy as np

    from shared.text.tokenized import TokenizedText

    rows, random = ROWS * (steps + 10), np.random.default_rng(0)
    np.save(folder / "tokens.npy", random.integers(5, 100, rows * LENGTH).astype(np.uint16))
    np.save(folder / "offsets.npy", np.arange(rows + 1) * LENGTH)
    np.save(folder / "lengths.npy", np.full(rows, LENGTH, np.int32))
    return TokenizedText(folder, random.integers(0, 2, rows))


def tiny_model() -> Any:
    """Linear(8, 2) over the token ids; with labels it returns a loss, as models of transformers do."""
    import torch
    from torch.nn import functional as F
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = torch.nn.Linear(LENGTH, 2)

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            logits = self.classifier(input_ids.float())
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    return Tiny()


def ours(data: Any, steps: int, folder: Path) -> None:
    """The recipe with its default options, except for the lengths of rows and run."""
    from recipes import nlp
    from shared.config import options
    from shared.datasets.labels import Labels

    labels = Labels("classification", ("label",), ("a", "b"), ("a", "b"))
    tokenizer = SimpleNamespace(pad_token_id=0)
    nlp.load_data = lambda config: (data, data, labels, tokenizer)
    nlp.build_model = lambda *_: tiny_model()
    words = ["--max_length", str(LENGTH), "--max_train_steps", str(steps + 10), "--output_dir", str(folder / "run")]
    nlp.main(options.parse(nlp.Config, words))


def pieces(data: Any) -> tuple[Any, Any, Any, Any]:
    """The model, optimizer, loader and schedule of the other loops."""
    import torch

    from shared.optimization.optimizers import parameter_groups
    from shared.text.tokenized import Padding

    model = tiny_model()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-3, fused=True)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS, shuffle=True, collate_fn=Padding(0))
    return model, optimizer, loader, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(loader))


def bare(data: Any, steps: int, folder: Path) -> None:
    """Plain PyTorch."""
    import torch

    model, optimizer, loader, schedule = pieces(data)
    for batch in loader:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def accelerate(data: Any, steps: int, folder: Path) -> None:
    """The loop of Accelerate's quick tour."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, schedule = accelerator.prepare(*pieces(data))
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def fabric(data: Any, steps: int, folder: Path) -> None:
    """The loop of Lightning Fabric's documentation."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader, schedule = pieces(data)
    model, optimizer = fabric.setup(model, optimizer)
    for batch in fabric.setup_dataloaders(loader):
        fabric.backward(model(**batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def trainer(data: Any, steps: int, folder: Path) -> None:
    """transformers' Trainer; it clips at 1 and logs every 500 steps by default."""
    from transformers import Trainer, TrainingArguments

    from shared.text.tokenized import Padding

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=tiny_model(), args=arguments, train_dataset=data, data_collator=Padding(0)).train()


LOOPS = {"ours": ours, "bare": bare, "accelerate": accelerate, "fabric": fabric, "trainer": trainer}


def measure(contestant: str, steps: int, folder: Path) -> dict[str, float]:
    """Run a loop in this process: µs per step of wall time and of this thread's CPU time, medians of blocks."""
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    data = tiny_data(folder, steps)
    marks: list[tuple[float, float]] = []

    def mark(*_: Any) -> None:
        marks.append((time.perf_counter(), time.thread_time()))
        if len(marks) == steps + 1:
            raise LastStepDone

    handle = register_optimizer_step_post_hook(mark)
    try:
        LOOPS[contestant](data, steps, folder)
    except LastStepDone:
        wall, cpu = np.median(np.diff(marks[WARMUP::BLOCK], axis=0), axis=0) / BLOCK * 1e6
        return {"wall_us": wall, "thread_us": cpu}
    finally:
        handle.remove()
    raise AssertionError("the loop ended before its last step")


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        contestant, steps, folder = sys.argv[2:]
        result = measure(contestant, int(steps), Path(folder))
        Path(folder, "result.json").write_text(json.dumps(result))
        os._exit(0)
    parser = rounds.parser(__doc__, "out/loop_cost")
    parser.add_argument(
        "--steps", type=int, default=3000, help=f"steps of each launch; the first {WARMUP} are left out"
    )
    parser.add_argument("--contestants", nargs="+", choices=OTHERS, default=OTHERS)
    arguments = parser.parse_args()
    folder = rounds.make_runs_folder(arguments.output_dir)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.environ["ACCELERATE_USE_CPU"] = "true"

    def run(name: str, round_: int) -> dict[str, float]:
        place = folder / f"{name}-{round_}"
        place.mkdir()
        launching.run(place / "log", sys.executable, __file__, "--measure", name, arguments.steps, place)
        return json.loads((place / "result.json").read_text())

    rows = rounds.take_turns(["ours", *arguments.contestants], arguments.rounds, run)
    names = ["ours", *(name for name in arguments.contestants if name != "bare")]
    found = {
        f"{name} - bare, {figure}": rounds.compare(rows, figure, name, "bare", difference=True)
        for figure in ("thread_us", "wall_us")
        for name in names
        if "bare" in arguments.contestants
    }
    rounds.save(arguments, "loop_cost", 1, rows, found, unit="µs per step")


if __name__ == "__main__":
    main()
