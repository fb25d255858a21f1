"""Call a recipe's main with each config in turn: call_recipe.py RECIPE JOBS.json.

A job is {"flags": a command line, "mode": ...}. "train" calls main unchanged. "record" also writes the inputs of the
model, one line per forward pass, to OUTPUT_DIR/fed-RANK.jsonl. "evaluate" only evaluates the model, on the first 1, 2,
3 ... validation rows, and writes OUTPUT_DIR/evaluations.json. "dropout" trains an image classifier with dropout before
its last layer.
"""

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import runs
from torch import nn

from shared.config import options
from shared.metrics.task_metrics import resolve_metrics
from shared.plan.batches import Plan
from shared.processes import ending, starting
from shared.text.tokenized import Padding


def rows_of(batch):
    """The token ids of each text of a batch: packed, padded, or one alone."""
    if "documents" in batch:
        return [ids.tolist() for ids in batch["input_ids"][0].tensor_split(batch["documents"].ends[1:-1].long())]
    if "attention_mask" not in batch:
        return batch["input_ids"].tolist()
    padded = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [ids[real].tolist() for ids, real in padded]


def record(module, config):
    """Train, and write to a file the token ids of each row that enters the model on this process."""
    build_model = module.build_model

    def build_recording_model(*args):
        model = build_model(*args)

        def write(model, _, batch):
            with fed.open("a") as file:
                file.write(json.dumps({"training": model.training, "rows": rows_of(batch)}) + "\n")

        model.register_forward_pre_hook(write, with_kwargs=True)
        return model

    fed = Path(config.output_dir) / f"fed-{os.environ.get('RANK', 0)}.jsonl"
    module.build_model = build_recording_model
    module.main(config)
    module.build_model = build_model


def with_dropout(build_model):
    """Add dropout before the last layer to a recipe's `build_model`; no ResNet of transformers has dropout."""

    def build(*args):
        model = build_model(*args)
        drop_out = nn.Dropout(0.2)
        model.classifier[-1].register_forward_pre_hook(lambda last, rows: drop_out.train(last.training)(*rows))
        return model

    return build


def dropout(module, config):
    """Train an image classifier with dropout."""
    build_model, module.build_model = module.build_model, with_dropout(module.build_model)
    module.main(config)
    module.build_model = build_model


def evaluate(module, config):
    """Call the recipe's `evaluate` on the first 1, 2, 3 ... rows in batches of 4: 2 x processes x 4 + 1 sizes."""
    accelerator = starting.start(config)
    config = config.settled(accelerator, None)
    train, validation, labels, tokenizer = module.load_data(config)
    model = accelerator.prepare(module.build_model(config, labels, tokenizer))
    metrics = resolve_metrics(config, labels.kind, labels.names, validation.targets)
    wrong = SimpleNamespace(keep=lambda *_: None)
    collate = Padding(tokenizer.pad_token_id)
    plan = Plan.of_run(config, accelerator, lengths=train.lengths)
    plan.max_tokens, plan.max_samples = None, 1  # evaluation uses batches four times as large
    found = {}
    for size in range(1, 2 * accelerator.num_processes * 4 + 2):
        part = copy.copy(validation)
        part.targets, part.lengths = validation.targets[:size], validation.lengths[:size]
        found[size] = module.evaluate(accelerator, model, plan, part, collate, module.Scale(labels), metrics, wrong)
    if accelerator.is_main_process:
        Path(config.output_dir).mkdir()
        (Path(config.output_dir) / "evaluations.json").write_text(json.dumps(found))


if __name__ == "__main__":
    recipe, jobs = map(Path, sys.argv[1:])
    module = runs.load(recipe)
    modes = {"train": module.main, "record": lambda c: record(module, c), "evaluate": lambda c: evaluate(module, c)}
    modes["dropout"] = lambda c: dropout(module, c)
    for job in json.loads(jobs.read_text()):
        modes[job["mode"]](options.parse(module.Config, job["flags"]))
    ending.end()
