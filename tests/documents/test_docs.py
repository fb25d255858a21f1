"""Everything that the documents name exists, and the code keeps the limits of CONTRIBUTING.md."""

import ast
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import runs
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser

from shared import export
from shared.config.command_line import kinds_of
from shared.mine_negatives import MiningFlags
from shared.predictions.request import Flags

ROOT = Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("recipes/*.py"))
MODULES = sorted(ROOT.glob("shared/**/*.py"))
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "accelerate_configs/*.md", "clusters/**/*.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
FOLDERS = ("recipes", "shared", "accelerate_configs", "clusters", "docs", "tests", "benchmarks")
# Flags of pip and grep, of modules in shared/, and of campaigns.
OTHER_FLAGS = {"index-url", "exclude-dir", "extra", "kills", "walks", "table", "timeout"}
OTHER_FLAGS |= {*kinds_of(MiningFlags), *kinds_of(Flags), *kinds_of(export.ExportFlags)}
OTHER_FLAGS |= {"no_scores", "recipe", "shard", "to"}
# Flags of sbatch, kubectl and docker, and of the hand-written scripts that docs/launching.md translates.
FOREIGN_FLAGS = {"signal", "nodes", "gpus-per-node", "time", "job-name", "array", "wrap", "follow", "trials", "host"}
FOREIGN_FLAGS |= {"rm", "gpus", "ipc"}
FOREIGN_FLAGS |= {"epochs", "batch_size", "accumulation_steps", "checkpoint", "world_size", "rank", "dist_url"}
MOST_LINES_OF_A_RECIPE, MOST_LINES_OF_MAIN, MOST_LINES_OF_A_MODULE = 200, 50, 400


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def by_name(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=name)


# The documents


def test_the_readme_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200


def test_the_index_of_the_documentation_names_every_page():
    index = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w+\.md)\)", index))


def test_the_generated_parts_of_the_documentation_are_up_to_date():
    sys.path.insert(0, str(ROOT / "docs"))
    import generate

    for path, text in generate.generated().items():
        assert path.read_text() == text, f"{name(path)}: run python docs/generate.py"


def test_the_page_on_the_architecture_describes_every_room():
    rooms = {path.parent.name for path in (ROOT / "shared").glob("*/__init__.py")}
    text = (ROOT / "docs/architecture.md").read_text()
    assert rooms == set(re.findall(r"^- \*\*(\w+)\*\*: ", text, re.MULTILINE))
    assert rooms <= set(re.findall(r"\w+", text[text.index("```mermaid") : text.index("<!-- end of rooms -->")]))


@by_name(DOCUMENTS)
def test_every_path_flag_and_target_of_make_that_a_document_names_exists(path):
    text, makefile = path.read_text(), (ROOT / "Makefile").read_text()
    named = re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*", text)
    named = {re.sub(r"[./]+$", "", word) for word in named}
    assert not [word for word in sorted(named) if not (ROOT / word).exists()]
    modules = re.findall(r"(?<= -m )(?:shared|recipes)\.[\w.]*\w", text)
    assert not [module for module in modules if importlib.util.find_spec(module) is None]
    flags = set(re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", text))
    assert not flags - recipe_flags() - launcher_flags() - benchmark_flags() - OTHER_FLAGS - FOREIGN_FLAGS
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE), *re.search("GPU_PARTS := (.+)", makefile)[1].split()}
    # In code only: between backticks, or alone on a line.
    assert targets >= set(re.findall(r"(?:`|^)make (?:[A-Z]+=\S+ )?([a-z][\w-]*)", text, re.MULTILINE))
    assert not re.findall(r"@@\w+@@|TODO|FIXME", text)


