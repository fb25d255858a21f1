"""What the recipe's loop costs per optimizer step beside a bare one, where the model costs next to nothing.

    python benchmarks/loop_cost.py --rounds 5 --output_dir out/loop_cost

The model is Linear(8, 2), in one process of one thread: what is left is the loop. The contestant "ours" is `main` of
recipes/nlp.py as it is, with all its default options; only its model and its data are replaced. The others read the
same rows with the same collate function through a DataLoader, and make the same update: gradients clipped at 1, fused
AdamW with a group that decays and one that does not, a linear schedule. Steps are told apart by one hook that runs at
the end of each optimizer step, for all. The figure is a mean over blocks of 50 steps, so that what happens at every
tenth step is in it, and the median of the blocks. Leaves loop_cost.json and loop_cost.md in the output folder.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

BLOCK, WARMUP, ROWS, LENGTH = 50, 200, 32, 8
OTHERS = ("bare", "bare_unclipped", "accelerate", "accelerate_accumulate", "fabric", "trainer")


class Enough(Exception):
    """All steps are measured: raised out of the last one, whatever loop it is in."""


def tiny_data(folder: Path, steps: int) -> Any:
    """Rows of eight random tokens, more of them than are needed, so that no epoch ends."""
    import numpy as np

    from shared.text.tokenized import TokenizedText

    rows, random = ROWS * (steps + 10), np.random.default_rng(0)
    np.save(folder / "input_ids.npy", random.integers(5, 100, rows * LENGTH).astype(np.uint16))
    np.save(folder / "offsets.npy", np.arange(rows + 1) * LENGTH)
    return TokenizedText(folder, random.integers(0, 2, rows))


def tiny_model() -> Any:
    """Linear(8, 2) over the token ids; with labels it gives a loss, as models of transformers do."""
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
    """The recipe, as it is started without flags, but for its length."""
    from recipes import nlp
    from shared.config import options
    from shared.datasets.labels import Labels

    labels = Labels("classification", "label", ("a", "b"), ("a", "b"))
    tokenizer = SimpleNamespace(pad_token_id=0)
    nlp.load_data = lambda config: (data, data, labels, tokenizer)
    nlp.build_model = lambda *_: tiny_model()
    words = ["--max_length", str(LENGTH), "--max_train_steps", str(steps + 10), "--output_dir", str(folder / "run")]
    nlp.main(options.parse(nlp.Config, words))


def pieces(data: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and schedule of a hand-written loop."""
    import torch

    from shared.optimization.optimizers import parameter_groups
    from shared.text.tokenized import Padding

    model = tiny_model()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-3, fused=True)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS, shuffle=True, collate_fn=Padding(0))
    return model, optimizer, loader, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(loader))


def bare(data: Any, steps: int, folder: Path, clipped: bool = True) -> None:
    """Plain PyTorch."""
    import torch

    model, optimizer, loader, schedule = pieces(data)
    for batch in loader:
        model(**batch).loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def accelerate(data: Any, steps: int, folder: Path, accumulate: bool = False) -> None:
    """The loop of Accelerate's quick tour."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, schedule = accelerator.prepare(*pieces(data))
    for batch in loader:
        if accumulate:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        else:
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


LOOPS: dict[str, Callable[[Any, int, Path], None]] = {
    "ours": ours,
    "bare": bare,
    "bare_unclipped": lambda data, steps, folder: bare(data, steps, folder, clipped=False),
    "accelerate": accelerate,
    "accelerate_accumulate": lambda data, steps, folder: accelerate(data, steps, folder, accumulate=True),
    "fabric": fabric,
    "trainer": trainer,
}


def measure(contestant: str, steps: int, folder: Path) -> dict[str, float]:
    """Run a loop in this process: seconds per step, of wall time and of CPU time of this thread, medians of blocks."""
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    data = tiny_data(folder, steps)
    marks: list[tuple[float, float]] = []

    def mark(*_: Any) -> None:
        marks.append((time.perf_counter(), time.thread_time()))
        if len(marks) == steps + 1:
            raise Enough

    handle = register_optimizer_step_post_hook(mark)
    try:
        LOOPS[contestant](data, steps, folder)
    except Enough:
        blocks = np.diff(np.array(marks)[WARMUP::BLOCK], axis=0) / BLOCK
        wall, cpu = np.median(blocks, axis=0) * 1e6
        least = np.quantile(blocks[:, 1], 0.1) * 1e6  # what a machine that other work keeps busy lets through
        return {"wall_us": float(wall), "thread_us": float(cpu), "tenth_us": float(least)}
    finally:
        handle.remove()
    raise AssertionError("the loop ended before its last step")


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        contestant, steps, folder = sys.argv[2:]
        result = measure(contestant, int(steps), Path(folder))
        Path(folder, "result.json").write_text(json.dumps(result))
        os._exit(0)
    import peers
    import rounds

    parser = rounds.parser(__doc__, "out/loop_cost")
    parser.add_argument("--steps", type=int, default=3000, help=f"of each launch; the first {WARMUP} are left out")
    parser.add_argument("--contestants", nargs="+", choices=OTHERS, default=OTHERS)
    arguments = parser.parse_args()
    folder = rounds.fresh_folder(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    environment = peers.environment() | {"ACCELERATE_USE_CPU": "true"}

    def run(name: str, round_: int) -> dict[str, float]:
        place = folder / f"{name}-{round_}"
        place.mkdir()
        command = [sys.executable, __file__, "--measure", name, str(arguments.steps), str(place)]
        with (place / "log").open("w") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
        return json.loads((place / "result.json").read_text())

    rows = rounds.take_turns(["ours", *arguments.contestants], arguments.rounds, run)
    names = ["ours", *(name for name in arguments.contestants if name != "bare")]
    found = {
        f"{name} - bare, {figure}": rounds.compare(rows, figure, name, "bare", difference=True)
        for figure in ("thread_us", "wall_us", "tenth_us")
        for name in names
        if "bare" in arguments.contestants
    }
    rounds.save(arguments, "loop_cost", 1, rows, found, unit="µs per step")


if __name__ == "__main__":
    main()
