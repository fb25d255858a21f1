"""Starting recipes as users start them, and reading what they leave."""

import ast
import contextlib
import csv
import gc
import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import psutil
import torch
from safetensors.torch import load_file, save_file

from shared.config import options

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
# A model that trains in seconds; what a test is about comes behind.
TINY = [
    *("--hidden_size", "32", "--num_hidden_layers", "2", "--num_attention_heads", "2", "--vocab_size", "400"),
    *("--max_length", "48", "--max_tokens_per_micro_batch", "96", "--global_batch_size", "12"),
    *("--max_train_steps", "8", "--logging_steps", "2", "--eval_steps", "8"),
]


# The same for images; the micro-batches of a step are four, and so shared out unevenly among three processes.
TINY_IMAGES = [
    *("--embedding_size", "8", "--hidden_sizes", "8", "16", "--image_size", "16", "--global_batch_size", "48"),
    *("--per_device_train_batch_size", "12", "--max_train_steps", "8", "--logging_steps", "2", "--eval_steps", "8"),
]


def environment_of_a_user(**changes):
    """The environment in which a process starts: nothing of what this process has set, and no network."""
    ours = ("ACCELERATE_", "WANDB_", "OMP_", "THP_", "MALLOC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1"} | changes
    if cache := os.environ.get("ACCELERATE_RECIPES_CACHE"):
        env.setdefault("ACCELERATE_RECIPES_CACHE", cache)
    return env


def start(command, folder=ROOT, **environment):
    """A process in a session of its own, so that it can be ended with all it has started."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment_of_a_user(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def fork(function, args, processes, timeout=240):
    """Call `function(rank, *args)` in each of so many processes, forked from one that has imported what is slow to.

    An error in a process is raised here. A fork takes milliseconds, where a process that imports takes seconds of CPU.
    """
    multiprocessing.set_forkserver_preload(
        ["torch", "transformers", "accelerate", "sklearn.metrics", "pyarrow.parquet"]
    )
    with mock.patch.dict(os.environ, environment_of_a_user(OMP_NUM_THREADS="1"), clear=True):
        forkserver.ensure_running()  # once; it keeps the environment in which it began
    context = torch.multiprocessing.start_processes(function, args, processes, join=False, start_method="forkserver")
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=max(0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"{processes} processes have not ended in {timeout} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def run(command, folder=ROOT, timeout=240, **environment):
    """Run to the end; whatever happens, nothing of it stays."""
    process = start(command, folder, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process):
    """Kill a process and all it has started: torchrun's have sessions of their own, and save when it dies."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(started)
    process.wait()


def power_off(process):
    """Kill a process and all it has started as when the power fails: at once."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        found = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in found:
            each.suspend()  # none may see another one's end
        for each in found:
            each.send_signal(signal.SIGKILL)
    process.wait()


def succeed(command, **kwargs):
    """Run a command that has to succeed; its output."""
    done = run(command, **kwargs)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout + done.stderr


def truncate(file):
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def torchrun(processes, *script):
    return [BIN / "torchrun", "--nproc-per-node", processes, "--master-port", free_port(), *script]


def accelerate_launch(config, *script, flags=()):
    port = ["--main_process_port", free_port()]
    return [
        BIN / "accelerate",
        "launch",
        "--config_file",
        ROOT / f"accelerate_configs/{config}.yaml",
        *port,
        *flags,
        *script,
    ]


def run_many(processes, configs, folder, recipe="recipes/nlp.py", modes=None, **variables):
    """Call a recipe's `main` with several configs, one after the other, in one launch: {name: its output folder}.

    `modes` gives what call_recipe.py is to do instead of only training, by name; `variables` are of the environment.
    What the launch printed is kept in said-PROCESSES.txt.
    """
    jobs, said = folder / f"jobs-{processes}.json", folder / f"said-{processes}.txt"
    outputs = {name: folder / f"{name}-{processes}" for name in configs}
    every = ["--expect_processes", str(processes), "--output_dir"]
    flags = {name: [*map(str, config), *every, str(outputs[name])] for name, config in configs.items()}
    jobs.write_text(json.dumps([{"flags": flags[n], "mode": (modes or {}).get(n, "train")} for n in configs]))
    environment = environment_of_a_user(OMP_NUM_THREADS="1", **variables)
    if processes > 1:
        environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        fork(_call_recipe, ([str(ROOT / recipe), str(jobs)], said, environment), processes)
    except Exception as error:
        raise AssertionError(said.read_text()[-8000:]) from error
    return outputs


def _call_recipe(rank, words, said, environment):
    if "WORLD_SIZE" in environment:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    os.chdir(ROOT)
    with said.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    script = str(ROOT / "tests/call_recipe.py")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def load_recipe(name):
    """A recipe as a module, in this process: its functions, to compute what it should have computed."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"recipes/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def in_group(function, processes, folder, machines=False):
    """What `function(accelerator, folder)` returns on each process of a gloo group, as JSON gives it back.

    With `machines` each process is told that it is the only one of its machine.
    """
    (folder / "store").unlink(missing_ok=True)
    fork(_join, (function, processes, folder, machines, dict(os.environ)), processes)
    return [json.loads((folder / f"returned-{rank}.json").read_text()) for rank in range(processes)]


