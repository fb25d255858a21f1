"""Run one benchmark of gpu_benchmarks.py through a recipe's own `main`; benchmarks/gpu.py starts this script.

    python benchmarks/harness/run_gpu_benchmark.py BENCHMARK FOLDER

The recipe's code stays as it is, with exceptions that the benchmark names: `load_data` for random data, the Loader for
images that are on the device already, and what CHANGES has for a variant. The run is in FOLDER/run; facts.json,
waits.json and a variant's kernels.json are beside it. Without a GPU everything has toy size.
"""

import importlib
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.harness import gpu_passes, gpu_peers, image_variants, tags_and_pairs
from benchmarks.harness.encoder_and_texts import write_bert
from benchmarks.harness.gpu_benchmarks import BENCHMARKS, LISTS_KERNELS, LOGGING_STEPS, PROFILED, TINY, Benchmark
from benchmarks.harness.host_waits import HostWaits, compiled_graphs
from benchmarks.harness.kernels import kernels_per_step
from benchmarks.harness.launching import ROOT
from benchmarks.harness.photos import write_photos
from benchmarks.harness.random_documents import random_words, word_tokenizer
from shared.compat import of_torch_models
from shared.config import options
from shared.encoders import attention
from shared.metrics.task_metrics import TaskMetrics
from shared.plan.loading import Loader
from shared.report import page

GFLOP = {"resnet50": 24.5, "vit": 98.2}  # per image of 224 x 224; the whole last layer of ViT would take 7.3 more


def command_line(benchmark: Benchmark, folder: Path, toy: bool) -> list[str]:
    """The recipe's flags; at toy size nothing is compiled, because that takes a minute on a CPU."""
    steps = 4 if toy else benchmark.steps
    common = {"mixed_precision": "bf16", "max_train_steps": steps, "eval_steps": steps, "checkpointing_steps": "no"}
    common |= {"logging_steps": 1 if toy else LOGGING_STEPS, "resume_from_checkpoint": "never", "save_total_limit": 1}
    if benchmark.part in LISTS_KERNELS:
        common["profile"] = 1 if toy else PROFILED
    if benchmark.data == "cache":
        common["dataloader_num_workers"] = 8
    flags = common | benchmark.flags | {"output_dir": folder / "run"}
    if toy:
        flags |= benchmark.toy | {"torch_compile": False, "dataloader_num_workers": 0}
        flags.pop("cudnn_benchmark", None)  # it needs a GPU
    if "config" in flags:
        flags["config"] = ROOT / flags["config"]
    if benchmark.data == "cache":
        flags["train_dir"] = folder / "photos"
    if toy and "train_file" not in flags and benchmark.data == "real":
        flags["train_file"] = "corpus.txt"
    for name in ("model_name_or_path", "train_file", "validation_file"):
        if name in flags:
            flags[name] = folder / flags[name]
    return [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]


def run(name: str, folder: Path, toy: bool) -> None:
    """Run a benchmark in this process; its figures are then in `folder`."""
    benchmark = BENCHMARKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ACCELERATE_RECIPES_CACHE"] = str(folder.parent / "cache")
    if toy:
        (folder / "corpus.txt").write_text((ROOT / "CONTRIBUTING.md").read_text())
    if benchmark.recipe == "passes":
        gpu_passes.run(folder, toy)
        return
    if "train_file" in benchmark.flags:
        if (recipe_name := recipe_of(benchmark)) == "nlp":
            prepare_texts(folder, toy)
        else:
            tags_and_pairs.prepare(recipe_name, folder / "encoder", toy)
    if "vit" in name:
        prepare_vit(folder / "vit", toy)
    if benchmark.data == "cache":
        write_photos(folder / "photos", 16 if toy else 800, 100)  # making one takes long
    recipe = importlib.import_module(f"recipes.{recipe_of(benchmark)}")
    config = options.parse(recipe.Config, command_line(benchmark, folder, toy))
    if benchmark.part == "peers":
        gpu_peers.train(benchmark, config, folder, toy)
        return
    load_data = recipe.load_data
    if benchmark.data in ("random", "on the device"):
        load_data = random_documents if benchmark.recipe == "mlm" else random_images

    def load_and_note(config: Any) -> Any:
        found = load_data(config)
        (folder / "facts.json").write_text(json.dumps(facts(name, config, found[0], toy)))
        return found

    with ExitStack() as stack:
        replace = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        replace(recipe, "load_data", load_and_note)
        if benchmark.data == "on the device":
            replace(recipe, "Loader", Resident)
        if benchmark.change:
            CHANGES[benchmark.change](replace, recipe)
        # Neither is part of a step, and a GPU machine may lack the packages that they need.
        replace(TaskMetrics, "compute", lambda self, *_: dict.fromkeys(self.names, 0.0))
        replace(page, "draw_curves", lambda *_: None)
        started = time.perf_counter()
        waits = stack.enter_context(HostWaits(recipe))
        recipe.main(config)
    summary = {"steps": waits.steps, "where": waits.where.most_common(8), "seconds": time.perf_counter() - started}
    summary |= {"compiled_graphs": compiled_graphs()}
    (folder / "waits.json").write_text(json.dumps(summary))
    if config.profile:
        kernels = kernels_per_step(folder / "run/profile/trace-0.json", config.profile)
        (folder / "kernels.json").write_text(json.dumps(kernels))


