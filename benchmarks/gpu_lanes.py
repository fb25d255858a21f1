"""What benchmarks/gpu.py measures, lane by lane, each through a recipe's own `main`: this is one lane's process.

    python benchmarks/gpu_lanes.py LANE FOLDER

Only what the recipes offer for replacement is replaced, and only where a lane says so: `load_data` for random data, and
the Loader for images that lie on the device already. Leaves the run in FOLDER/run, facts.json and waits.json. Without a
GPU everything has toy size.
"""

import argparse
import importlib
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.host_waits import HostWaits  # noqa: E402
from shared.config import options  # noqa: E402
from shared.monitoring import evaluation, tracking  # noqa: E402
from shared.plan.loading import Loader  # noqa: E402

GFLOP = {"resnet50": 24.5, "vit": 98.2}  # one image of 224 x 224; ViT's whole last layer would be 7.3 more
LOGGING_STEPS = 4


@dataclass(frozen=True)
class Lane:
    """One line of the table."""

    recipe: str  # or "trainer"
    data: str  # random, real, on the device, cache
    flags: dict[str, Any]
    unit: str = "tokens"
    first_bar: float | None = None
    goal: float | None = None
    steps: int = 40
    warmup: int = 12  # steps that are not timed
    toy: dict[str, Any] = field(default_factory=dict)


SHORT = {"global_batch_size": 64, "max_tokens_per_micro_batch": 32768, "mlm_probability": 0.15}
BASE = {"config": "recipes/configs/bert_base.yaml"} | SHORT
LARGE = BASE | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LARGE |= {"max_tokens_per_micro_batch": 16384}
MODERN = {"config": "recipes/configs/modernbert_base.yaml"} | SHORT | {"global_batch_size": 32, "mlm_probability": 0.3}
PHOTOS = {"global_batch_size": 256, "per_device_train_batch_size": 256, "warmup_steps": 1}
RESNET = {"config": "recipes/configs/imagenet_resnet50.yaml", "dataset_name": None, "decode_size": 256} | PHOTOS
RESNET |= {"global_batch_size": 384, "per_device_train_batch_size": 384}
VIT = {"model_name_or_path": "vit", "from_scratch": True, "decode_size": 256, "min_crop_area": 0.08} | PHOTOS
VIT |= {"horizontal_flip": True, "optim": "adamw", "learning_rate": 1e-3}
FINE = {"model_name_or_path": "encoder", "train_file": "short.parquet", "validation_file": "valid.parquet"}
FINE |= {"max_length": 64, "global_batch_size": 256, "max_tokens_per_micro_batch": 16384, "learning_rate": 5e-5}
COMPILED = {"torch_compile": True}
DOCSTRINGS = COMPILED | {"global_batch_size": 512}  # short pieces, two or three micro-batches of them
OFTEN = {"checkpointing_steps": 8}
CACHED = COMPILED | {"cache": "uint8"}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "max_length": 32}
TEXT |= {"vocab_size": 400, "global_batch_size": 6, "max_tokens_per_micro_batch": 96}
PICTURES = {"global_batch_size": 8, "image_size": 16, "resize_size": 18, "decode_size": 18}
SMALL = {**PICTURES, "embedding_size": 8, "hidden_sizes": "8 16", "depths": "1 1", "layer_type": "basic"}

# In the order of what is to be known first: time may run out.
LANES = {
    "bert_base": Lane("mlm", "random", BASE | COMPILED, "tokens", 590e3, 757e3, toy=TEXT),
    "bert_large": Lane("mlm", "random", LARGE | COMPILED, "tokens", 170e3, 200e3, toy=TEXT),
    "modernbert_base": Lane("mlm", "random", MODERN | COMPILED, "tokens", 360e3, 480e3, toy=TEXT),
    "resnet50": Lane("image_classification", "on the device", RESNET | COMPILED, "images", 4000, 5600, toy=SMALL),
    "vit": Lane("image_classification", "on the device", VIT | COMPILED, "images", 3300, 4200, toy=PICTURES),
    "fine_tuning": Lane("nlp", "real", FINE, steps=64, warmup=32, toy={"global_batch_size": 8}),
    "fine_tuning_trainer": Lane("trainer", "real", FINE, steps=64, warmup=32, toy={"global_batch_size": 8}),
    "fine_tuning_compiled": Lane("nlp", "real", FINE | COMPILED, steps=64, warmup=32, toy={"global_batch_size": 8}),
    "bert_base_eager": Lane("mlm", "random", BASE, toy=TEXT),
    "bert_base_real": Lane("mlm", "real", BASE | DOCSTRINGS, "tokens", 590e3, 757e3, toy=TEXT),
    "resnet50_cache": Lane("image_classification", "cache", RESNET | CACHED, "images", toy=SMALL),
    "bert_base_checkpoints": Lane("mlm", "random", BASE | OFTEN, toy=TEXT | {"checkpointing_steps": 1}),
    "modernbert_base_real": Lane("mlm", "real", MODERN | DOCSTRINGS, "tokens", 360e3, 480e3, toy=TEXT),
    "vit_cache": Lane("image_classification", "cache", VIT | CACHED, "images", toy=PICTURES),
    "resnet50_eager": Lane("image_classification", "on the device", RESNET, "images", toy=SMALL),
    "bert_base_deterministic": Lane("mlm", "random", BASE | {"deterministic": True}, toy=TEXT),
    "bert_base_padded": Lane("mlm", "real", BASE | DOCSTRINGS | {"packing": False}, toy=TEXT),
    "vit_eager": Lane("image_classification", "on the device", VIT, "images", toy=PICTURES),
    "modernbert_base_eager": Lane("mlm", "random", MODERN, toy=TEXT),
}