def _join(rank, function, processes, folder, machines, environment):
    from accelerate import Accelerator

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0" if machines else str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate asks; the file does the work
    store = f"file://{folder / 'store'}"
    timeout = timedelta(seconds=60)  # processes that no longer agree fail, and do not hang
    torch.distributed.init_process_group("gloo", timeout=timeout, init_method=store, rank=rank, world_size=processes)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes
    (folder / f"returned-{rank}.json").write_text(json.dumps(function(accelerator, folder)))
    gc.collect()  # a DDP model that is alive when gloo's threads end aborts the process
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def metrics(output):
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def training_lines(output):
    return [line for line in metrics(output) if "loss" in line]


def weights(output, without=None):
    """The exported weights as one vector of float64, but for the tensors that have `without` in their names."""
    tensors = load_file(Path(output) / "model/model.safetensors")
    names = [name for name in sorted(tensors) if without is None or without not in name]
    return torch.cat([tensors[name].flatten().double() for name in names])


def weights_that_learn(output):
    """Those without the biases of attention keys, whose gradient is rounding noise, of which Adam makes steps."""
    return weights(output, without="attention.self.key.bias")


def distance(a, b):
    """Relative distance of two vectors."""
    return ((a - b).norm() / b.norm()).item()


def write_texts(folder, rows=160, validation_rows=37):
    """train.csv and valid.csv: sentences of natural length out of the docstrings of Python's standard library."""
    found = []
    library = Path(sysconfig.get_paths()["stdlib"])
    for label in ("asyncio", "email", "unittest", "xml"):
        sentences = []
        for file in sorted((library / label).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    sentences.append((" ".join(text.split())[:300], label))
        found.append([s for s in sentences if len(s[0]) > 20])
    mixed = [row for group in zip(*found, strict=False) for row in group][: rows + validation_rows]
    assert len(mixed) == rows + validation_rows
    for name, part in (("train.csv", mixed[:rows]), ("valid.csv", mixed[rows:])):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *part])
    return ["--train_file", folder / "train.csv", "--validation_file", folder / "valid.csv"]


def write_bert_with_dropout(folder, texts):
    """A BERT of random weights with dropout 0.1, and the tokenizer of the tiny runs."""
    from transformers import BertConfig, BertForSequenceClassification

    recipe = load_recipe("nlp")
    config = options.parse(recipe.Config, [*map(str, texts), *TINY])
    *_, labels, tokenizer = recipe.load_data(config)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), **sizes, num_labels=labels.num_labels, initializer_range=0.5)
    )
    assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_in_another_order(model, folder):
    """A copy of an exported classifier with its labels, and the rows of its last layer, in the reverse order."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    names = [settings["id2label"][str(i)] for i in reversed(range(len(settings["id2label"])))]
    settings |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    last = {name for name in tensors if name.startswith("classifier.") and len(tensors[name]) == len(names)}
    assert len(last) == 2
    flipped = {name: tensors[name].flip(0).contiguous() for name in last}
    save_file(tensors | flipped, folder / "model.safetensors", {"format": "pt"})
    return folder


def mount_in_memory(folder, limits):
    """Mount a file system with limits such as size=8m at an empty folder; the reason why not, empty if it is there."""
    mount = ["mount", "-t", "tmpfs", "-o", limits, "tmpfs", folder]
    return subprocess.run(mount, capture_output=True, text=True, check=False).stderr.strip()


def unmount(folder):
    """The end of that file system."""
    subprocess.run(["umount", "-l", folder], check=True)
