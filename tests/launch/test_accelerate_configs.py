"""Every key of our YAML files changes what `accelerate launch` starts. The launcher silently ignores some other keys.

The test changes one key at a time and checks that the launch changes: the command, torchrun's arguments, the
environment of the processes, or an error of accelerate about the new value.
"""

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed.run
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import launch as launch_environment

from shared.errors import UserError
from shared.options.data_options import ExtraOptions
from shared.processes import rules

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
CONFIGS = ("cpu", "multi_cpu", "single_gpu", "multi_gpu", "multi_node", "fsdp")


def what_starts(path: Path) -> dict[str, Any]:
    """What `accelerate launch --config_file PATH` would start: the kind of launcher, its arguments, the environment."""
    argv = ["--config_file", str(path), "--machine_rank", "1", "--main_process_ip", "10.0.0.1", "script.py"]
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(argv))
    if args.multi_gpu or args.use_fsdp:
        environment = launch_environment.prepare_multi_gpu_env(args)
        defaults = ["--training_script", "script.py", "--training_script_args", ""]
        torchrun = launch_environment._filter_args(args, torch.distributed.run.get_args_parser(), defaults)
        return {"torchrun": vars(torchrun), "environment": environment}
    command, environment = launch_environment.prepare_simple_launcher_cmd_env(args)
    return {"command": command, "environment": environment}


def ignored_keys(path: Path, tmp_path: Path) -> set[str]:
    """The keys of the YAML file `path` that accelerate does not know, or of which another value starts the same."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = config.keys() - {*ClusterConfig.__dataclass_fields__}
    known = {key: value for key, value in config.items() if key not in unknown}

    def outcome(changed: dict[str, Any]) -> Any:
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
        try:
            return what_starts(tmp_path / "changed.yaml")
        except Exception as error:  # accelerate reads the value and refuses it
            return repr(error)

    changes = {}
    for key, value in known.items():
        if isinstance(value, dict):
            changes |= {f"{key}.{name}": {key: value | {name: another(value[name])}} for name in value}
        else:
            changes[key] = {key: another(value)}
    original = outcome(known)
    assert isinstance(original, dict), f"{path.name}: {original}"
    return unknown | {key for key, change in changes.items() if outcome(known | change) == original}


def another(value: Any) -> Any:
    """A different value of the same type; numbers still differ after a division by the number of machines."""
    if isinstance(value, bool):
        return not value
    return 2 * value + 2 if isinstance(value, int) else f"{value}0"


@pytest.fixture(autouse=True)
def a_large_machine_with_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what would start independent of the cores, GPUs, open ports and environment of this machine."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 16)
    monkeypatch.setattr(launch_environment, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(launch_environment, "get_free_port", lambda: 12345)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_has_an_effect_on_the_launch_and_a_recipe_accepts_it(name: str, tmp_path: Path) -> None:
    assert not ignored_keys(FOLDER / f"{name}.yaml", tmp_path)
    environment = what_starts(FOLDER / f"{name}.yaml")["environment"]
    environment |= {"ACCELERATE_USE_CPU": "False", "FORK_LAUNCHED": "1"}
    rules.refuse(rules.Launch(ExtraOptions(), environment, on_cpu=False))


def test_the_readme_lists_exactly_the_keys_without_effect(tmp_path: Path) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`.*?) \|", page.split("\n## ")[2], re.MULTILINE)
    listed = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    values: dict[str, Any] = {
        **{"rdzv_backend": "c10d", "same_network": True, "max_restarts": 3, "main_training_function": "main"},
        **{"downcast_bf16": True, "tpu_name": "a", "tpu_zone": "a", "tpu_use_cluster": True, "tpu_use_sudo": True},
        **{"tpu_vm": "a", "tpu_env": "a", "command_file": "a", "commands": "a"},
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
        "fp8_config": {"backend": "TE"},
        "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0},
        "megatron_lm_config": {"megatron_lm_tp_degree": 2},
        "mpirun_config": {"mpirun_hostfile": "a"},
    }
    assert listed == list(values)
    given = {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 4} | values
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(given))
    ignored = ignored_keys(tmp_path / "all.yaml", tmp_path)
    assert {key.partition(".")[0] for key in ignored} == set(listed)


# The keys and variables that a recipe refuses

FSDP = {"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
REFUSED_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "DYNAMO_BACKEND is INDUCTOR .* use --torch_compile"),
    ({"dynamo_backend": "EAGER"}, "ACCELERATE_DYNAMO_BACKEND is EAGER"),  # the older spelling
    ({"distributed_type": "FSDP", "fsdp_config": FSDP}, "fsdp_cpu_ram_efficient_loading is true"),
    ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "ACCELERATE_USE_PARALLELISM_CONFIG is true"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED_KEYS, ids=lambda one: str(one)[-50:])
def test_a_key_that_would_change_the_result_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"distributed_type": "MULTI_GPU", "num_processes": 2} | keys
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    environment = what_starts(tmp_path / "given.yaml")["environment"]
    with pytest.raises(UserError, match=message):
        rules.refuse(rules.Launch(ExtraOptions(), environment, on_cpu=False))


def test_the_gpu_configs_have_the_same_precision_for_any_number_of_gpus() -> None:
    names = ("single_gpu", "multi_gpu", "multi_node")
    environments = [what_starts(FOLDER / f"{name}.yaml")["environment"] for name in names]
    assert {environment["ACCELERATE_MIXED_PRECISION"] for environment in environments} == {"fp16"}
