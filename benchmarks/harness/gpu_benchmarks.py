"""The benchmarks of benchmarks/gpu.py: what each one trains, with which flags, data and changes to the code."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

LOGGING_STEPS = 4
PROFILED = 4  # steps of a variant whose kernels are listed
PARTS = ("distributed", "tests", "text", "images", "variants", "image-variants", "peers")
LISTS_KERNELS = ("variants", "image-variants")  # parts whose rows have the kernels of a step


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, and so one line of a table."""

    recipe: str
    """A recipe; "passes" (gpu_passes.py); a key of SCRIPTS; or of gpu_peers.py: "trainer", "bare loop", or
    "sentence-transformers"."""
    data: str
    """random, real, on the device, cache."""
    flags: dict[str, Any]
    """Of the recipe or the script; the peers take from them what they train."""
    unit: str = "tokens"
    minimum: float | None = None
    """Units per second."""
    target: float | None = None
    steps: int = 40
    warmup: int = 12
    """Steps at the start that are not timed."""
    toy: dict[str, Any] = field(default_factory=dict)
    """Flags at toy size, for a machine without a GPU."""
    part: str = "text"
    change: str = ""
    """What is replaced in the recipe's code: a key of CHANGES in run_gpu_benchmark.py or image_variants.py."""
    beside: str = ""
    """The benchmark whose rate is divided by this one's; for a variant, the one that it changes."""
    about: str = ""
    """What the tables say of it."""
    seconds: float = 110
    """Limit of its time, with its start and its compiling."""
    needs: tuple[str, ...] = ()
    """Packages that a GPU machine may lack."""


BUDGET = "max_tokens_per_micro_batch"
SHORT = {"global_batch_size": 64, BUDGET: 32768, "mlm_probability": 0.15}
BASE = {"config": "recipes/configs/bert_base.yaml"} | SHORT
LARGE = BASE | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LARGE |= {BUDGET: 16384}
MODERN = {"config": "recipes/configs/modernbert_base.yaml"} | SHORT | {"global_batch_size": 32, "mlm_probability": 0.3}
PHOTOS = {"global_batch_size": 256, "per_device_train_batch_size": 256, "warmup_steps": 1}
RESNET = {"config": "recipes/configs/imagenet_resnet50.yaml", "dataset_name": None, "decode_size": 256} | PHOTOS
RESNET |= {"global_batch_size": 384, "per_device_train_batch_size": 384}
VIT = {"model_name_or_path": "vit", "from_scratch": True, "decode_size": 256, "min_crop_area": 0.08} | PHOTOS
VIT |= {"horizontal_flip": True, "optim": "adamw", "learning_rate": 1e-3}
FINE = {"model_name_or_path": "encoder", "train_file": "short.parquet", "validation_file": "valid.parquet"}
FINE |= {"max_length": 64, "global_batch_size": 256, BUDGET: 16384, "learning_rate": 5e-5}
FINE |= {"packing": False}
FINE_TOY = {"global_batch_size": 8}
TRAINED = {"model_name_or_path": "encoder", "train_file": "encoder/train.parquet", "max_length": 128}
TRAINED |= {"validation_file": "encoder/validation.parquet", "learning_rate": 5e-5, "global_batch_size": 256}
TRAINED |= {BUDGET: 32768}
COMPILED = {"torch_compile": True}
PACKED = {"packing": True}
DOCSTRINGS = COMPILED | {"global_batch_size": 512}  # short texts: two or three micro-batches per step
OFTEN = {"checkpointing_steps": 8}
CACHED = COMPILED | {"cache": "uint8"}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = TINY | {"max_length": 32, "vocab_size": 400, "global_batch_size": 6, BUDGET: 96}
PICTURES = {"global_batch_size": 8, "image_size": 16, "resize_size": 18, "decode_size": 18}
SMALL = {**PICTURES, "embedding_size": 8, "hidden_sizes": "8 16", "depths": "1 1", "layer_type": "basic"}


