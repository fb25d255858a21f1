"""How good the trained models are: run rows of docs/results.md, and write the page from the runs that are committed.

    python benchmarks/quality.py  # only writes the page
    python benchmarks/quality.py --task reviews
    python benchmarks/quality.py --task reviews --rows tfidf minilm

A row is a recipe with its flags, a method without a neural network, or a peer of peers.py. It runs once per seed, with
one thread. benchmarks/results/runs has a folder per task, row and seed: run.json with command, commit, machine and
processor seconds, and of a recipe config.yaml and metrics.jsonl as it wrote them. All other files are in out/quality.
`make results TASK=reviews` is the second command. results/rows.yaml lists the rows.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import yaml

from benchmarks.harness import baselines, launching, rounds

RESULTS, PAGE = launching.ROOT / "benchmarks/results", launching.ROOT / "docs/results.md"
RUNS, OUT = RESULTS / "runs", Path("out/quality")
SEEDS = 5  # of a row with a command, unless it says otherwise
TASKS: dict[str, dict[str, Any]] = yaml.safe_load((RESULTS / "rows.yaml").read_text())
START, END = "<!-- benchmarks/quality.py writes these tables -->", "<!-- end of these tables -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), help="default: run nothing")
    parser.add_argument("--rows", nargs="+", help="default: all rows of the task")
    arguments = parser.parse_args()
    os.chdir(launching.ROOT)
    if arguments.task:
        rows = TASKS[arguments.task]["rows"]
        if unknown := set(arguments.rows or ()) - rows.keys():
            parser.error(f"--rows {' '.join(sorted(unknown))}: not one of {', '.join(rows)}")
        commit()  # of now: the repository may change during a run
        baselines.write_files(arguments.task, OUT / arguments.task)
        for row in arguments.rows or rows:
            run(arguments.task, row)
    PAGE.write_text(page())


def page() -> str:
    """The page with new tables."""
    tables = "\n".join(map(section, TASKS)).rstrip("\n")
    return launching.between_marks(PAGE.read_text(), START, END, tables)


# The runs


def run(task: str, row: str) -> None:
    """Run a row with all its seeds."""
    about = TASKS[task]["rows"][row]
    if "score" in about:
        run_peer(task, row)
        return
    for seed in range(about.get("seeds", 1 if "baseline" in about else SEEDS)):
        (run_baseline if "baseline" in about else run_recipe)(task, row, seed)


def run_baseline(task: str, row: str, seed: int) -> None:
    """Compute the scores of a method without a neural network in this process."""
    method, data = getattr(baselines, TASKS[task]["rows"][row]["baseline"]), baselines.data_of(task, seed)
    started = time.process_time()
    scores = method(*data)
    seconds = time.process_time() - started
    record(task, row, seed, command_of(task, row, seed), {"processor_seconds": seconds, "scores": scores})


def run_recipe(task: str, row: str, seed: int) -> None:
    """Run a recipe, which prepares its data anew."""
    place, command = new_folder(OUT / task / row / str(seed)), command_of(task, row, seed)
    if str(baselines.PACKAGES) in command:
        baselines.download_model()
    os.environ["ACCELERATE_RECIPES_CACHE"] = str(place.resolve() / "cache")
    used = launching.run(place / "log", sys.executable, *command.split()[1:])
    folder = record(task, row, seed, command, used)
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(place / "run" / name, folder)
    shutil.rmtree(place / "run/checkpoints", ignore_errors=True)


def run_peer(task: str, row: str) -> None:
    """Run a peer with all seeds: the rounds of peers.py."""
    place, command = new_folder(OUT / task / row), command_of(task, row, 0)
    launching.run(place / "log", sys.executable, *command.split()[1:])
    (report,) = place.glob("*.json")
    for found in json.loads(report.read_text())["rows"]:
        figures = {name: found[name] for name in ("processor_seconds", "wall_seconds", "peak_rss_mib")}
        scores = {"scores": {TASKS[task]["rows"][row]["score"]: found["score"]}}
        record(task, row, found["round"], command, figures | scores)


def command_of(task: str, row: str, seed: int) -> str:
    """The command of a run, as typed at the root of the repository."""
    about = TASKS[task]["rows"][row]
    if "baseline" in about:
        return f"python benchmarks/quality.py --task {task} --rows {row}"
    if "score" in about:
        return f"{about['command']} --rounds {about.get('seeds', SEEDS)} --output_dir {OUT}/{task}/{row}"
    return f"{about['command']} --seed {seed} --output_dir {OUT}/{task}/{row}/{seed}/run"


def new_folder(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def record(task: str, row: str, seed: int, command: str, found: dict[str, Any]) -> Path:
    """Write run.json into the folder of a run, which has nothing else then."""
    folder = new_folder(RUNS / task / row / str(seed))
    about = {"command": command, "commit": commit(), "machine": rounds.machine(1)}
    (folder / "run.json").write_text(json.dumps(about | found, indent=1) + "\n")
    print(folder.relative_to(RUNS), found, flush=True)
    return folder


@cache
def commit() -> str:
    """The commit of the code that runs; with a plus if recipes/ or shared/ have changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=7", "HEAD") + "+" * bool(git("status", "--porcelain", "recipes", "shared"))


