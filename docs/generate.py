"""Write the generated text: docs/flags.md, code in README.md and pages of docs/, the graph of the rooms.

    python docs/generate.py

A test compares the files with the output of this script.
"""

import ast
import dataclasses
import importlib.util
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
RECIPES = ("nlp", "mlm", "token_classification", "embeddings", "image_classification")
LOOP_BEGINS, LOOP_ENDS = "for step in run.steps():", "return run.finish("


def generated() -> dict[Path, str]:
    """Return the text that each file should contain, by path."""
    readme, architecture = ROOT / "README.md", ROOT / "docs/architecture.md"
    own, example = ROOT / "docs/your_own_recipe.md", (ROOT / "docs/examples/diabetes.py").read_text()
    serving, server = ROOT / "docs/serving.md", (ROOT / "docs/examples/serve.py").read_text()
    api = server[server.index("class ") : server.index("if __name__")].strip()
    return {
        ROOT / "docs/flags.md": flags_page(),
        readme: with_part(readme.read_text(), "loop", f"```python\n{loop('nlp')}\n```"),
        own: with_part(own.read_text(), "recipe", f"```python\n{example}```"),
        serving: with_part(serving.read_text(), "server", f"```python\n{api}\n```"),
        architecture: with_part(architecture.read_text(), "rooms", f"```mermaid\n{rooms()}\n```"),
    }


def with_part(text: str, name: str, part: str) -> str:
    """Replace the text between the two comments with `name` by `part`."""
    begin, end = f"<!-- {name}: docs/generate.py writes this -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"


# Flags


def flags_page() -> str:
    """Return docs/flags.md: every setting of every recipe with its default and its help text."""
    configs = {name: load_recipe(name).Config for name in RECIPES}
    titles = {
        "Options": "All recipes",
        "ExtraOptions": "Gradient accumulation, trackers, profiles and other extras",
        "DataOptions": "Data of all recipes",
        "ModelOptions": "Computation of all recipes",
        "MetricOptions": "Metrics of texts and images",
        "TextOptions": "Text recipes",
    }
    shared = [cls for cls in configs["nlp"].__mro__ if cls.__name__ in titles]
    lines = [
        "# Flags",
        "",
        "Every flag can also be set in a `--config` file. If the defaults of recipes differ, the table lists them.",
        "`python docs/generate.py` writes this page from the `Config` classes.",
    ]
    for cls in shared[::-1]:
        lines += ["", f"## {titles[cls.__name__]}", "", *table(cls, configs)]
    for name, config in configs.items():
        own = [cls for cls in config.__mro__ if dataclasses.is_dataclass(cls) and cls not in shared]
        above = {field: text for cls in shared if issubclass(config, cls) for field, text in own_fields(cls).items()}
        texts = {field: text for cls in own[::-1] for field, text in own_fields(cls).items()}
        new = {field: text for field, text in texts.items() if above.get(field) != text}
        lines += ["", f"## recipes/{name}.py", "", *rows(new, {name: config})]
    return "\n".join(lines) + "\n"


def table(cls: type, configs: dict[str, type]) -> list[str]:
    """A Markdown table of the settings of one class, with the defaults of the recipes that inherit from it."""
    inherited = {
        field.name for base in cls.__bases__ if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)
    }
    new = {field: text for field, text in own_fields(cls).items() if field not in inherited}
    return rows(new, {name: config for name, config in configs.items() if issubclass(config, cls)})


def rows(fields: dict[str, str], configs: dict[str, type]) -> list[str]:
    """A Markdown table of settings: `fields` maps names to help texts."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for field, text in fields.items():
        defaults = {name: getattr(config(), field) for name, config in configs.items()}
        if len(set(map(shown, defaults.values()))) == 1:
            default = shown(next(iter(defaults.values())))
        else:
            default = ", ".join(f"{name}: {shown(value)}" for name, value in defaults.items())
        choices = {name: ", ".join(f"`{c}`" for c in choices_of(config, field)) for name, config in configs.items()}
        if len(each := set(choices.values())) > 1:
            listed = f" Choices: {'; '.join(f'{name}: {found}' for name, found in choices.items())}."
        else:
            listed = f" Choices: {found}." if (found := each.pop()) else ""
        lines.append(f"| `--{field}` | {default} | {text.replace('|', chr(92) + '|')}{listed} |")
    return lines


def shown(value: object) -> str:
    """A default in the form in which a user types it."""
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    return f"`{value}`"


def choices_of(config: type, field: str) -> tuple[str, ...]:
    """The values that a setting may have; () if its type does not list them."""
    pending = [typing.get_type_hints(config)[field]]
    while pending:
        kind = pending.pop()
        if typing.get_origin(kind) is typing.Literal:
            return typing.get_args(kind)
        pending += typing.get_args(kind)
    return ()


def own_fields(cls: type) -> dict[str, str]:
    """The settings that a class itself declares (not inherited ones), with their docstrings."""
    module = sys.modules[cls.__module__]
    tree = ast.parse(Path(typing.cast(str, module.__file__)).read_text())
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__).body
    names = {field.name for field in dataclasses.fields(cls)}
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
            assert isinstance(after, ast.Expr), f"{cls.__name__}.{node.target.id} has no docstring"
            found[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def load_recipe(name: str) -> ModuleType:
    """Import a recipe as a module."""
    spec = importlib.util.spec_from_file_location(f"documented_{name}", ROOT / f"recipes/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The loop


def loop(recipe: str) -> str:
    """The source of the training loop of a recipe."""
    lines = (ROOT / f"recipes/{recipe}.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip() == LOOP_BEGINS)
    last = next(i for i, line in enumerate(lines) if line.strip().startswith(LOOP_ENDS))
    return textwrap.dedent("\n".join(lines[first : last + 1]))


# The rooms


def rooms() -> str:
    """A Mermaid graph of the imports between the rooms of shared/, without arrows that follow from other arrows."""
    arrows: dict[str, set[str]] = {}
    for room, imported in imports():
        arrows.setdefault(room, set()).add(imported)
    lines = ["graph TD"]
    for room in sorted(arrows):
        indirect = {far for near in arrows[room] for far in reachable(arrows, near)}
        lines += [f"    {room} --> {near}" for near in sorted(arrows[room] - indirect)]
    return "\n".join(lines)


def imports() -> Iterator[tuple[str, str]]:
    """Yield (room, room that it imports) for each import between rooms."""
    for file in sorted((ROOT / "shared").glob("*/**/*.py")):
        room = file.relative_to(ROOT / "shared").parts[0]
        for found in re.findall(r"^\s*from shared\.(\w+)", file.read_text(), re.MULTILINE):
            if found != room and (ROOT / "shared" / found).is_dir():
                yield room, found


def reachable(arrows: dict[str, set[str]], start: str) -> set[str]:
    """The rooms that `start` imports, directly or indirectly."""
    found: set[str] = set()
    waiting = list(arrows.get(start, ()))
    while waiting:
        room = waiting.pop()
        if room not in found:
            found.add(room)
            waiting += arrows.get(room, ())
    return found


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