@by_name(DOCUMENTS)
def test_every_relative_link_and_anchor_resolves(path):
    text = path.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    broken = []
    for target in targets:
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes from the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def benchmark_flags() -> set[str]:
    """The flags that the scripts in benchmarks/ add to their parsers."""
    sources = [path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")]
    return {flag for source in sources for flag in re.findall(r'add_argument\(\s*"--([\w-]+)"', source)}


@cache
def recipe_flags() -> set[str]:
    """The settings of all recipes, and the flags that every recipe's command line has."""
    flags = {"config", "help"}
    for recipe in RECIPES:
        kinds = kinds_of(runs.load(recipe).Config)
        flags |= set(kinds) | {f"no_{field}" for field, kind in kinds.items() if kind.is_switch}
    return flags


@cache
def launcher_flags() -> set[str]:
    """The flags of `accelerate launch` and `torchrun`."""
    actions = [*launch_command_parser()._actions, *torchrun_parser()._actions]
    return {option.removeprefix("--") for action in actions for option in action.option_strings}


def test_every_message_of_this_project_that_the_troubleshooting_page_quotes_is_in_the_code():
    page = re.sub(
        r"^## NCCL.*?^## Slow", "", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and " | " in line]
    quoted = [line for row in rows if len(row) == 3 for line in re.findall(r"`([^`]+)`", row[1])]
    messages = "\n".join(text for path in [*MODULES, *RECIPES] for text in strings_in(path))
    pieces = [piece.strip(" ,:") for line in quoted for piece in line.split("…")]
    assert len(pieces) > 30
    assert not [piece for piece in pieces if piece not in messages]


def strings_in(path):
    """Every string in the code of a module. In an f-string, … takes the place of each value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# The limits of the code


@by_name(RECIPES)
def test_a_recipe_is_short_and_has_its_loop_in_main_and_launch_command_result_and_files_in_its_docstring(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MOST_LINES_OF_A_RECIPE
    main = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert main.end_lineno - main.lineno + 1 <= MOST_LINES_OF_MAIN
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For) and ast.unparse(node.iter) == "run.steps()"]
    assert len(loops) == 1, "a recipe has one training loop: for step in run.steps()"
    docstring = ast.get_docstring(ast.parse(source))
    assert f"accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/{path.name}" in docstring
    assert re.search(r"^Expected: .*\d", docstring, re.MULTILINE), "the expected result needs a number"
    assert re.search(r"^To copy: ", docstring, re.MULTILINE)


@by_name(MODULES)
def test_a_module_is_short_and_has_a_docstring(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MOST_LINES_OF_A_MODULE
    assert not source or ast.get_docstring(ast.parse(source))


def test_no_module_imports_a_recipe_or_has_a_relative_import():
    """Either fails when the file is copied."""
    for path in [*MODULES, *RECIPES]:
        assert not re.findall(r"^ *(?:from|import) (?:recipes\b|\.)", path.read_text(), re.MULTILINE), name(path)


def test_a_room_has_at_most_ten_files():
    rooms = [path.parent for path in (ROOT / "shared").glob("*/__init__.py")]
    assert len(rooms) > 5
    for room in rooms:
        assert len([path for path in room.glob("*.py") if path.name != "__init__.py"]) <= 10, name(room)


IMPORT_ALL = """
import importlib, json, os, sys, threading
import accelerate, numpy, pyarrow.csv, pyarrow.json, pyarrow.parquet, tokenizers, torch, torch.utils.data  # not ours

def visible():
    threads = sorted(thread.name for thread in threading.enumerate())
    return [sorted(os.environ.items()), threads, torch.get_rng_state().tolist(), torch.get_num_threads()]

sys.path.insert(0, sys.argv[1])
before = visible()
for module in sys.argv[2:]:
    importlib.import_module(module)
heavy = {"datasets", "evaluate", "matplotlib", "sklearn", "transformers", "tyro", "wandb"} & sys.modules.keys()
print(json.dumps([visible() == before, sorted(heavy)]))
"""


def test_importing_all_of_shared_and_the_recipes_does_nothing_visible(tmp_path):
    paths = [name(path) for path in [*MODULES, *RECIPES]]
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    command = [sys.executable, "-B", "-c", IMPORT_ALL, ROOT, *modules]
    done = runs.run(command, folder=tmp_path, HOME=str(tmp_path), PYTHONPATH="")
    assert json.loads(done.stdout) == [True, []], done.stderr  # heavy packages: import them in functions
    assert not done.stderr
    assert not list(tmp_path.iterdir()), "importing wrote files"
