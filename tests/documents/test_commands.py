"""Each command of README.md and docs/ runs on a small configuration, or is parsed if it cannot run here.

`make test-docs` runs this. A block of commands is one test: its commands run in order in a new folder. A command
of a recipe that needs a GPU, the Hub, another machine or a user's files is only parsed: its flags must exist and have
valid values. test_docs.py tests that all files, flags and targets of make that a page names exist.
"""

import itertools
import os
import re
import shlex
import sys

import pytest
import runs
import toy_data
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser

from shared import vendor
from shared.config import options
from shared.config.command_line import kinds_of

PAGES = [runs.ROOT / "README.md", *sorted(runs.ROOT.glob("docs/**/*.md")), runs.ROOT / "accelerate_configs/README.md"]
PROGRAMS = "accelerate|torchrun|python3?|make|pip|cp|cd|source|export|wait|sbatch|kubectl|docker|sh|bash"
COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S* )*(?:{PROGRAMS}|clusters/\S+|\.venv/bin/\S+)(?: .*)?)$")
# Settings that make any recipe small. A command gets those that the recipe has and the command does not set.
SMALL = {
    "max_train_steps": 2, "logging_steps": 1, "checkpointing_steps": "no", "global_batch_size": 8,
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 1000, "max_length": 32,
}  # fmt: skip
NOT_RUN = re.compile(r"(sbatch|kubectl|docker|pip|source|sh|bash|make)$|clusters/|\.venv/")


def blocks(page, languages):
    """The fenced blocks of a page in one of these languages, with the number of the line they start at."""
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if found[1] in languages:
            yield text.count("\n", 0, found.start()) + 2, found[2]


def commands(block):
    """The commands in a block: lines that begin with a program, with their continuation lines; the rest is output."""
    lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
    found = [COMMAND.match(line) for line in lines]
    return [one.strip() for match in found if match for one in match[1].split("  #")[0].split(" && ")]


CASES = [
    pytest.param(commands(block), id=f"{page.relative_to(runs.ROOT)}:{line}")
    for page in PAGES
    for line, block in blocks(page, ("", "sh", "bash", "console"))
    if commands(block)
]
SCRIPTS = [
    pytest.param(block, id=f"{page.relative_to(runs.ROOT)}:{line}")
    for page in PAGES
    for line, block in blocks(page, ("python",))
    if "_launcher(" in block
]


@pytest.fixture
def clone(tmp_path):
    return runs.write_clone(tmp_path)


def split(command):
    """A command's variables, its words before the recipe, the recipe (None without one), and the flags after it."""
    words = shlex.split(command.removesuffix(" &"))
    variables = [words.pop(0) for _ in range(len(words)) if re.match(r"[A-Z_]+=", words[0])]
    for index, word in enumerate(words):
        if "shared.vendor" not in words and recipe_file(word):
            return variables, words[:index], word, words[index + 1 :]
    return variables, words, None, []


def recipe_file(word):
    """The file of a recipe that is written as `recipes/nlp.py`, `nlp.py` or `recipes.nlp`; None for other words."""
    named = re.fullmatch(r"(?:\w+/)?(\w+)\.py|\w+\.(\w+)", word)
    path = runs.ROOT / f"recipes/{named[1] or named[2]}.py" if named else None
    return path if path and path.is_file() else None


def config_class(recipe):
    return runs.load_recipe(recipe.stem).Config


def make_files(flags, folder):
    """Write the .csv files of texts that a command reads, with the columns that it names."""
    given = dict(itertools.pairwise(flags))
    several = re.search(r"--text_column_names \S+ (?!--)(\S+)", " ".join(flags))  # pairs of texts
    label = several[1] if several else given.get("--label_column_name", "label")
    columns = f"{given.get('--text_column_names', 'text')},{label}\n"
    for name in ("--train_file", "--validation_file"):
        if given.get(name, "").endswith(".csv") and "--image_column_name" not in given:
            (folder / given[name]).write_text(columns + "sample number one,a\nsample number two,b\n" * 20)


def out_of_reach(variables, launcher, recipe, flags, folder):
    """Why a command of a recipe cannot run here, or None."""
    if any(value.startswith("MASTER_ADDR=") and "127.0.0.1" not in value for value in variables):
        return "other machines"
    for flag, value in itertools.pairwise(launcher):
        if flag in ("--nnodes", "--num_machines") and value != "1":
            return "other machines"
        on_cpu = "cpu" in value or "ACCELERATE_USE_CPU=true" in variables
        if flag == "--config_file" and not on_cpu:
            return "a GPU"
    fields = kinds_of(config_class(recipe))
    for flag, value in itertools.pairwise(flags):
        name = flag.removeprefix("--")
        reads = name in fields and re.search(
            r"(_file|_dir|_name_or_path|dataset_name|prepared_data|mirror_checkpoints|^config)$", name
        )
        if reads and name != "output_dir" and not (folder / value).exists():
            return f"{flag} {value}"
    return None


