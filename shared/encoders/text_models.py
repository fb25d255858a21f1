"""Text encoders: new ones, adapters (--lora_rank), and what other flags and the device change in one.

`--lora_rank` puts low-rank adapters (LoRA) of the PEFT library into a pretrained model. An adapted linear layer W
computes W x + alpha / rank * B A x, with A [rank, in] and B [out, rank] (Hu et al., arXiv:2106.09685). Only A, B and
the head of a classifier are trained. B begins with zeros, so the first step computes the pretrained model. The defaults
follow Biderman et al. (arXiv:2405.09673), who recommend adapters in all linear layers, alpha twice the rank, and a
learning rate as high as training is stable.
"""

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from shared.config.options import Options
from shared.encoders.attention import ON_CPU, ON_GPU, use_attention, use_cpu_dropout
from shared.errors import UserError, listed, say
from shared.models.linear_layers import use_fast_products, without_tf32
from shared.models.transformers_models import check_loads
from shared.options.data_options import ModelOptions
from shared.options.text_options import TextOptions
from shared.plan.draws import hash64
from shared.pretrained.tokenizers import OFFSET_POSITIONS
from shared.speed.first_token import shorten_last_layer
from shared.speed.layers import compile_layers, use_activation_dtype

ADAPTER = "default"  # PEFT's own name for an adapter; its files do not contain it
DRAW = 3  # the last word of the hash that seeds A; shared/plan/draws.py uses 1 and 2
TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}  # of PEFT, by end of the class


def adapt_to_device(accelerator: Any, config: ModelOptions, model: nn.Module) -> nn.Module:
    """Adapt the model to its device and the flags; call it before creating the optimizer and `prepare`.

    Raises:
        UserError: see `check_loads`, `add_adapters`, `use_activation_dtype` and `compile_layers`.
    """
    check_loads(model)
    shorten_last_layer(model)
    attend_to_all(accelerator, model)
    if accelerator.device.type == "cuda":
        use_attention(model, ON_GPU)
        compute_exact_angles(model)
    elif accelerator.device.type == "cpu":
        use_attention(model, ON_CPU)
    add_adapters(config, model)  # zero at first, so a check after this would not see a layer that passes over them
    if accelerator.device.type == "cpu":
        use_cpu_dropout(model)
    use_activation_dtype(config, model)
    use_fast_products(model)
    return compile_layers(config, model)


def attend_to_all(accelerator: Any, model: Any) -> None:
    """Make a BigBird attend to all tokens, also in the exported config.

    With block-sparse attention, the first short batch switches the model to full attention for all later batches, so
    the result would depend on the order of the batches in a process.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        own = next(module for module in model.modules() if hasattr(module, "set_attention_type"))
        own.set_attention_type("original_full")
        config.attention_type = "original_full"
        accelerator.print(
            f"{type(model).__name__} attends to all tokens: block-sparse attention depends on the order of the batches"
        )


def compute_exact_angles(model: nn.Module) -> None:
    """Compute rotary angles without TF32: in transformers 5.17 they are a matrix product."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = without_tf32()(module.forward)