def command_line(lane: Lane, folder: Path, toy: bool) -> list[str]:
    """The recipe's flags; at toy size nothing is compiled, which takes a minute on a CPU."""
    steps = 4 if toy else lane.steps
    common = {"mixed_precision": "bf16", "max_train_steps": steps, "eval_steps": steps, "checkpointing_steps": "no"}
    common |= {"logging_steps": 1 if toy else LOGGING_STEPS, "resume_from_checkpoint": "never", "save_total_limit": 1}
    common |= {"dataloader_num_workers": 0} if toy else {"dataloader_num_workers": 8} if lane.data == "cache" else {}
    flags = common | lane.flags | (lane.toy | {"torch_compile": False} if toy else {}) | {"output_dir": folder / "run"}
    if "config" in flags:
        flags["config"] = ROOT / flags["config"]
    if lane.data == "cache":
        flags["train_dir"] = folder / "photos"
    if toy and lane.recipe == "mlm" and lane.data == "real":
        flags["train_file"] = "corpus.txt"
    for name in ("model_name_or_path", "train_file", "validation_file"):
        if name in flags:
            flags[name] = folder / flags[name]
    return [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]


def run(name: str, folder: Path, toy: bool) -> None:
    """Train a lane in this process; its figures are then in the folder."""
    lane = LANES[name]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ACCELERATE_RECIPES_CACHE"] = str(folder.parent / "cache")
    if toy:
        (folder / "corpus.txt").write_text((ROOT / "CONTRIBUTING.md").read_text())
    if lane.recipe in ("nlp", "trainer"):
        prepare_texts(folder, toy)
    if "vit" in name:
        prepare_vit(folder / "vit", toy)
    if lane.data == "cache":
        prepare_photos(folder / "photos", toy)
    if lane.recipe == "trainer":
        from benchmarks.gpu_trainer import train

        train(lane, folder, toy)
        return
    recipe = importlib.import_module(f"recipes.{lane.recipe}")
    config = options.parse(recipe.Config, command_line(lane, folder, toy))
    load_data = recipe.load_data
    if lane.data in ("random", "on the device"):
        load_data = random_documents if lane.recipe == "mlm" else random_images

    def load_and_note(config: Any) -> Any:
        found = load_data(config)
        (folder / "facts.json").write_text(json.dumps(facts(name, config, found[0], toy)))
        return found

    with ExitStack() as stack:
        replace = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        replace(recipe, "load_data", load_and_note)
        if lane.data == "on the device":
            replace(recipe, "Loader", Resident)
        # Neither is part of a step, and the packages that they need may be missing here.
        replace(evaluation.Metrics, "compute", lambda self, *_: dict.fromkeys(self.names, 0.0))
        replace(tracking, "draw_curves", lambda *_: None)
        started = time.perf_counter()
        waits = stack.enter_context(HostWaits(recipe))
        recipe.main(config)
    summary = {"steps": waits.steps, "where": waits.where.most_common(8), "seconds": time.perf_counter() - started}
    (folder / "waits.json").write_text(json.dumps(summary))


def facts(name: str, config: Any, train: Any, toy: bool) -> dict[str, float]:
    """Operations of forward and backward pass per real token or image: docs/performance.md has the formula."""
    if not hasattr(config, "max_length"):
        image = next((value for key, value in GFLOP.items() if name.startswith(key)), 0.0)
        return {"operations": 0.0 if toy else image * 1e9, "samples": len(train)}
    lengths = np.asarray(train.lengths, float)
    mean, seen = lengths.mean(), (lengths**2).sum() / lengths.sum()  # tokens, and tokens that a token attends to
    width, layers, inside, vocabulary = sizes(config)
    modern = getattr(config, "model_type", "") == "modernbert"
    weights = 4 * width**2 + (3 if modern else 2) * width * inside
    attended = sum(min(seen, 129.0) if modern and layer % 3 else seen for layer in range(layers))
    hidden = float(train.masked.sum() / lengths.sum()) if hasattr(train, "masked") else 0.0
    operations = 6 * layers * weights + 12 * width * attended + 6 * hidden * (width**2 + width * vocabulary)
    return {"operations": operations, "samples": len(lengths), "mean_length": mean}


def sizes(config: Any) -> tuple[int, int, int, int]:
    """Width, layers, width inside a layer and vocabulary of a lane's encoder."""
    if not config.model_name_or_path:
        return config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size
    stored = json.loads((Path(config.model_name_or_path) / "config.json").read_text())
    return stored["hidden_size"], stored["num_hidden_layers"], stored["intermediate_size"], stored["vocab_size"]


