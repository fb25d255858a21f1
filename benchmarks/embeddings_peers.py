"""Measure recipes/embeddings.py beside the trainer of sentence-transformers with the same loss: speed, memory, scores.

    python benchmarks/embeddings_peers.py --processes 2 --rounds 3 --output_dir out/embeddings_peers

The peer is SentenceTransformerTrainer with CachedMultipleNegativesRankingLoss and gather_across_devices, whose
negatives are the whole global batch, too. Both train the same BERT (4 layers x 256, vocabulary 8,192, mean pooling) on
the embedded pairs with the same global batch, temperature, learning rate, schedule and fused AdamW, each in its own
order of samples. They take turns; each turn is a new launch. The start and the first update are left out. After the
last update, the recipe's retrieval scores of both models are computed. Writes embeddings.json and embeddings.md into
the output folder.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import rounds, tags_and_pairs
from benchmarks.harness.encoder_and_texts import SIZES
from benchmarks.harness.launching import ROOT, flag_words, launch, logged_steps, run_job
from shared.contrastive import demo_pairs

MAX_LENGTH, TEMPERATURE, LEARNING_RATE = 128, 0.05, 5e-4
WARMUP = 1  # updates that are left out at the start
OURS, PEER = "recipes/embeddings.py", "sentence-transformers"


def recipe_flags(folder: Path) -> dict[str, object]:
    """The recipe's flags for data, model and loss."""
    own = {"max_length": MAX_LENGTH, "temperature": TEMPERATURE, "learning_rate": LEARNING_RATE}
    return tags_and_pairs.data_flags(folder) | own


def train_peer(job: SimpleNamespace) -> dict[str, float]:
    """Train one process of sentence-transformers; the seconds of the updates, and the scores on the main process."""
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers import TrainerCallback

    folder, ends = Path(job.model), []

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    arguments = SentenceTransformerTrainingArguments(
        output_dir=job.output_dir,
        max_steps=job.steps,
        per_device_train_batch_size=job.global_batch_size // int(os.environ["WORLD_SIZE"]),
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=job.warmup_steps,
        ddp_find_unused_parameters=True,  # the pooler of a BERT has no gradient
        ddp_backend="gloo",
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )
    trainer = tags_and_pairs.sentence_transformers_trainer(
        folder, arguments, MAX_LENGTH, TEMPERATURE, job.rows, EndOfUpdate()
    )
    trainer.train()
    seconds = ends[-1] - ends[WARMUP - 1]
    figures = {"samples_per_second": job.global_batch_size * (len(ends) - WARMUP) / seconds}
    return figures | (scores(trainer.model, folder) if os.environ["RANK"] == "0" else {})


def scores(model: Any, folder: Path) -> dict[str, float]:
    """The recipe's retrieval scores of a SentenceTransformer on the validation pairs."""
    import pyarrow.parquet as pq

    from recipes import embeddings
    from shared.config import options
    from shared.contrastive import retrieval

    _, validation, _ = embeddings.load_data(options.parse(embeddings.Config, flag_words(recipe_flags(folder))))
    task = retrieval.Task.of_digests(*(validation.digests_of(column) for column in (0, 1)))
    table = pq.read_table(folder / "validation.parquet")
    anchors, positives = (
        torch.from_numpy(model.encode(table[name].to_pylist(), normalize_embeddings=True))[torch.from_numpy(rows)]
        for name, rows in (("anchor", task.queries), ("positive", task.documents))
    )
    means = retrieval.figures(anchors @ positives.T, task.pairs, TEMPERATURE).mean(0).tolist()
    return dict(zip(retrieval.NAMES, means[1:], strict=True))


def measure(arguments: Any, folder: Path, name: str, round_: int) -> dict[str, Any]:
    """Launch one contestant; its figures of one round."""
    label = "ours" if name == OURS else "peer"
    log, output = folder / f"{label}-{round_}.log", folder / f"{label}-{round_}"
    common = {"global_batch_size": arguments.global_batch_size, "seed": round_, "output_dir": str(output)}
    if name == PEER:
        result = folder / f"{label}-{round_}.json"
        job = common | {"result": str(result), "model": str(folder / "model"), "rows": arguments.rows}
        job |= {"steps": arguments.steps + WARMUP, "warmup_steps": arguments.warmup_steps}
        result.with_suffix(".job").write_text(json.dumps(job))
        memory = launch(arguments.processes, log, __file__, "--job", result.with_suffix(".job"))
        return json.loads(result.read_text()) | {"peak_rss_mib": memory}
    flags = (
        recipe_flags(folder / "model")
        | common
        | {
            "max_tokens_per_micro_batch": arguments.max_tokens_per_micro_batch,
            "kept_micro_batches": arguments.kept_micro_batches,
            "max_train_steps": arguments.steps + WARMUP,
            "warmup_steps": arguments.warmup_steps,
            "lr_scheduler_type": "linear",
            "weight_decay": 0,
            "max_grad_norm": 1,
            "logging_steps": 1,
            "eval_steps": arguments.steps + WARMUP,
            "checkpointing_steps": "no",
            "expect_processes": arguments.processes,
        }
    )
    memory = launch(arguments.processes, log, ROOT / "recipes/embeddings.py", *flag_words(flags))
    timed = logged_steps(output, WARMUP)
    seconds = sum(arguments.global_batch_size / line["samples_per_second"] for line in timed)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = next(line for line in lines if "eval_loss" in line)
    figures = {name: found[f"eval_{name}"] for name in ("ndcg_at_10", "recall_at_10", "mrr_at_10")}
    return (
        {"samples_per_second": arguments.global_batch_size * len(timed) / seconds} | figures | {"peak_rss_mib": memory}
    )


def main() -> None:
    parser = rounds.parser(__doc__ or "", "out/embeddings_peers")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed updates per launch, after one of warm-up")
    parser.add_argument("--warmup_steps", type=int, default=2, help="steps of learning-rate warm-up")
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--evaluation_pairs", type=int, default=500)
    parser.add_argument("--rows", type=int, default=32, help="the peer's mini_batch_size; 32 is its default")
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=2048, help="the recipe's budget")
    parser.add_argument("--kept_micro_batches", type=int, default=3, help="computed once by the recipe")
    parser.add_argument("--job", type=Path, help="file with the job of a process of the peer's launch")
    arguments = parser.parse_args()
    if arguments.job:
        run_job(arguments.job, train_peer)
        return
    folder = rounds.make_runs_folder(arguments.output_dir)
    train, validation = demo_pairs.load()
    tables = (train, validation.slice(0, arguments.evaluation_pairs))
    tags_and_pairs.prepare("embeddings", folder / "model", tables, MAX_LENGTH, sizes=SIZES)
    rows = rounds.take_turns((OURS, PEER), arguments.rounds, lambda *turn: measure(arguments, folder, *turn))
    compared = {"speed": "samples_per_second", "peak memory": "peak_rss_mib"}
    comparisons = {f"{name} of ours / peer": rounds.compare(rows, key, OURS, PEER) for name, key in compared.items()}
    ndcg = rounds.compare(rows, "ndcg_at_10", OURS, PEER, difference=True)
    rounds.save(arguments, "embeddings", arguments.processes, rows, comparisons | {"nDCG@10 of ours - peer": ndcg})


if __name__ == "__main__":
    main()