def new_encoder(auto_class: str, config: Any, tokenizer: Any, vocab_multiple: int = 1, **head: Any) -> nn.Module:
    """A model of --model_type with new weights, for `tokenizer`, without dropout.

    Args:
        auto_class: the auto class of transformers, such as AutoModelForMaskedLM.
        config: the recipe's config, with the sizes.
        vocab_multiple: the number of embedding rows is rounded up to a multiple of this number.
        head: entries of the model's config for its head.

    Raises:
        UserError: the sizes do not fit each other.
    """
    import transformers

    rotary = config.model_type == "modernbert"
    size, heads, twice = config.hidden_size, config.num_attention_heads, "twice " * rotary
    if size % (2 * heads if rotary else heads):  # rotary positions turn pairs of numbers
        raise UserError(f"--hidden_size {size} is not a multiple of {twice}--num_attention_heads {heads}: change one")
    skipped = tokenizer.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
    own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if rotary:
        own = {"classifier_pooling": "mean"} | ({"global_rope_theta": theta} if (theta := config.rope_theta) else {})
    sizes = transformers.AutoConfig.for_model(
        config.model_type,
        vocab_size=-(-len(tokenizer) // vocab_multiple) * vocab_multiple,
        hidden_size=size,
        intermediate_size=config.intermediate_size or size * (2 if rotary else 4),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        max_position_embeddings=config.max_length + skipped,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **(own | head),
    )
    return getattr(transformers, auto_class).from_config(sizes)


def add_adapters(config: Options, model: nn.Module) -> None:
    """Put an adapter into each layer of --lora_targets; freeze all other weights except the head of a classifier.

    A is drawn from --seed, the same on every process. Without --lora_rank the model is unchanged.

    Raises:
        UserError: the model is not of transformers, or see `layers_to_adapt`.
    """
    if not isinstance(config, TextOptions) or (rank := config.lora_rank) is None:
        return
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    if not isinstance(model, PreTrainedModel):
        raise UserError(f"--lora_rank {rank}: a {type(model).__name__} is not a model of transformers: leave it out")
    head = head_of(model)
    layers = layers_to_adapt(model, head, config.lora_targets)
    settings = LoraConfig(
        base_model_name_or_path=config.model_name_or_path,
        revision=config.revision,
        task_type=next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None),
        r=rank,
        lora_alpha=2 * rank if config.lora_alpha is None else config.lora_alpha,
        lora_dropout=config.lora_dropout or 0.0,
        target_modules=list(layers),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(hash64(config.seed, DRAW) >> 1)
        inject_adapter_in_model(settings, model, ADAPTER)
    assert [name for name, _ in adapted_layers(model)] == list(layers), "PEFT adapts exactly these layers"
    for _, layer in adapted_layers(model):
        layer.cast_input_dtype_enabled = False  # A and B compute in the dtype of their input, as other layers do
    for name in head:
        model.get_submodule(name).requires_grad_(True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    # For the export. Before, PEFT would wrap the modules of the head.
    settings.modules_to_save, settings.inference_mode = head or None, True
    made: Any = model
    made.merge_adapters = merge_adapters
    where = f"adapters of {len(layers)} layers" + (f" and the head ({listed(head)})" if head else "")
    say(f"--lora_rank {rank}: {trained:,} of {total:,} weights are trained: {where}")


def head_of(model: Any) -> list[str]:
    """The names of the modules of a classifier's head, and of the pooler that feeds only the head.

    Empty for an encoder without a head, and for a model that predicts tokens: its head is pretrained, and is often tied
    to the embeddings.
    """
    base = model.base_model
    if base is model or model.get_output_embeddings() is not None:
        return []
    found = [name for name, module in model.named_children() if base not in module.modules()]
    found += [name for name, module in model.named_modules() if module is getattr(base, "pooler", None)]
    return [name for name in found if next(model.get_submodule(name).parameters(), None) is not None]


def layers_to_adapt(model: Any, head: Sequence[str], patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """The linear layers of the encoder, without `head`, that one of the patterns names; None: all of them.

    A pattern is the end of a layer's name, such as `query`, `attention.self.query` or `layers.[0-5].*`. Wildcards are
    those of `fnmatch`.

    Raises:
        UserError: a pattern names no such layer, or the encoder has none.
    """
    from transformers.pytorch_utils import Conv1D

    inside = {*model.base_model.modules()}.difference(*(model.get_submodule(name).modules() for name in head))
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module in inside
    }
    kind = type(model).__name__
    if not layers:
        raise UserError(f"--lora_rank: the encoder of a {kind} has no linear layers to adapt: leave it out")
    chosen: set[str] = set()
    for pattern in patterns or ("*",):
        if not (found := {name for name in layers if fnmatchcase(f".{name}", f"*.{pattern}")}):
            names = listed(list(dict.fromkeys(name.rpartition(".")[2] for name in layers)))
            raise UserError(
                f"--lora_targets {pattern}: no linear layer of the encoder of a {kind} has such a name: its layers are "
                f"called {names}"
            )
        chosen |= found
    return {name: layer for name, layer in layers.items() if name in chosen}


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers of PEFT in a model, with their names; none without --lora_rank."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def merge_adapters(model: Any) -> Callable[[Path], None]:
    """Add each adapter to the weights of its layer and remove it, so that the model is one of transformers again.

    Every process calls this, because FSDP shards the weights.

    Returns:
        Writes the two files of PEFT, with the adapters as they were, into a folder.
    """
    from torch.distributed.tensor import DTensor

    head = head_of(model)
    weights = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        ).contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name or name.startswith(tuple(f"{module}." for module in head))
    }
    settings = model.peft_config[ADAPTER].to_dict()
    # PEFT's own method writes sets in an order that differs from run to run.
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    for name, layer in adapted_layers(model):
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config, model.merge_adapters

    def save(folder: Path) -> None:
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")

    return save
