"""What a launch with FSDP must not be, in addition to shared/processes/rules.py: rules of settings that allow FSDP."""

from shared.config.options import Rule
from shared.processes import rules
from shared.processes.rules import TRUE, Refused

_FSDP1 = "FSDP2 ignores it: remove it"
_SHARDED = "a recipe shards each repeated layer, whatever the model: remove it"

REFUSED = {
    "FSDP_IGNORED_MODULES": Refused(
        "fsdp_ignored_modules", "each process would train these modules on its own samples: remove it", ("", "none")
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": Refused(
        "fsdp_activation_checkpointing", "it does the same as a flag: remove it and use --gradient_checkpointing"
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": Refused(
        "fsdp_activation_checkpointing_offload", "--gradient_checkpointing does not offload activations: remove it"
    ),
    "FSDP_STATE_DICT_TYPE": Refused(
        "fsdp_state_dict_type",
        "checkpoints are always sharded, and model/ always holds full weights: set SHARDED_STATE_DICT",
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

RULES = (
    Rule(lambda it: it.sharded and rules.first_refused(REFUSED, it.env), "{found}"),
    Rule(  # with 1 Accelerate offloads, but without gloo for tensors on the host
        lambda it: it.env.get("FSDP_OFFLOAD_PARAMS", "true") not in ("true", "false"),
        "FSDP_OFFLOAD_PARAMS is {it.env[FSDP_OFFLOAD_PARAMS]!r}: expected one of true, false",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and not rules.cpu_requested(it.env),
        "distributed_type FSDP needs a GPU, and there is none: use accelerate_configs/multi_cpu.yaml, or set "
        "ACCELERATE_USE_CPU=true in the environment to try FSDP out on a CPU",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and it.processes == 1,
        "distributed_type FSDP on a CPU with one process would shard nothing: start several processes, or use "
        "accelerate_configs/cpu.yaml",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and rules.is_true(it.env, "FSDP_OFFLOAD_PARAMS"),
        "FSDP_OFFLOAD_PARAMS is true (fsdp_offload_params in the launcher's YAML), which has no effect on a CPU, where "
        "the parameters are on the host anyway: remove it",
    ),
    Rule(
        lambda it: it.sharded and it.precision == "fp16",
        "mixed_precision fp16 does not work under FSDP (its loss scaler fails with fused AdamW): use bf16",
    ),
    Rule(
        lambda it: it.sharded and it.config.optim != "adamw" and it.config.optim,
        "--optim {found} does not work under FSDP, which recipes support only with AdamW: use --optim adamw, or DDP",
    ),
    Rule(
        lambda it: it.sharded and it.env.get("FSDP_VERSION", "1") != "2",
        "fsdp_version 1 is not supported: set fsdp_version: 2, as accelerate_configs/fsdp.yaml does",
    ),
)