# The tables


def runs_of(task: str, row: str) -> list[dict[str, Any]]:
    """The committed runs of a row, in the order of their seeds: run.json, with the scores of the last evaluation."""
    found = []
    for folder in sorted((RUNS / task / row).glob("*"), key=lambda folder: int(folder.name)):
        about = json.loads((folder / "run.json").read_text())
        if (metrics := folder / "metrics.jsonl").exists():
            lines = map(json.loads, metrics.read_text().splitlines())
            last = [line for line in lines if "eval_loss" in line][-1]
            about["scores"] = {name.removeprefix("eval_"): value for name, value in last.items()}
        found.append(about)
    return found


def section(task: str) -> str:
    """The heading, data, table and commands of a task as Markdown."""
    about = TASKS[task]
    names, commands = [name_of(score) for score in about["scores"]], []
    for row in about["rows"]:
        runs = runs_of(task, row)
        commands.append(runs[0]["command"] if runs else f"{command_of(task, row, 0)}  # not run")
    return "\n".join(
        [
            f"## {about['title']}\n\n{about['data']} `make results TASK={task}`\n",
            f"| model or method | {' | '.join(names)} | seeds | processor seconds | machine | commit |",
            f"|---|{'---:|' * (len(names) + 2)}---|---|",
            *(line(task, row) for row in about["rows"]),
            *("", "```text", *commands, "```", ""),
        ]
    )


def name_of(score: str) -> str:
    """`ndcg_at_10` as `nDCG@10`."""
    for written, read in (("_at_", "@"), ("_", " "), ("f1", "F1"), ("ndcg", "nDCG"), ("mrr", "MRR")):
        score = score.replace(written, read)
    return score


def line(task: str, row: str) -> str:
    """A row of the table: mean ± standard deviation over the seeds."""
    about, names, runs = TASKS[task]["rows"][row]["about"], TASKS[task]["scores"], runs_of(task, row)
    if not runs:
        return f"| {about} | not run {'| ' * (len(names) + 4)}|"
    at, seconds = runs[-1]["machine"], statistics.mean(run["processor_seconds"] for run in runs)
    machine = f"{at['cpu']}, {at['cores']} cores, torch {at['versions']['torch'].partition('+')[0]}"
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    scores = [shown([run["scores"][name] for run in runs if name in run["scores"]]) for name in names]
    return f"| {' | '.join([about, *scores, str(len(runs)), f'{seconds:.3g}', machine, commits])} |"


def shown(values: list[float]) -> str:
    """`0.783 ± 0.004`; without the deviation for one value, - for none."""
    if not values:
        return "-"
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