def recipe_of(benchmark: Benchmark) -> str:
    """The recipe whose settings a benchmark has; for a peer, the one that does the same work."""
    return BENCHMARKS[benchmark.beside].recipe if benchmark.part == "peers" else benchmark.recipe


def with_dense_head(replace: Any, recipe: Any) -> None:
    """Compute the logits of all tokens, and then take those of the masked ones."""

    def predict_all(model: Any, _: bool) -> None:
        forward = model.forward

        def forward_all(_: Any, *args: Any, masked: Any = None, **arguments: Any) -> Any:
            output = forward(*args, **arguments)
            documents = arguments.get("documents")
            if documents is not None and documents.masked is not None:  # packed
                masked = documents.masked.places
            if masked is not None:
                output["logits"] = output.logits.flatten(0, 1).index_select(0, masked)
            return output

        of_torch_models.replace_forward(model, forward_all)

    replace(recipe, "predict_only_masked", predict_all)


def with_padded_attention(replace: Any, recipe: Any) -> None:
    """Attend as a torch without FlashAttention does."""
    replace(attention, "why_not_flash", lambda *_: "padded for comparison")


CHANGES = {
    "dense_head": with_dense_head,
    "padded_attention": with_padded_attention,
} | image_variants.CHANGES


def facts(name: str, config: Any, train: Any, toy: bool) -> dict[str, float]:
    """Operations of a forward and backward pass per real token, pair or image; see docs/performance.md."""
    if not hasattr(config, "max_length"):
        image = next((value for key, value in GFLOP.items() if name.startswith(key)), 0.0)
        return {"operations": 0.0 if toy else image * 1e9, "samples": len(train)}
    lengths = np.asarray(getattr(train, "text_lengths", train.lengths), float).ravel()  # pairs have two texts
    mean, seen = lengths.mean(), (lengths**2).sum() / lengths.sum()  # tokens per document; tokens that one attends to
    width, layers, inside, vocabulary = sizes(config)
    modern = getattr(config, "model_type", "") == "modernbert"
    weights = 4 * width**2 + (3 if modern else 2) * width * inside
    attended = [min(seen, 129.0) if modern and layer % 3 else seen for layer in range(layers)]
    operations = 6 * layers * weights + 12 * width * sum(attended)
    if hasattr(train, "masked"):  # the head, and the part of the last layer that is computed for masked tokens only
        masked = float(train.masked.sum() / lengths.sum())
        operations += 6 * masked * (width**2 + width * vocabulary)
        operations -= (1 - masked) * (6 * (weights - (3 if modern else 2) * width**2) + 12 * width * attended[-1])
    per_unit = lengths.sum() / len(train) if hasattr(train, "text_lengths") else 1
    return {"operations": operations * per_unit, "samples": len(train), "mean_length": mean}


def sizes(config: Any) -> tuple[int, int, int, int]:
    """Width, layers, width inside a layer and vocabulary of the encoder."""
    if not config.model_name_or_path:
        return config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size
    stored = json.loads((Path(config.model_name_or_path) / "config.json").read_text())
    return stored["hidden_size"], stored["num_hidden_layers"], stored["intermediate_size"], stored["vocab_size"]


