"""What a launch must not combine, as a table: each row says when a launch is refused, and with which words.

A row stands here if the launch would silently train something else, or waits for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config.options import Options, Rule
from shared.errors import UserError
from shared.launch.environment import cpu_requested, is_true, uses_fsdp

TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
NEEDED_BY_SEVERAL = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """What the rules look at: the settings, the environment variables, and the device."""

    config: Options
    env: Mapping[str, str]
    on_cpu: bool

    @property
    def precision(self) -> str:
        """The mixed precision of the run."""
        chosen = self.config.mixed_precision
        return self.env.get("ACCELERATE_MIXED_PRECISION", "no") if chosen == "launcher" else chosen

    @property
    def sharded(self) -> bool:
        """Whether the run uses FSDP."""
        return uses_fsdp(self.env)

    @property
    def processes(self) -> int:
        """The number of processes of the launch."""
        return int(self.env.get("WORLD_SIZE", 1))

    def has(self, field: str) -> Any:
        """A setting that only some recipes have; None in the others."""
        return getattr(self.config, field, None)

    def lost_precision(self) -> str | None:
        """The mixed precision that notebook_launcher set, and Accelerate does not read."""
        lost = "NPROC" in self.env and "ACCELERATE_MIXED_PRECISION" not in self.env
        value = self.env.get("MIXED_PRECISION", "no") if lost and self.config.mixed_precision == "launcher" else "no"
        return None if value == "no" else value

    def separate_tasks(self) -> str | None:
        """The variable of mpirun or srun that counts several tasks, if these cannot find each other, with its value."""
        several = (f"{name} is {self.env[name]}" for name in TASK_COUNTS if int(self.env.get(name, 1)) > 1)
        return None if "WORLD_SIZE" in self.env else next(several, None)

    def lacking(self) -> str:
        """The variables without which several processes do not find each other."""
        return ", ".join(name for name in NEEDED_BY_SEVERAL if name not in self.env) if self.processes > 1 else ""


RULES = (
    Rule(
        Launch.lost_precision,
        "mixed_precision {found} of notebook_launcher never reaches Accelerate: use the recipe's "
        'Config(mixed_precision="{found}") instead',
    ),
    Rule(
        Launch.separate_tasks,
        "{found}, as set by mpirun or srun, but these processes cannot find each other: start one task per machine, "
        " and in it `torchrun` or `accelerate launch`",
    ),
    Rule(
        Launch.lacking,
        "WORLD_SIZE is {it.processes} without {found}: the processes would not find each other; set these too, or use "
        "torchrun or accelerate launch",
    ),
    Rule(
        lambda it: it.on_cpu and it.precision == "fp16",
        "mixed_precision fp16 needs a GPU (on a CPU Accelerate would silently train in full precision): use "
        "--mixed_precision no or bf16",
    ),
    Rule(
        lambda it: it.precision != "no" and it.config.activation_dtype,
        "--activation_dtype {found} computes without autocast, but mixed_precision is {it.precision}: add "
        "--mixed_precision no, or leave it out",
    ),
    Rule(
        lambda it: it.precision == "fp16" and it.has("chunked_loss"),
        "--chunked_loss does not work with mixed_precision fp16, whose loss is scaled too late for it: use "
        "--mixed_precision bf16 or no",
    ),
    Rule(
        lambda it: it.precision == "fp8",
        "mixed_precision fp8 is not supported: use --mixed_precision bf16",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and not cpu_requested(it.env),
        "distributed_type FSDP needs a GPU, and there is none: use accelerate_configs/multi_cpu.yaml, or set "
        "ACCELERATE_USE_CPU=true in the environment to try FSDP out on a CPU",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and it.processes == 1,
        "distributed_type FSDP on a CPU with one process would shard nothing: start several processes, or use "
        "accelerate_configs/cpu.yaml",
    ),
    Rule(
        lambda it: it.sharded and it.on_cpu and is_true(it.env, "FSDP_OFFLOAD_PARAMS"),
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


def refuse(launch: Launch) -> None:
    """Check a launch by all rules, in their order.

    Raises:
        UserError: the message of the first rule that finds something.
    """
    for rule in (*RULES, *launch.config.RULES):
        if found := rule.when(launch):
            raise UserError(rule.message.format(found=found, it=launch))
