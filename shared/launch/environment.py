"""What a launcher's environment variables ask Accelerate for, and which of them a recipe refuses.

`accelerate launch` turns most keys of its YAML into variables that Accelerate reads later. Some of them change what is
trained behind the loop's back, and some have no effect on the launch at hand; both are refused before the run starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import UserError

TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # as Accelerate reads them
PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Refused:
    """A variable that is refused unless it has one of the `harmless` values, in lower case."""

    key: str
    """What sets it in the launcher's YAML; empty where a user does."""
    why: str
    """What it would do, and what to do instead."""
    harmless: tuple[str, ...] = FALSE


_ENGINE = "the loop is made for DDP and FSDP2: use accelerate_configs/multi_gpu.yaml or fsdp.yaml"
_NOT_COMPILED = "it has no effect without a dynamo_backend, which is refused as well: remove it and use --torch_compile"
_COMPILED = "Accelerate would compile the model and save its weights under names that from_pretrained does not know"
_FSDP1 = "FSDP2 ignores it: remove it"
_SHARDED = "a recipe shards each repeated layer, whatever the model: remove it"
_TPU = "only TPUs have it: remove it, and use --mixed_precision"

REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Refused(
        "gradient_accumulation_steps",
        "it divides the loss behind the loop's back; remove it there and use --gradient_accumulation_steps",
        ("1",),
    ),
    "ACCELERATE_GRADIENT_CLIPPING": Refused(
        "gradient_clipping", "only DeepSpeed has it: remove it and use --max_grad_norm", ("none",)
    ),
    "ACCELERATE_DYNAMO_BACKEND": Refused(
        "dynamo_config: dynamo_backend", f"{_COMPILED}: remove it and use --torch_compile", ("no",)
    ),
    "ACCELERATE_DYNAMO_MODE": Refused("dynamo_config: dynamo_mode", _NOT_COMPILED, ("default",)),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": Refused("dynamo_config: dynamo_use_fullgraph", _NOT_COMPILED),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": Refused("dynamo_config: dynamo_use_dynamic", _NOT_COMPILED),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": Refused(
        "dynamo_config: dynamo_use_regional_compilation", _NOT_COMPILED
    ),
    "ACCELERATE_USE_DEEPSPEED": Refused("distributed_type: DEEPSPEED", _ENGINE),
    "ACCELERATE_USE_MEGATRON_LM": Refused("distributed_type: MEGATRON_LM", _ENGINE),
    "ACCELERATE_USE_SAGEMAKER": Refused("compute_environment: AMAZON_SAGEMAKER", _ENGINE),
    "ACCELERATE_USE_PARALLELISM_CONFIG": Refused(
        "parallelism_config",
        "processes that share a sample would each train on other ones here; remove it: all processes share the data",
    ),
    "ACCELERATE_TORCH_DEVICE": Refused(
        "", "every process would use that one device: unset it, and use CUDA_VISIBLE_DEVICES or ACCELERATE_USE_CPU", ()
    ),
    "ACCELERATE_DOWNCAST_BF16": Refused("downcast_bf16", _TPU),
    "ACCELERATE_IN_TPU_POD": Refused("tpu_use_cluster", _TPU),
    "FSDP_IGNORED_MODULES": Refused(
        "fsdp_ignored_modules", "each process would train those modules on its own samples: remove it", ("", "none")
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": Refused(
        "fsdp_activation_checkpointing", "it says --gradient_checkpointing in another way: remove it and use the flag"
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": Refused(
        "fsdp_activation_checkpointing_offload", "--gradient_checkpointing keeps what is left on the GPU: remove it"
    ),
    "FSDP_STATE_DICT_TYPE": Refused(
        "fsdp_state_dict_type",
        "checkpoints are sharded and model/ holds the weights in full, whatever it says: give SHARDED_STATE_DICT",
        ("sharded_state_dict",),
    ),
    "FSDP_SHARDING_STRATEGY": Refused(
        "fsdp_sharding_strategy",
        "FSDP2 ignores it: remove it and use fsdp_reshard_after_forward",
        ("full_shard", "1"),
    ),
    "FSDP_BACKWARD_PREFETCH": Refused("fsdp_backward_prefetch", _FSDP1, ("none", "no_prefetch", "backward_pre")),
    "FSDP_FORWARD_PREFETCH": Refused("fsdp_forward_prefetch", _FSDP1),
    "FSDP_USE_ORIG_PARAMS": Refused("fsdp_use_orig_params", _FSDP1, TRUE),
    "FSDP_SYNC_MODULE_STATES": Refused("fsdp_sync_module_states", _FSDP1, TRUE),
    "FSDP_AUTO_WRAP_POLICY": Refused("fsdp_auto_wrap_policy", _SHARDED, ("none", "transformer_based_wrap")),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": Refused("fsdp_transformer_layer_cls_to_wrap", _SHARDED, ("", "none")),
    "FSDP_MIN_NUM_PARAMS": Refused("fsdp_min_num_params", _SHARDED, ("100000000",)),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": Refused(
        "fsdp_cpu_ram_efficient_loading",
        "only one process would load the weights, and none sends them to the others: set it to false",
    ),
}

NEEDS = {
    "FSDP_": ("ACCELERATE_USE_FSDP", "distributed_type: FSDP"),
    "PARALLELISM_CONFIG_": ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism_config"),
    "MEGATRON_LM_": ("ACCELERATE_USE_MEGATRON_LM", "distributed_type: MEGATRON_LM"),
    "ACCELERATE_DEEPSPEED_": ("ACCELERATE_USE_DEEPSPEED", "distributed_type: DEEPSPEED"),
    "ACCELERATE_SAGEMAKER_": ("ACCELERATE_USE_SAGEMAKER", "compute_environment: AMAZON_SAGEMAKER"),
}
"""Variables, by how they begin, that only the launches have an effect on which have that other one."""

ANSWERS = {
    "ACCELERATE_MIXED_PRECISION": PRECISIONS,  # Accelerate takes FP16 in capitals for no precision at all
    "ACCELERATE_USE_FSDP": ("true", "false"),  # and 1 for no
    "ACCELERATE_USE_CPU": TRUE + FALSE,
    "ACCELERATE_DEBUG_MODE": TRUE + FALSE,
    "ACCELERATE_CPU_AFFINITY": TRUE + FALSE,
    "FORK_LAUNCHED": TRUE + FALSE,
}
"""Variables that a recipe heeds, and what they may say."""


def check(environment: Mapping[str, str]) -> None:
    """Refuse a launcher's variable that would change the run behind the recipe's back, or that has no effect.

    Raises:
        UserError: names the variable, its value, the key of the launcher's YAML, and the fix.
    """
    for name, answers in ANSWERS.items():
        value = environment.get(name, answers[0])
        if value not in answers and not (answers != PRECISIONS and value.lower() in answers):
            raise UserError(f"{name} is {value!r}: expected one of {', '.join(answers)}")
    for name, refused in REFUSED.items():
        if name in environment and environment[name].lower() not in refused.harmless:
            where = f" ({refused.key} in the launcher's YAML)" if refused.key else ""
            raise UserError(f"{name} is {environment[name]}{where}: {refused.why}")
    for start, (other, key) in NEEDS.items():
        if environment.get(other, "false").lower() not in TRUE:
            for name in sorted(environment):
                if name.startswith(start):
                    raise UserError(f"{name} is {environment[name]}, which has no effect without {key}: remove it")


def says_yes(environment: Mapping[str, str], name: str) -> bool:
    """Whether Accelerate reads a variable as a yes."""
    return environment.get(name, "").lower() in TRUE
