"""Measure how long recipes/mlm.py waits for prepared data behind a URL, at 50 ms per request.

    python benchmarks/remote_shards.py --output_dir out/remote_shards

The embedded docstrings are prepared, with small blocks, so that a small corpus has many. A web server on this machine
delays each answer. The runs take turns; each begins with an empty cache:

- folder: the prepared folder itself, for comparison
- url: a cache with room for everything
- url, small cache: a cache of a twentieth of the data, so that nearly every sample needs a request
- url, small cache, 2 workers: the same with --dataloader_num_workers 2

Figures of each:

- data_percent: of the time of the steps, waiting for data and collating; the steps include the first one
- step_seconds: mean
- requests: for blocks, those of the evaluation included
- requests_per_second: the requests, divided by the time of the steps

Writes remote_shards.json and remote_shards.md into the output folder.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import launching, rounds
from benchmarks.harness.range_server import RangeServer
from shared import prepare
from shared.text import prepared_folder

RECIPE = launching.ROOT / "recipes/mlm.py"
CONTESTANTS = {  # share of the data for which the cache has room, and workers
    "folder": (None, 0),
    "url": (2.0, 0),
    "url, small cache": (0.05, 0),
    "url, small cache, 2 workers": (0.05, 2),
}


def train(folder: Path, work: Path, contestant: str, delay: float, flags: list[str]) -> rounds.Row:
    """Train from the folder or from its URL; the figures that the module's docstring describes."""
    share, workers = CONTESTANTS[contestant]
    size = sum(path.stat().st_size for path in folder.glob("*/tokens.npy"))
    with tempfile.TemporaryDirectory(dir=work) as name, RangeServer(folder, delay) as server:
        of_data = ["--prepared_data", str(folder)]
        if share is not None:
            of_data = ["--prepared_data", server.url, "--cache_gb", f"{share * size / 1e9:.9f}"]
        output = Path(name) / "run"
        more = ["--output_dir", output, "--dataloader_num_workers", workers, "--checkpointing_steps", "no"]
        os.environ["ACCELERATE_RECIPES_CACHE"] = f"{name}/cache"
        launching.run(Path(name) / "log", sys.executable, RECIPE, *of_data, *flags, *more)
        lines, last = launching.logged_steps(output, 0), 0
        seconds = waited = 0.0
        for line in lines:
            taken = line["step_seconds"] * (line["step"] - last)
            seconds, waited, last = seconds + taken, waited + taken * line["data_wait"], line["step"]
        requests = sum(count for path, count in server.requests.items() if "tokens" in path)
    return {
        "data_percent": 100 * waited / seconds,
        "step_seconds": seconds / last,
        "requests": requests,
        "requests_per_second": requests / seconds,
    }


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/remote_shards")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds before each answer of the server")
    parser.add_argument("--block_bytes", type=int, default=2048, help="size of the blocks")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of the recipe, without --")
    arguments = parser.parse_args()
    prepared_folder.BLOCK_BYTES = arguments.block_bytes
    given = [word if at % 2 else f"--{word}" for at, word in enumerate(arguments.flags)]
    length = {"max_train_steps": arguments.steps, "eval_steps": arguments.steps, "max_eval_samples": 50}
    flags = [*launching.flag_words(length), *given]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = work / "prepared"
        prepare.prepare(RECIPE, flags, (0, 1), folder)
        names, delay = list(CONTESTANTS), arguments.delay
        rows = rounds.take_turns(names, arguments.rounds, lambda one, _: train(folder, work, one, delay, flags))
    comparisons = {
        f"data_percent of {one} - folder": rounds.compare(rows, "data_percent", one, "folder", difference=True)
        for one in names[1:]
    }
    rounds.save(arguments, "remote_shards", 1, rows, comparisons, unit="percentage points")


if __name__ == "__main__":
    main()
