"""Every key of our YAML files changes what `accelerate launch` starts. The launcher silently ignores some other keys.

The test changes one key at a time and checks that the launch changes: the command, torchrun's arguments, the
environment of the processes, or an error of accelerate about the new value.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import psutil
import pytest
import torch.distributed.run
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils import launch as launch_environment

from shared.errors import UserError
from shared.processes import rules

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
CONFIGS = sorted(path.name for path in FOLDER.glob("*.yaml"))


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


def ignored_keys(path: Path, tmp_path: Path) -> dict[str, str]:
    """The keys of the YAML file `path` that have no effect on what starts, with the reason."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = config.keys() - {*ClusterConfig.__dataclass_fields__}
    known = {key: value for key, value in config.items() if key not in unknown}

    def outcome(changed: dict[str, Any]) -> Any:
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
        try:
            return what_starts(tmp_path / "changed.yaml")
        except Exception as error:  # accelerate reads the value and refuses it
            return repr(error)

    original = outcome(known)
    assert isinstance(original, dict), f"{path.name}: {original}"
    ignored = dict.fromkeys(unknown, "accelerate does not know it")
    for key, value in known.items():
        if not isinstance(value, dict):
            if outcome(known | {key: another(value)}) == original:
                ignored[key] = "a different value starts the same"
            continue
        for inner in value:
            if outcome(known | {key: value | {inner: another(value[inner])}}) == original:
                ignored[f"{key}.{inner}"] = "a different value starts the same"
    return ignored


def another(value: Any) -> Any:
    """A different value of the same type; numbers still differ after a division by the number of machines."""
    if isinstance(value, bool):
        return not value
    return 2 * value + 2 if isinstance(value, int) else f"{value}0"