def check_launcher(words, recipe, flags):
    """Check the flags of a launcher before a recipe."""
    if words[:2] == ["accelerate", "launch"]:
        launch_command_parser().parse_args([*words[2:], str(recipe), *flags])
    elif words[0] == "torchrun":
        torchrun_parser().parse_args([*words[1:], str(recipe), *flags])


def small(words, recipe, flags):
    """The command changed to at most two processes, a free port, and few steps of a small model."""
    words = list(words)
    if words and words[0] == "torchrun":
        words[1:1] = ["--master-port", str(runs.free_port())]
    for index, word in enumerate(words[:-1]):
        if word in ("--nproc-per-node", "--num_processes"):
            words[index + 1] = str(min(2, int(words[index + 1])))
    if "shared.preflight" in words:
        return words, flags
    fields = kinds_of(config_class(recipe))
    steps = dict(itertools.pairwise(flags)).get("--max_train_steps", SMALL["max_train_steps"])
    settings = SMALL | {"eval_steps": steps}  # one evaluation, at the end
    extra = [[f"--{name}", str(settings[name])] for name in fields if name in settings and f"--{name}" not in flags]
    return words, [*flags, *itertools.chain(*extra)]


def prepared(command, folder):
    """The line to run for a command; None if it cannot run here. The flags of a recipe and a launcher are parsed."""
    variables, words, name, flags = split(command)
    if recipe := name and recipe_file(name):
        make_files(flags, folder)
        options.parse(config_class(recipe), flags)
        check_launcher([word for word in words if word != "-m"], recipe, flags)
        why = out_of_reach(variables, words, recipe, flags, folder)
        if why or NOT_RUN.match(words[0]):
            print(f"only checked, because it needs {why or words[0]}: {command}")
            return None
        words, flags = small(words, recipe, flags)
        return " ".join(variables) + " " + shlex.join([*words, name, *flags]) + " &" * command.endswith(" &")
    placeholders = re.search(r"-m shared\.[\w.]+(.* [A-Z]\w* | .*[A-Z_]+$)", f"{command} ")
    elsewhere = any("MASTER_ADDR=10." in variable for variable in variables)
    benchmark = any(word.startswith("benchmarks/") for word in words)
    missing = "shared.predict" in words and not (folder / words[words.index("shared.predict") + 1]).exists()
    if placeholders or elsewhere or benchmark or missing or "venv" in words or NOT_RUN.match(words[0]):
        return None
    return command


@pytest.mark.docs
@pytest.mark.parametrize("block", CASES)
def test_the_commands_of_a_block_work(block, clone):
    script = [line for command in block if (line := prepared(command, clone))]
    if not script:
        return
    print("\n".join(script))
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": f"{runs.BIN}:{os.environ['PATH']}"}
    runs.succeed(["bash", "-euo", "pipefail", "-c", "\n".join(script)], folder=clone, timeout=500, **environment)


@pytest.mark.docs
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_notebook_cell_starts_two_processes(script, clone):
    settings = ", ".join(f"{name}={value!r}" for name, value in SMALL.items())
    changed = script.replace("Config(", f"Config({settings}, ")
    if "notebook_launcher(" in changed:
        changed = changed.replace("num_processes=2)", f"num_processes=2, use_port='{runs.free_port()}')")
    assert changed.count("max_train_steps") == 1
    output = runs.succeed([sys.executable, "-c", changed], folder=clone, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert re.search(r"processes +2, DDP over gloo", output)


@pytest.mark.docs
@pytest.mark.parametrize("recipe", sorted(runs.ROOT.glob("recipes/*.py")), ids=lambda path: path.name)
def test_a_recipe_trains_from_the_copy_that_its_docstring_names(recipe, texts, tmp_path):
    assert f"To copy: python -m shared.vendor recipes/{recipe.name} FOLDER" in recipe.read_text()
    vendor.vendor(recipe, tmp_path / "copy")
    with (tmp_path / "copy/shared/errors.py").open("a") as module:
        module.write('\nprint(f"imported {__file__}")\n')  # `shared` of the repository may be installed as well
    data = [*toy_data.tiny(recipe.stem, texts, tmp_path), "--max_train_steps", 2, "--output_dir", tmp_path / "run"]
    command = [sys.executable, recipe.name, *data]
    output = runs.succeed(command, folder=tmp_path / "copy", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert f"imported {tmp_path}/copy/shared/errors.py" in output
    assert runs.training_lines(tmp_path / "run")[-1]["step"] == 2
