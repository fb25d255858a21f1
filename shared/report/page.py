"""Writes report.html from the files of a run's folder; page.html beside this file is its template."""

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.config import options
from shared.disk import replace_file
from shared.errors import UserError, about, count_of
from shared.extras.curves import find_panels
from shared.extras.time_report import NAMES, breakdown, of_last_processes, rounded, seconds_by_part
from shared.monitoring.hooks import Hook
from shared.monitoring.log import read_metrics
from shared.report import charts, mistakes

REPORT, CARD = "report.html", "launch_card.txt"
MOST_EVALUATIONS = 12  # in their table
WATCHED = ("loss", "eval_loss", "grad_norm")  # the page says how often they were not finite


class Report(Hook):
    """Writes launch_card.txt when a run begins, and report.html when it has ended; says where that is."""

    def begun(self, run: Any) -> None:
        """Write the launch card on the main process; a run from the start has made no mistakes yet."""
        if run.accelerator.is_main_process:
            folder = Path(run.config.output_dir)
            with mistakes.not_fatal(CARD):
                replace_file(folder / CARD, run.launch_card + "\n")
                if not run.resumed:
                    (folder / mistakes.FILE).unlink(missing_ok=True)

    def ended(self, run: Any) -> None:
        """Write the page on the main process."""
        if run.accelerator.is_main_process:
            with mistakes.not_fatal(REPORT):
                file = write_report(Path(run.config.output_dir))
                with tqdm.external_write_mode():
                    print(f"  {file} shows the run in a browser", flush=True)


def write_report(folder: Path) -> Path:
    """Write report.html into the output folder of a run, finished or not, and return its path.

    Raises:
        UserError: the folder is not that of a run, or one of its files is damaged.
    """
    file = folder / REPORT
    replace_file(file, page(folder))
    return file


def page(folder: Path) -> str:
    """The page of a run. Whatever a file of the run lacks is left out; all texts are escaped.

    Raises:
        UserError: see `write_report`.
    """
    from jinja2 import Environment, StrictUndefined

    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: the folder has no config.yaml: give the --output_dir of a run")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["digest"] = digest
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    with about(str(folder / mistakes.FILE)):
        found = json.loads(read(folder / mistakes.FILE) or "{}")
    last_step = max((int(line["step"]) for line in lines), default=0)
    return template.render(
        name=options.load(folder / "config.yaml").get("run_name") or folder.resolve().name,
        status=status(lines, last_step),
        notes=not_finite(lines),
        evaluations=evaluations(lines),
        figures=[charts.curves(panel, last_step) for panel in find_panels(lines) if panel.series],
        found=found,
        classes=classes(found),
        worst=worst(found),
        scatter=charts.scatter(found["points"]) if found.get("points") else None,
        time=time(lines),
        card=card(folder / CARD),
        command=command(folder),
        settings=read(folder / "config.yaml"),
    )


def read(file: Path) -> str:
    """The text of a file; "" if it does not exist."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def digest(script: str) -> str:
    """The digest by which the page allows its own script, and no other, to run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def status(lines: Sequence[Mapping[str, Any]], last_step: int) -> str:
    """How far the run has come."""
    steps = count_of(last_step, "step")
    if not lines or "train_runtime" not in lines[-1]:
        return f"{steps} so far; the run has not finished"
    return f"finished: {steps} in {lines[-1]['train_runtime']:,.1f} s"


def not_finite(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each figure that was NaN or infinite."""
    found = {key: [math.isfinite(line[key]) for line in lines if key in line] for key in WATCHED}
    return [
        f"{key} is not finite in {finite.count(False):,} of {count_of(len(finite), 'line')}"
        for key, finite in found.items()
        if not all(finite)
    ]


def evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of the evaluations, of many some of them, evenly spread, and the last one."""
    all_rows = [line for line in lines if "eval_loss" in line]
    every = -(-len(all_rows) // MOST_EVALUATIONS) or 1
    rows = all_rows[::-1][::every][::-1]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key.startswith("eval_")]
    return {
        "names": [key.removeprefix("eval_").replace("_", " ") for key in keys],
        "rows": [(f"{row['step']:,}", [f"{row[key]:.4g}" if key in row else "" for key in keys]) for row in rows],
        "left_out": len(all_rows) - len(rows),
    }


def classes(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The rows of the table of the classes: count, precision, recall, F1; "" where nothing is divided."""

    def ratio(part: int, whole: int) -> str:
        return f"{part / whole:.3f}" if whole else ""

    return [
        (name, [f"{true:,}", ratio(hits, predicted), ratio(hits, true), ratio(2 * hits, true + predicted)])
        for name, true, predicted, hits in found.get("classes", [])
    ]


def worst(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The worst samples, each with lines that say which one it is and how wrong."""
    samples = []
    for sample in found["worst"] if found else []:
        loss = float(sample["loss"])
        chance = [f"{100 * math.exp(-loss):.2g} % for the right class"] if "confused" in found else []
        samples.append(sample | {"said": [*chance, f"loss {loss:.4g}, sample {sample['row']:,}"]})
    return samples


def time(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the time went: its parts, and what the end of a run says about it besides them and its advice."""
    recent, where = of_last_processes(lines)
    spent = seconds_by_part(recent)
    total = sum(spent.values())
    if not total:
        return {"parts": []}
    percent = rounded({part: seconds / total for part, seconds in spent.items()})
    parts = [(NAMES[part], seconds, percent[part]) for part, seconds in spent.items() if seconds > 0]
    rows = [row.strip() for row in breakdown(lines).splitlines()[1:]]
    said = [f"{total:,.1f} s in all{where}", *(row for row in rows if not row.startswith("advice"))]
    return {"parts": parts, "said": said}


def card(file: Path) -> list[tuple[str, str]]:
    """The rows of the launch card; of an older run, none."""
    return re.findall(r"^  (\S.*?)  +(.*)$", read(file), re.MULTILINE)


def command(folder: Path) -> str:
    """The command that trains again with the same settings, into another folder; "" if the recipe is unknown."""
    recipe = options.recipe_of(folder / "config.yaml")
    if recipe is None:
        return ""
    shown = recipe.relative_to(options.PROJECT) if recipe.is_relative_to(options.PROJECT) else recipe
    again = folder.with_name(f"{folder.name}-again")
    return shlex.join(["python", str(shown), "--config", str(folder / "config.yaml"), "--output_dir", str(again)])