class Resident(Loader):
    """The first batch of each size, on the device for good: what is measured is the step, and not its input."""

    batches: dict[int, Any]

    def micro_batches(self, step: int) -> Any:
        vars(self).setdefault("batches", {})
        for micro_batch in self.plan.micro_batches(step):
            rows = len(micro_batch.samples)
            if rows not in self.batches:
                self.batches[rows] = self.one(micro_batch)[1]
            yield micro_batch, dict(self.batches[rows])


def random_documents(config: Any) -> tuple[Any, Any, Any]:
    """Documents of exactly --max_length tokens, drawn at random, in a memory-mapped file; and a tokenizer for them."""
    from shared.text.masking import masking_for
    from shared.text.token_files import MaskedDocuments, TokenFile, special_tokens_around

    tokenizer = word_tokenizer(config.vocab_size)
    folder, around = Path(config.output_dir).parent / "random", special_tokens_around(tokenizer)
    folder.mkdir(exist_ok=True)
    documents, room = 4 * config.global_batch_size, config.max_length - sum(map(len, around))
    tokens = np.random.default_rng(0).integers(5, config.vocab_size, documents * room).astype(np.uint16)
    tokens.tofile(folder / "tokens.uint16")
    (np.arange(documents + 1) * room).tofile(folder / "offsets")
    (folder / "digest").write_text("random")
    masking = masking_for(tokenizer, config.mlm_probability)
    parts = [np.arange(4, documents), np.arange(4)]
    arguments = (config.max_length, around, masking, config.seed)
    train, held_out = (MaskedDocuments(TokenFile(folder), part, *arguments) for part in parts)
    return train, held_out, tokenizer


def word_tokenizer(size: int) -> Any:
    """A tokenizer of `size` made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, "a", *(f"w{i}" for i in range(size - 6))]
    fast = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=fast, **dict(zip(names, special, strict=True)))


def random_images(config: Any) -> tuple[Any, Any, Any, Any]:
    """Images of random bytes in a thousand classes, decoded."""
    from shared.augmentation.augmentation import Augmentation
    from shared.images.images import prepare
    from shared.images.sources import Source
    from shared.models.image_models import load_processor

    processor, geometry = load_processor(config)
    rng, count, side = np.random.default_rng(0), config.global_batch_size + 8, config.decode_size
    pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    names = tuple(f"class {i}" for i in range(1000))
    whole = Source("random images", names, rng.integers(0, 1000, count), np.arange(count), arrays=pixels)
    train, held_out = (prepare(whole.take(part), config, side) for part in (np.arange(8, count), np.arange(8)))
    return train, held_out, processor, Augmentation.of_run(config, geometry)


def prepare_photos(folder: Path, toy: bool) -> None:
    """JPEGs in two classes; each of 100 stands there under eight names, because making one takes long."""
    from benchmarks.loading import write_photos

    write_photos(folder, 16 if toy else 100)
    for photo in [] if toy else sorted(folder.rglob("*.jpg")):
        for copy in range(7):
            photo.with_stem(f"{photo.stem}-{copy}").hardlink_to(photo)


def prepare_vit(folder: Path, toy: bool) -> None:
    """The config of ViT-B/16 and its processor."""
    from transformers import ViTConfig, ViTImageProcessorPil

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    small |= {"image_size": 16, "patch_size": 8}
    ViTConfig(**small if toy else {}).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16} if toy else None).save_pretrained(folder)


def prepare_texts(folder: Path, toy: bool) -> None:
    """BERT-base with random weights and a tokenizer, and docstrings cut to the lengths of short texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import BertConfig, BertForSequenceClassification

    from shared.datasets import demo_texts
    from shared.text.tokenized import train_tokenizer

    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if len(line.split()) > 4]
    few = pa.table({"text": lines, "label": [str(i % 2) for i in range(len(lines))]})
    rng = np.random.default_rng(0)
    for table, name in zip((few, few) if toy else demo_texts.load(), ("short", "valid"), strict=True):
        rows = len(table) if name == "short" else min(256, len(table))
        words = np.clip(rng.lognormal(3.0, 0.5, rows), 4, 50).astype(int)  # 23 on average, some 35 tokens
        pairs = zip(table["text"].to_pylist()[:rows], words, strict=True)
        short = pa.table({"text": [" ".join(t.split()[:n]) for t, n in pairs], "label": table["label"][:rows]})
        pq.write_table(short, folder / f"{name}.parquet")
    texts = pq.read_table(folder / "short.parquet")
    tokenizer = train_tokenizer(texts, ("text",), "wordpiece", 400 if toy else 30522, 64)
    small = {key: TEXT[key] for key in list(TEXT)[:4]} if toy else {}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    vocabulary, labels = -(-len(tokenizer) // 64) * 64, len(set(texts["label"].to_pylist()))
    encoder = BertConfig(vocab_size=vocabulary, num_labels=labels, **small, **without_dropout)
    BertForSequenceClassification(encoder).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=list(LANES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    run(arguments.lane, arguments.folder, toy=not torch.cuda.is_available())


if __name__ == "__main__":
    main()