def text(about: str, data: str, flags: dict[str, Any], *limits: float) -> Benchmark:
    """Masked language modeling with the recipe; `limits` are minimum and target."""
    return Benchmark("mlm", data, flags, "tokens", *limits, toy=TEXT, about=about)


def fine_tuning(about: str, flags: dict[str, Any], recipe: str = "nlp", unit: str = "tokens") -> Benchmark:
    return Benchmark(recipe, "real", flags, unit, steps=64, warmup=32, toy=FINE_TOY, about=about)


def images(about: str, data: str, flags: dict[str, Any], toy: dict[str, Any], *limits: float) -> Benchmark:
    of = Benchmark("image_classification", data, flags, "images", *limits, toy=toy, part="images")
    return replace(of, about=about)


def variant(
    beside: str, about: str, change: str = "", part: str = "variants", seconds: float = 110, **flags: Any
) -> Benchmark:
    """A benchmark of MAIN with other flags, or with a change to the code; its kernels are listed as well."""
    of = replace(MAIN[beside], minimum=None, target=None, steps=28, warmup=12, part=part, seconds=seconds)
    return replace(of, flags=of.flags | flags, change=change, beside=beside, about=about)


def peer(recipe: str, beside: str, about: str) -> Benchmark:
    """Another loop on the work of a benchmark of MAIN."""
    return replace(MAIN[beside], recipe=recipe, minimum=None, target=None, part="peers", beside=beside, about=about)