@pytest.fixture(autouse=True)
def a_large_machine_with_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what would start independent of the cores, open ports and environment of this machine."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16)
    monkeypatch.setattr(launch_environment, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(launch_environment, "get_free_port", lambda: 12345)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_the_folder_has_exactly_the_promised_configs() -> None:
    promised = {"cpu.yaml", "multi_cpu.yaml", "single_gpu.yaml", "multi_gpu.yaml", "multi_node.yaml", "fsdp.yaml"}
    assert set(CONFIGS) == promised


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_has_an_effect_on_the_launch(name: str, tmp_path: Path) -> None:
    assert ignored_keys(FOLDER / name, tmp_path) == {}


def test_the_check_finds_keys_that_accelerate_ignores(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmain_process_port: 29511\n"
        "mixed_precision: bf16\nrdzv_backend: c10d\nsame_network: true\nmax_restarts: 3\nmain_training_function: main\n"
        "machine_rank: 1\n"
    )
    assert ignored_keys(tmp_path / "bad.yaml", tmp_path) == {
        "rdzv_backend": "a different value starts the same",
        "same_network": "a different value starts the same",
        "main_training_function": "a different value starts the same",
        "machine_rank": "a different value starts the same",  # what_starts gives it on the command line
        "max_restarts": "accelerate does not know it",
    }
    (tmp_path / "bad.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n  fsdp_no_such_key: 1\n"
    )
    assert ignored_keys(tmp_path / "bad.yaml", tmp_path) == {
        "fsdp_config.fsdp_no_such_key": "a different value starts the same"
    }


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
    ignored = ignored_keys(tmp_path / "all.yaml", tmp_path).keys()
    assert {key.partition(".")[0] for key in ignored} == set(listed)
    # Accelerate ignores no other key.
    known = {*ClusterConfig.__dataclass_fields__} - set(listed) - {"compute_environment", "mixed_precision"}
    assert known == {
        *("distributed_type", "use_cpu", "debug", "num_processes", "machine_rank", "num_machines", "gpu_ids"),
        *("main_process_ip", "main_process_port", "enable_cpu_affinity", "parallelism_config", "dynamo_config"),
    }


# The keys and variables that a recipe refuses


FSDP = {"distributed_type": "FSDP", "num_processes": 2}
FSDP2 = {"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
REFUSED_KEYS: list[tuple[dict[str, Any], str]] = [
    (
        {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        "DYNAMO_BACKEND is INDUCTOR .* use --torch_compile",
    ),
    ({"dynamo_backend": "EAGER"}, "ACCELERATE_DYNAMO_BACKEND is EAGER"),  # the older spelling
    ({"dynamo_config": {"dynamo_mode": "max-autotune"}}, "ACCELERATE_DYNAMO_MODE is max-autotune .* has no effect"),
    ({"dynamo_config": {"dynamo_use_fullgraph": True}}, "ACCELERATE_DYNAMO_USE_FULLGRAPH is True .*--torch_compile"),
    ({"dynamo_config": {"dynamo_use_dynamic": True}}, "ACCELERATE_DYNAMO_USE_DYNAMIC is True"),
    (
        {"dynamo_config": {"dynamo_use_regional_compilation": True}},
        "DYNAMO_USE_REGIONAL_COMPILATION is True",
    ),
    ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "ACCELERATE_USE_PARALLELISM_CONFIG is true"),
    (FSDP | {"fsdp_config": FSDP2 | {"fsdp_ignored_modules": ".*head"}}, r"FSDP_IGNORED_MODULES is \.\*head"),
    (
        FSDP | {"fsdp_config": FSDP2 | {"fsdp_activation_checkpointing": True}},
        "FSDP_ACTIVATION_CHECKPOINTING is true .*--gradient_checkpointing",
    ),
    (
        FSDP | {"fsdp_config": FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT"}},
        "FSDP_STATE_DICT_TYPE is FULL_STATE_DICT .*: set SHARDED",
    ),
    (FSDP | {"fsdp_config": FSDP2 | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, "FSDP_SHARDING_STRATEGY .*ignores"),
    (
        FSDP | {"fsdp_config": FSDP2 | {"fsdp_backward_prefetch": "BACKWARD_POST"}},
        "FSDP_BACKWARD_PREFETCH .*ignores",
    ),
    (FSDP | {"fsdp_config": FSDP2 | {"fsdp_forward_prefetch": True}}, "FSDP_FORWARD_PREFETCH is true .*ignores it"),
    (FSDP | {"fsdp_config": FSDP2 | {"fsdp_use_orig_params": False}}, "FSDP_USE_ORIG_PARAMS is false .*ignores it"),
    (
        FSDP | {"fsdp_config": FSDP2 | {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}},
        "FSDP_SYNC_MODULE_STATES is false",
    ),
    (
        FSDP | {"fsdp_config": FSDP2 | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
        "FSDP_AUTO_WRAP_POLICY is SIZE_BASED_WRAP .*each repeated layer",
    ),
    (
        FSDP | {"fsdp_config": FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "BertLayer"}},
        "FSDP_TRANSFORMER_CLS_TO_WRAP is BertLayer .*: remove it",
    ),
    (FSDP | {"fsdp_config": FSDP2 | {"fsdp_min_num_params": 2000}}, "FSDP_MIN_NUM_PARAMS is 2000 .*: remove it"),
    (FSDP | {"fsdp_config": FSDP2}, "FSDP_CPU_RAM_EFFICIENT_LOADING is true .*: set it to false"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED_KEYS, ids=lambda one: str(one)[-50:])
def test_a_key_that_would_change_the_result_or_have_no_effect_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"distributed_type": "MULTI_GPU", "num_processes": 2} | keys
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(UserError, match=message):
        rules.check(what_starts(tmp_path / "given.yaml")["environment"])


VARIABLES = [
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, "divide the loss once more: .*--gradient_accumulation_steps"),
    ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "it is for DeepSpeed only: .*--max_grad_norm"),
    ({"ACCELERATE_DYNAMO_BACKEND": "inductor"}, "use --torch_compile"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "support only DDP and FSDP2"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "support only DDP and FSDP2"),
    ({"ACCELERATE_USE_SAGEMAKER": "true"}, "support only DDP and FSDP2"),
    ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, "ACCELERATE_TORCH_DEVICE is cuda:1: all processes would use the same"),
    ({"ACCELERATE_DOWNCAST_BF16": "true"}, "it is for TPUs only"),
    ({"ACCELERATE_IN_TPU_POD": "1"}, "it is for TPUs only"),
    (
        {"FSDP_OFFLOAD_PARAMS": "true"},
        "FSDP_OFFLOAD_PARAMS is true, which has no effect without .*: FSDP",
    ),
    ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "no effect without parallelism_config"),
    ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "no effect without distributed_type: DEEPSPEED"),
    ({"ACCELERATE_MIXED_PRECISION": "FP16"}, "ACCELERATE_MIXED_PRECISION is 'FP16': expected one of no, fp16, bf16"),
    ({"ACCELERATE_USE_FSDP": "1"}, "ACCELERATE_USE_FSDP is '1': expected one of true, false"),
    ({"FSDP_OFFLOAD_PARAMS": "1"}, "FSDP_OFFLOAD_PARAMS is '1': expected one of true, false"),
    ({"ACCELERATE_USE_CPU": "maybe"}, "ACCELERATE_USE_CPU is 'maybe': expected one of"),
]


