"""metrics.jsonl, the record of a run that other programs rely on, and what a terminal shows of it."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.disk import replace_file
from shared.errors import UserError
from shared.monitoring.hooks import Value

# JSON has no NaN. JavaScript and protobuf use these names, and Python's float() reads them.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Log:
    """Writes metrics.jsonl and moves the progress bar. Constructed on all processes; only the main process writes."""

    def __init__(self, accelerator: Any, output_dir: Path, step: int, total_steps: int) -> None:
        """Continue the log of `output_dir`, which exists, at `step`; the bar is drawn only in a terminal."""
        self.acts, self.file = accelerator.is_main_process, output_dir / "metrics.jsonl"
        hidden = not (self.acts and sys.stderr.isatty())
        self.bar: tqdm[Any] = tqdm(
            total=total_steps, initial=step, disable=hidden, unit="step", dynamic_ncols=True, mininterval=0.5
        )

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one line of metrics.jsonl, and show it: in the bar, or as a line of text where there is no bar.

        Scores always get a line of text, because the bar would show them for a moment only.
        """
        if not self.acts:
            return
        with self.file.open("a", encoding="utf-8") as file:
            file.write(as_line({"step": step, **values}))  # closed, so flushed: a killed run has its last line
        text = readable(values)
        if text and (self.bar.disable or "loss" not in values):
            put(f"step {step}/{self.bar.total}  {text}")
        elif text:
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)


def read_metrics(metrics_file: Path) -> list[dict[str, Value]]:
    """The lines of a metrics.jsonl, with NaN and infinities as floats again.

    Raises:
        UserError: a line is not a JSON object with a step. An incomplete last line, left by a crash, is ignored.
    """
    texts = metrics_file.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            named = [key for key, value in line.items() if isinstance(value, str) and value in NOT_FINITE]
            lines.append(line | {key: NOT_FINITE[line[key]] for key in named})
        elif number < len(texts):
            raise UserError(f"{metrics_file}, line {number}: not a JSON object with a step; correct or delete the file")
    return lines


def cut_metrics(metrics_file: Path, step: int, evaluation_owed: bool = False) -> None:
    """Remove what comes after `step`, an evaluation there that is owed, and a final summary; at step 0, all lines.

    Raises:
        UserError: the file is not a metrics.jsonl.
    """
    if not metrics_file.exists():
        return

    def kept(line: Mapping[str, Any]) -> bool:
        made_again = evaluation_owed and line["step"] == step and "loss" not in line
        return 0 < line["step"] <= step and "train_runtime" not in line and not made_again

    replace_file(metrics_file, "".join(as_line(line) for line in read_metrics(metrics_file) if kept(line)))


def as_line(values: Mapping[str, Value]) -> str:
    """The line of metrics.jsonl with these values."""
    return json.dumps({key: finite_or_name(value) for key, value in values.items()}, allow_nan=False) + "\n"


def finite_or_name(value: Value) -> Value:
    """A value that JSON can hold: a float that is not finite becomes its name."""
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def readable(values: Mapping[str, Value]) -> str:
    """Loss, learning rate and rate of a training line, or the scores of an evaluation line; "" for others."""
    numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
    if "loss" not in numbers:
        return "  ".join(f"{key} {value:.4g}" for key, value in numbers.items() if key.startswith("eval_"))
    parts = [f"loss {numbers['loss']:.4f}"]
    if "learning_rate" in numbers:
        parts.append(f"lr {numbers['learning_rate']:.2e}".replace("e-0", "e-"))
    if "samples_per_second" in numbers:
        parts.append(f"{numbers['samples_per_second']:,.0f} samples/s")
    if "slowest_process" in numbers:
        behind = numbers["slowest_process_behind"]
        parts.append(f"process {numbers['slowest_process']:.0f} is {behind:.0%} behind".replace("%", " %"))
    return "  ".join(parts)


def put(text: str) -> None:
    """One line on stdout, above the progress bar."""
    with tqdm.external_write_mode():
        print(text, flush=True)
