"""What a launch must not be, as a table of rules about its settings and the variables that a launcher sets.

`accelerate launch` turns most keys of its YAML into variables that Accelerate reads later. Some of them change the
training in ways that the training loop cannot see. A recipe refuses these, and any launch that would silently train
something else, or wait for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shared.config.options import Options, Rule
from shared.errors import UserError

TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # as in Accelerate
PRECISIONS = ("no", "fp16", "bf16", "fp8")


def refused(name: str, why: str, key: str = "", harmless: tuple[str, ...] = FALSE) -> Rule:
    """Refuse a variable, except with one of the `harmless` values (in lower case).

    `why` says what it would do, and the fix; `key` sets it in the launcher's YAML.
    """
    where = f" ({key} in the launcher's YAML)" if key else ""
    return Rule(
        lambda it: name in it.env and it.env[name].lower() not in harmless and f"{name} is {it.env[name]}",
        f"{{found}}{where}: {why}",
    )


def one_of(values: tuple[str, ...], name: str, any_case: bool = True) -> Rule:
    """Refuse other values of a variable that a recipe reads."""

    def found(it: Launch) -> str:
        value = it.env.get(name, values[0])
        return "" if (value.lower() if any_case else value) in values else f"{name} is {value!r}"

    return Rule(found, f"{{found}}: expected one of {', '.join(values)}")


USE_CPU = "ACCELERATE_USE_CPU"  # set by use_cpu in the launcher's YAML, or by debug_launcher
USE_FSDP = "ACCELERATE_USE_FSDP"  # set by distributed_type: FSDP there; a rule refuses all but true and false


def is_true(environment: Mapping[str, str], name: str) -> bool:
    """Whether Accelerate reads a variable as true."""
    return environment.get(name, "").lower() in TRUE


SHARE_GPU = "ACCELERATE_RECIPES_SHARE_GPU_FOR_TESTS"
"""Environment variable: 1 lets the processes of a machine share its GPUs, over gloo, because NCCL refuses that. It
serves the tests of the multi-process code on machines with one GPU."""
SWITCHES = (USE_CPU, "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY", "FORK_LAUNCHED", SHARE_GPU)
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
        return is_true(self.env, USE_FSDP)

    @property
    def processes(self) -> int:
        """The number of processes of the launch."""
        return int(self.env.get("WORLD_SIZE", 1))

    @property
    def processes_here(self) -> int:
        """The number of processes of the launch on this machine; a lower bound where the launcher does not tell."""
        return int(self.env.get("LOCAL_WORLD_SIZE", int(self.env.get("LOCAL_RANK", 0)) + 1))

    def crowded(self) -> str:
        """The processes and the GPUs of a machine that has fewer GPUs; each of its processes sees the same."""
        if self.on_cpu or is_true(self.env, SHARE_GPU):
            return ""
        gpus = torch.accelerator.device_count()
        return "" if self.processes_here <= gpus else f"{self.processes_here} processes on a machine with {gpus} GPU(s)"

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


_ENGINE = "recipes support only DDP and FSDP2: use accelerate_configs/multi_gpu.yaml or fsdp.yaml"
_COMPILED = "Accelerate would compile the model and save its weights under names that from_pretrained cannot load"
RULES = (
    one_of(PRECISIONS, "ACCELERATE_MIXED_PRECISION", any_case=False),  # Accelerate reads FP16 as full precision
    one_of(("true", "false"), USE_FSDP),  # Accelerate reads 1 as false
    *(one_of(TRUE + FALSE, name) for name in SWITCHES),
    refused(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "Accelerate would divide the loss once more: remove it and use --gradient_accumulation_steps",
        "gradient_accumulation_steps",
        ("1",),
    ),
    refused(
        "ACCELERATE_DYNAMO_BACKEND",
        f"{_COMPILED}: remove it and use --torch_compile",
        "dynamo_config: dynamo_backend",
        ("no",),
    ),
    refused("ACCELERATE_USE_DEEPSPEED", _ENGINE, "distributed_type: DEEPSPEED"),
    refused("ACCELERATE_USE_MEGATRON_LM", _ENGINE, "distributed_type: MEGATRON_LM"),
    refused("ACCELERATE_USE_SAGEMAKER", _ENGINE, "compute_environment: AMAZON_SAGEMAKER"),
    refused(
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "it makes several processes work on the same samples, and here each process has its own: remove it",
        "parallelism_config",
    ),
    refused(
        "ACCELERATE_TORCH_DEVICE",
        "all processes would use the same device: unset it and use CUDA_VISIBLE_DEVICES or ACCELERATE_USE_CPU",
        harmless=(),
    ),
    Rule(
        Launch.lost_precision,
        "mixed_precision {found} of notebook_launcher never reaches Accelerate: use the recipe's "
        'Config(mixed_precision="{found}") instead',
    ),
    Rule(
        Launch.separate_tasks,
        "{found}, as set by mpirun or srun, but these processes cannot find each other: start one task per machine, "
        "and in it `torchrun` or `accelerate launch`",
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
    Rule(lambda it: it.precision == "fp8", "mixed_precision fp8 is not supported: use --mixed_precision bf16"),
)
RULES_OF_COUNTS = (  # last: another rule may say why the numbers differ
    Rule(Launch.crowded, "{found}: lower --num_processes (--nproc-per-node) to the number of GPUs"),
    Rule(
        lambda it: it.config.expect_processes not in (None, it.processes),
        "--expect_processes {it.config.expect_processes}, but {it.processes} started: some launchers silently start "
        "only one; use accelerate_configs/multi_cpu.yaml or torchrun --nproc-per-node",
    ),
)


def refuse(launch: Launch) -> None:
    """Check a launch by all rules, in their order.

    Raises:
        UserError: the message of the first rule that finds something.
    """
    for rule in (*RULES, *launch.config.RULES, *RULES_OF_COUNTS):
        if found := rule.when(launch):
            raise UserError(rule.message.format(found=found, it=launch))