@pytest.mark.parametrize(("variables", "message"), VARIABLES, ids=lambda one: str(one)[:40])
def test_a_variable_that_would_change_the_result_or_have_no_effect_is_refused(variables: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rules.check(variables)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_variables_that_our_configs_set_are_accepted(name: str) -> None:
    rules.check(what_starts(FOLDER / name)["environment"] | {"ACCELERATE_USE_CPU": "False", "FORK_LAUNCHED": "1"})


def test_every_variable_that_accelerate_reads_is_refused_allowed_or_known_to_be_harmless() -> None:
    package = Path(accelerate.__file__).parent
    source = "\n".join(path.read_text() for path in package.rglob("*.py") if "test_utils" not in path.parts)
    found = {*re.findall(r'"((?:ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM|FORK)_[A-Z0-9_]*[A-Z0-9])"', source)}
    found |= {f"FSDP_{name}" for name in re.findall(r'env_prefix \+ "([A-Z_]+)"', source)}
    assert len(found) > 50
    has_its_effect = {
        *("FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD"),
        *("ACCELERATE_LOG_LEVEL", "ACCELERATE_ENABLE_RICH", "ACCELERATE_BYPASS_DEVICE_MAP"),
        "ACCELERATE_DEBUG_RDV_FILE",  # set by debug_launcher
    }
    is_never_read = {
        *("ACCELERATE_ALLOW_CP_STANDALONE", "ACCELERATE_CONFIG_DS_FIELDS"),  # belong to engines that are refused
        *("ACCELERATE_FP8_BACKEND", "ACCELERATE_FP8_OPT_LEVEL"),  # fp8 is refused
        "ACCELERATE_INIT_INCLUDE_BUFFERS",  # read by a function that neither a recipe nor transformers calls
    }
    undecided = found - rules.REFUSED.keys() - rules.ALLOWED.keys() - has_its_effect - is_never_read
    assert {name for name in undecided if not name.startswith((*rules.NEEDS, "MEGATRON_LM"))} == set()
    for name in ("FSDP_VERSION", "PARALLELISM_CONFIG_CP_SIZE"):  # the search finds names of both kinds
        assert name in found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_readme_says_when_to_use_a_config(name: str) -> None:
    assert f"| [{name}]({name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_short_and_has_a_comment_for_each_key_and_its_own_command(name: str) -> None:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    assert 5 <= len(lines) <= 16
    assert all("#" in line for line in lines)
    assert any(line.startswith("#") and f"--config_file accelerate_configs/{name}" in line for line in lines)


def test_the_fsdp_plugin_reads_the_settings_of_fsdp_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = what_starts(FOLDER / "fsdp.yaml")["environment"]
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    with mock.patch.dict(os.environ, environment):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"


def test_multi_node_yaml_takes_address_and_rank_from_the_command_line() -> None:
    torchrun = what_starts(FOLDER / "multi_node.yaml")["torchrun"]
    assert torchrun["rdzv_endpoint"] == "10.0.0.1:29500"
    assert (torchrun["nnodes"], torchrun["nproc_per_node"], torchrun["node_rank"]) == ("2", "8", 1)


def test_the_gpu_configs_have_the_same_precision_for_any_number_of_gpus() -> None:
    names = ("single_gpu", "multi_gpu", "multi_node")
    environments = [what_starts(FOLDER / f"{name}.yaml")["environment"] for name in names]
    assert {environment["ACCELERATE_MIXED_PRECISION"] for environment in environments} == {"fp16"}


SCRIPT = """
import json, os, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=not torch.cuda.is_available())
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
line = json.dumps({
    "index": accelerator.process_index,
    "processes": accelerator.num_processes,
    "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
    "device": accelerator.device.type,
    "precision": accelerator.mixed_precision,
    "sum": total.item(),
})
os.write(1, f"{line}\\n".encode())  # one write: print writes the newline separately, so lines could mix
accelerator.wait_for_everyone()
os._exit(0)  # gloo sometimes aborts while the interpreter shuts down
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Any]:
    """A function that launches SCRIPT as a user would, without any GPU, and returns what each process printed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    processes = []

    def launch_script(*argv: str) -> list[dict[str, Any]]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *argv, str(script)],
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that one signal reaches the launcher and its child
        )
        processes.append(process)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return sorted(lines, key=lambda line: line["index"])

    yield launch_script
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # not SIGKILL: torchrun's workers would outlive it
            process.wait()


# `make test` launches multi_gpu.yaml, too, in test_launch.py.
@pytest.mark.clusters
@pytest.mark.parametrize(
    "argv", [["multi_cpu.yaml"], ["multi_gpu.yaml", "--mixed_precision", "no"]], ids=lambda one: one[0]
)
def test_two_processes_form_a_gloo_group_without_gpus(argv: list[str], launched: Any) -> None:
    seen = launched("--config_file", str(FOLDER / argv[0]), *argv[1:])
    common = {"processes": 2, "backend": "gloo", "device": "cpu", "precision": "no", "sum": 3.0}
    assert seen == [{"index": 0, **common}, {"index": 1, **common}]


@pytest.mark.clusters
def test_cpu_yaml_starts_one_process(launched: Any) -> None:
    (seen,) = launched("--config_file", str(FOLDER / "cpu.yaml"))
    assert (seen["processes"], seen["backend"], seen["device"], seen["precision"]) == (1, None, "cpu", "no")