# In each part the most important come first, because time may run out.
MAIN = {
    "bert_base": text("BERT-base, masked LM, 64 x 512 tokens, compiled", "random", BASE | COMPILED, 620e3, 750e3),
    "modernbert_base": text(
        "ModernBERT-base, masked LM, 32 x 1,024 tokens, compiled", "random", MODERN | COMPILED, 430e3, 520e3
    ),
    "fine_tuning": fine_tuning("BERT-base, texts of 35 tokens, 256 per step, one text per row, not compiled", FINE),
    "fine_tuning_packed": fine_tuning("`fine_tuning` without padding", FINE | PACKED),
    "fine_tuning_4096": fine_tuning("`fine_tuning_packed`, 4,096 tokens at once", FINE | PACKED | {BUDGET: 4096}),
    "fine_tuning_1024": fine_tuning("`fine_tuning_packed`, 1,024 tokens at once", FINE | PACKED | {BUDGET: 1024}),
    "bert_base_real": text(
        "BERT-base on docstrings of 222 tokens on average, compiled", "real", BASE | DOCSTRINGS, 620e3, 750e3
    ),
    "tagging": fine_tuning(
        "BERT-base, tags of words in windows of 128 tokens, 256 per step, packed, not compiled",
        TRAINED,
        "token_classification",
    ),
    "embeddings": fine_tuning(
        "BERT-base, 256 pairs of texts of up to 128 tokens per step, packed, not compiled",
        TRAINED,
        "embeddings",
        "pairs",
    ),
    "bert_large": text("BERT-large, masked LM, 64 x 512 tokens, compiled", "random", LARGE | COMPILED, 215e3, 250e3),
    "bert_base_eager": text("`bert_base`, not compiled", "random", BASE),
    "fine_tuning_compiled": fine_tuning("`fine_tuning`, compiled", FINE | COMPILED),
    "fine_tuning_packed_compiled": fine_tuning("`fine_tuning_packed`, compiled", FINE | PACKED | COMPILED),
    "bert_base_checkpoints": replace(
        text("`bert_base_eager` with a save every 8 steps", "random", BASE | OFTEN),
        toy=TEXT | {"checkpointing_steps": 1},
    ),
    "modernbert_base_real": text("ModernBERT-base on docstrings, compiled", "real", MODERN | DOCSTRINGS, 430e3, 520e3),
    "modernbert_base_eager": text("`modernbert_base`, not compiled", "random", MODERN),
    "resnet50_eager": images("ResNet-50, images of 224 on the device, not compiled", "on the device", RESNET, SMALL),
    "vit": images(
        "ViT-B/16, images of 224 on the device, compiled", "on the device", VIT | COMPILED, PICTURES, 3800, 4500
    ),
    "resnet50": images("ResNet-50, compiled", "on the device", RESNET | COMPILED, SMALL, 5500, 7000),
    "vit_cache": images("`vit` on JPEGs from the uint8 cache", "cache", VIT | CACHED, PICTURES),
    "resnet50_cache": images("`resnet50` on JPEGs from the uint8 cache", "cache", RESNET | CACHED, SMALL),
    "vit_eager": images("`vit`, not compiled", "on the device", VIT, PICTURES),
}
BF16_ACTIVATIONS: dict[str, Any] = {"activation_dtype": "bf16", "mixed_precision": "no"}
VARIANTS = {
    "bert_base_profiled": variant("bert_base", "nothing changed"),
    "bert_base_bf16_activations": variant("bert_base", "--activation_dtype bf16", **BF16_ACTIVATIONS),
    "modernbert_base_bf16_activations": variant("modernbert_base", "--activation_dtype bf16", **BF16_ACTIVATIONS),
    "vit_bf16_activations": variant("vit", "--activation_dtype bf16", **BF16_ACTIVATIONS),
    "bert_base_not_compiled": variant("bert_base", "layers not compiled", torch_compile=False),
    "bert_base_fixed_sizes": variant("bert_base", "compiled with fixed sizes", "fixed_sizes"),
    "bert_base_dense_head": variant("bert_base", "logits of all tokens", "dense_head"),
    "bert_base_padded_attention": variant("bert_base_real", "documents padded inside of attention", "padded_attention"),
    "bert_base_padded": variant("bert_base_real", "a document per row (--no_packing)", packing=False),
    "bert_base_plain_adamw": variant("bert_base", "AdamW not fused", "plain_optimizer"),
    "bert_base_full_precision": variant("bert_base", "TF32 instead of bf16", mixed_precision="no"),
    "bert_base_deterministic": variant("bert_base_eager", "--deterministic", deterministic=True),
    "resnet50_channels_first": variant("resnet50_eager", "--channels_last false", channels_last=False),
    "bert_base_passes": Benchmark("passes", "random", {}, part="variants", seconds=220),  # compiles twelve times
    "modernbert_base_profiled": variant("modernbert_base", "nothing changed"),
}
of_images = partial(variant, part="image-variants", seconds=150)  # compiled, which takes long for a ResNet
IMAGE_VARIANTS = {
    "resnet50_cudnn_benchmark": of_images("resnet50", "--cudnn_benchmark", cudnn_benchmark=True),
    "resnet50_whole_model": of_images("resnet50", "the whole model compiled", "whole_model"),
    "resnet50_compiled_augmentation": of_images("resnet50", "augmentation compiled", "compiled_augmentation"),
    "resnet50_pillow": of_images(
        "resnet50_cache", "no cache, JPEGs decoded by Pillow in 16 workers", cache="none", dataloader_num_workers=16
    ),
    "vit_cudnn_attention": of_images("vit", "attention by cuDNN", "cudnn_attention"),
    "vit_whole_model": of_images("vit", "the whole model compiled", "whole_model"),
    "resnet50_mixed": of_images("resnet50", "--mixup 0.2 --cutmix 1", mixup=0.2, cutmix=1),
    "resnet50_compiled_loss": of_images("resnet50", "loss compiled", "compiled_loss"),
    "resnet50_plain_sgd": of_images("resnet50", "SGD not fused", "plain_optimizer"),
    "vit_plain_adamw": of_images("vit", "AdamW not fused", "plain_optimizer"),
    "resnet50_compiled_channels_first": of_images("resnet50", "--channels_last false", channels_last=False),
}
TRAINER = "Trainer, fused AdamW"
PEERS = {
    "trainer_bert_base_compiled": peer("trainer", "bert_base", f"{TRAINER}, compiled"),
    "bare_loop_bert_base_compiled": peer("bare loop", "bert_base", "a bare loop, compiled"),
    "trainer_modernbert_base_compiled": peer("trainer", "modernbert_base", f"{TRAINER}, compiled"),
    "fine_tuning_trainer": peer("trainer", "fine_tuning", f"{TRAINER}, group_by_length"),
    "tagging_trainer": peer("trainer", "tagging", f"{TRAINER}, group_by_length"),
    "embeddings_sentence_transformers": replace(
        peer("sentence-transformers", "embeddings", "the trainer of sentence-transformers with cached gradients"),
        needs=("sentence_transformers", "datasets"),
    ),
    "trainer_bert_base": peer("trainer", "bert_base_eager", TRAINER),
    "bare_loop_bert_base": peer("bare loop", "bert_base_eager", "a bare loop"),
    "trainer_modernbert_base": peer("trainer", "modernbert_base_eager", TRAINER),
}
SAVES = {
    "saves": Benchmark(
        "saves",
        "random",
        {"beside_copy": "", "rounds": 7},
        about="a save of BERT-base that is due when the last one is done",
    )
}