class Resident(Loader):
    """Yields the same batch of each size from the device, so that the step is measured without its input."""

    batches: dict[int, Any]

    def micro_batches(self, step: int) -> Any:
        vars(self).setdefault("batches", {})
        for micro_batch in self.plan.micro_batches(step):
            rows = len(micro_batch.samples)
            if rows not in self.batches:
                self.batches[rows] = self.one(micro_batch)[1]
            yield micro_batch, dict(self.batches[rows])


def random_documents(config: Any) -> tuple[Any, Any, Any]:
    """Random documents of --max_length tokens, for training and for validation, and a tokenizer for them."""
    from shared.datasets.tables import hold_out
    from shared.pretrained.tokenizers import special_tokens_around
    from shared.text.masking import masking_for
    from shared.text.token_files import Corpus, MaskedDocuments

    tokenizer = word_tokenizer(config.vocab_size)
    folder, around = Path(config.output_dir).parent / "random", special_tokens_around(tokenizer)
    folder.mkdir(exist_ok=True)
    documents, room = 4 * config.global_batch_size, config.max_length - sum(map(len, around))
    np.save(folder / "tokens.npy", random_words(documents * room, config.vocab_size))
    np.save(folder / "offsets.npy", np.arange(documents + 1) * room)
    masking = masking_for(tokenizer, config.mlm_probability)
    corpus = Corpus(folder, f"{documents} documents of {room} random tokens")
    parts = hold_out(corpus.documents("a corpus of random tokens"), 1, config.seed)
    arguments = (config.max_length, around, masking, config.seed)
    train, held_out = (MaskedDocuments(corpus, part, *arguments) for part in parts)
    return train, held_out, tokenizer


def random_images(config: Any) -> tuple[Any, Any, Any]:
    """Decoded images of random bytes in a thousand classes: what `load_data` of the image recipe returns."""
    from shared.augmentation.augmentation import Augmentation
    from shared.images.image_models import load_geometry
    from shared.images.images import Images, with_square

    rng, count, side = np.random.default_rng(0), config.global_batch_size + 8, config.decode_size
    pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    names = tuple(f"class {i}" for i in range(1000))
    whole = Images("random images", names, rng.integers(0, 1000, count), np.arange(count), arrays=pixels)
    geometry = load_geometry(config)
    train = with_square(whole.take(np.arange(8, count)), config, geometry.training_square(side))
    held_out = with_square(whole.take(np.arange(8)), config, geometry.evaluation_square)
    return train, held_out, Augmentation(config, geometry)


def prepare_vit(folder: Path, toy: bool) -> None:
    """Write the config of ViT-B/16 and its processor."""
    from transformers import ViTConfig, ViTImageProcessorPil

    ViTConfig(**TINY | {"image_size": 16, "patch_size": 8} if toy else {}).save_pretrained(folder)
    side = 16 if toy else 224
    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)


def prepare_texts(folder: Path, toy: bool) -> None:
    """Write BERT-base with random weights, a tokenizer, and docstrings cut to the lengths of short texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shared.demo_data import texts
    from shared.text.tokenized import train_tokenizer

    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if len(line.split()) > 4]
    few = pa.table({"text": lines, "label": [str(i % 2) for i in range(len(lines))]})
    rng = np.random.default_rng(0)
    for table, name in zip((few, few) if toy else texts.load(), ("short", "valid"), strict=True):
        rows = len(table) if name == "short" else min(256, len(table))
        words = np.clip(rng.lognormal(3.0, 0.5, rows), 4, 50).astype(int)  # 23 words on average, about 35 tokens
        pairs = zip(table["text"].to_pylist()[:rows], words, strict=True)
        short = pa.table({"text": [" ".join(t.split()[:n]) for t, n in pairs], "label": table["label"][:rows]})
        pq.write_table(short, folder / f"{name}.parquet")
    texts = pq.read_table(folder / "short.parquet")
    tokenizer = train_tokenizer(texts, ("text",), "wordpiece", 400 if toy else 30522, 64)
    vocabulary, labels = -(-len(tokenizer) // 64) * 64, len(set(texts["label"].to_pylist()))
    write_bert(
        folder / "encoder",
        tokenizer,
        "BertForSequenceClassification",
        vocabulary,
        num_labels=labels,
        **(TINY if toy else {}),
    )


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), toy=not torch.cuda.is_available())
