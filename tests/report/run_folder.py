"""The folder of a run without a run: the files that report.html is made from."""

import json

from shared.config import options
from shared.options.data_options import DataOptions


def write_run(folder, lines=(), found=None, card="", **settings):
    """Write config.yaml, and what is given of metrics.jsonl, mistakes.json and launch_card.txt; return `folder`."""
    options.save(DataOptions(output_dir=str(folder), **settings), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if found:
        (folder / "mistakes.json").write_text(json.dumps(found))
    if card:
        (folder / "launch_card.txt").write_text(card)
    return folder
