"""The benchmarks of benchmarks/gpu.py: which recipe each one trains, with which flags and data."""

from dataclasses import dataclass, field
from typing import Any

LOGGING_STEPS = 4


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, and so one line of the table."""

    recipe: str  # or "trainer"
    data: str  # random, real, on the device, cache
    flags: dict[str, Any]
    unit: str = "tokens"
    minimum: float | None = None  # units per second
    target: float | None = None
    steps: int = 40
    warmup: int = 12  # steps at the start that are not timed
    toy: dict[str, Any] = field(default_factory=dict)  # flags at toy size, for a machine without a GPU


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
FINE_TOY = {"global_batch_size": 8}
COMPILED = {"torch_compile": True}
DOCSTRINGS = COMPILED | {"global_batch_size": 512}  # short texts: two or three micro-batches per step
OFTEN = {"checkpointing_steps": 8}
CACHED = COMPILED | {"cache": "uint8"}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "max_length": 32}
TEXT |= {"vocab_size": 400, "global_batch_size": 6, "max_tokens_per_micro_batch": 96}
PICTURES = {"global_batch_size": 8, "image_size": 16, "resize_size": 18, "decode_size": 18}
SMALL = {**PICTURES, "embedding_size": 8, "hidden_sizes": "8 16", "depths": "1 1", "layer_type": "basic"}

# The most important come first, because time may run out.
BENCHMARKS = {
    "bert_base": Benchmark("mlm", "random", BASE | COMPILED, "tokens", 590e3, 757e3, toy=TEXT),
    "bert_large": Benchmark("mlm", "random", LARGE | COMPILED, "tokens", 170e3, 200e3, toy=TEXT),
    "modernbert_base": Benchmark("mlm", "random", MODERN | COMPILED, "tokens", 360e3, 480e3, toy=TEXT),
    "resnet50": Benchmark("image_classification", "on the device", RESNET | COMPILED, "images", 4000, 5600, toy=SMALL),
    "vit": Benchmark("image_classification", "on the device", VIT | COMPILED, "images", 3300, 4200, toy=PICTURES),
    "fine_tuning": Benchmark("nlp", "real", FINE, steps=64, warmup=32, toy=FINE_TOY),
    "fine_tuning_trainer": Benchmark("trainer", "real", FINE, steps=64, warmup=32, toy=FINE_TOY),
    "fine_tuning_compiled": Benchmark(
        "nlp", "real", FINE | COMPILED, steps=64, warmup=32, toy={"global_batch_size": 8}
    ),
    "bert_base_eager": Benchmark("mlm", "random", BASE, toy=TEXT),
    "bert_base_real": Benchmark("mlm", "real", BASE | DOCSTRINGS, "tokens", 590e3, 757e3, toy=TEXT),
    "resnet50_cache": Benchmark("image_classification", "cache", RESNET | CACHED, "images", toy=SMALL),
    "bert_base_checkpoints": Benchmark("mlm", "random", BASE | OFTEN, toy=TEXT | {"checkpointing_steps": 1}),
    "modernbert_base_real": Benchmark("mlm", "real", MODERN | DOCSTRINGS, "tokens", 360e3, 480e3, toy=TEXT),
    "vit_cache": Benchmark("image_classification", "cache", VIT | CACHED, "images", toy=PICTURES),
    "resnet50_eager": Benchmark("image_classification", "on the device", RESNET, "images", toy=SMALL),
    "bert_base_deterministic": Benchmark("mlm", "random", BASE | {"deterministic": True}, toy=TEXT),
    "bert_base_padded": Benchmark("mlm", "real", BASE | DOCSTRINGS | {"packing": False}, toy=TEXT),
    "vit_eager": Benchmark("image_classification", "on the device", VIT, "images", toy=PICTURES),
    "modernbert_base_eager": Benchmark("mlm", "random", MODERN, toy=TEXT),
}