def predictions(precision: str, about: str) -> Benchmark:
    """`python -m shared.predict` beside transformers' `pipeline`, in about a minute on an H100."""
    flags = {"mixed_precision": precision, "rounds": 1, "texts": 20_000, "pipeline_texts": 2000}
    flags |= {"batch_sizes": "16 64 256", "kind": "docstrings"}
    toy = {"texts": 12, "pipeline_texts": 4, "batch_sizes": "1 4"}
    return Benchmark("predictions", "real", flags, "texts", toy=toy, part="peers", about=about)


PREDICTIONS = {
    "predictions": predictions("bf16", "BERT-base in bf16, docstrings of up to 512 tokens"),
    "predictions_float32": predictions("no", "BERT-base in float32 (TF32), docstrings of up to 512 tokens"),
}
SCRIPTS = {"saves": "checkpoints.py", "predictions": "predictions.py"}  # in benchmarks/, started by gpu.py
BENCHMARKS = MAIN | VARIANTS | IMAGE_VARIANTS | PEERS | PREDICTIONS | SAVES
# Further ratios of rates: one, other.
PAIRS = (("bert_base", "bert_base_eager"), ("modernbert_base", "modernbert_base_eager"), ("vit", "vit_eager"))
PAIRS += (("resnet50", "resnet50_eager"), ("resnet50_cache", "resnet50"), ("vit_cache", "vit"))
PAIRS += (("fine_tuning_compiled", "fine_tuning_trainer"), ("modernbert_base", "trainer_modernbert_base"))
PAIRS += tuple((f"fine_tuning_{budget}", "fine_tuning_packed") for budget in (1024, 4096))
PAIRS += (("fine_tuning_packed", "fine_tuning"), ("fine_tuning_packed_compiled", "fine_tuning_compiled"))
PAIRS += tuple((name, "fine_tuning_trainer") for name in ("fine_tuning_packed", "fine_tuning_packed_compiled"))
# Minimum and target of some ratios.
LIMITS = {(name, "fine_tuning_trainer"): (2, 3) for name in MAIN if name.startswith("fine_tuning")}
LIMITS |= {("resnet50_cache", "resnet50"): (0.95, None), ("vit_cache", "vit"): (0.95, None)}
LIMITS |= {("embeddings", "embeddings_sentence_transformers"): (1.3, None)}
LIMITS |= {(name, "pipeline"): (5, None) for name in PREDICTIONS}
LIMITS |= {("bert_base", "trainer_bert_base_compiled"): (1.6, 1.9)}
LIMITS |= {
    ("modernbert_base", name): (2.5, 3.5) for name in ("trainer_modernbert_base", "trainer_modernbert_base_compiled")
}
# Minimum and target of some ratios of peak memory; less is better.
MEMORY_LIMITS = {("bert_base", "trainer_bert_base_compiled"): (0.7, 0.5)}
