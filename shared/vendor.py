"""Copy a recipe out of this project, with the files of shared/ that it imports and the packages that they need.

    python -m shared.vendor recipes/nlp.py TARGET
    python -m shared.vendor recipes/nlp.py TARGET shared.predict shared.compare

TARGET becomes a new folder with the recipe, its part of shared/, requirements.txt, accelerate_configs/ and LICENSE.
Further words are modules of shared/ that the copy should have, too, such as commands.
"""

import argparse
import ast
import shutil
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from shared.errors import about, count_of
from shared.run.recipes import run_work

ROOT = Path(__file__).parent.parent
OTHERS = ("accelerate_configs", "LICENSE")  # copied as they are


def closure(start: Path, modules: Sequence[str] = ()) -> set[Path]:
    """The files of shared/ that a recipe imports, directly or through others, and those of further `modules`.

    Imports inside of functions count. A module of `modules` that is a command in a package comes with its `__main__`.

    Raises:
        UserError: the recipe or a module does not exist.
    """
    # Other folders are not searched: one of them may have the name of a package, as wandb/ has.
    finder: Any = ModuleFinder([str(ROOT)], excludes=[path.stem for path in ROOT.iterdir() if path.name != "shared"])
    with about(str(start)):
        finder.run_script(str(start))
    for module in modules:
        with about(module):
            finder.import_hook(module)
        with suppress(ImportError):
            finder.import_hook(f"{module}.__main__")
    return {Path(found.__file__) for found in finder.modules.values() if found.__file__} - {start}


def requirements_of(files: Sequence[Path]) -> list[str]:
    """The requirements of pyproject.toml for packages whose import name occurs in one of these files.

    It may occur in an import or as a text, because Accelerate imports trackers by their name. The import name of a
    package that is not installed is taken to be its own name.
    """
    words, installed = set[str](), packages_distributions()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        match node:
            case ast.Import():
                words |= {alias.name.split(".")[0] for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                words.add(module.split(".")[0])
            case ast.Constant(value=str(text)):
                words.add(text)
    words |= {"sentencepiece"} if "transformers" in words else set()  # it reads the tokenizers of some models with it

    def is_needed(package: str) -> bool:
        names = {name for name, them in installed.items() for each in them if each.lower().replace("_", "-") == package}
        return bool(words & (names or {package.replace("-", "_")}))

    with about("a recipe is copied from the whole project, which has the versions of the packages"):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = [*project["dependencies"], *project["optional-dependencies"]["export"]]
    return [line for line in pinned if is_needed(line.partition("==")[0].lower())]


def vendor(recipe: Path, target: Path, modules: Sequence[str] = ()) -> str:
    """Copy a recipe and what it needs to the new folder `target`; returns a description of the copy.

    Raises:
        UserError: the recipe or a module does not exist, or `target` exists.
    """
    behind = sorted(closure(recipe, modules))
    needed = requirements_of([recipe, *behind])
    with about(str(target)):
        target.mkdir(parents=True)
    for file in behind:
        copied = target / file.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        for part in (*file.parent.glob(f"{file.stem}.*"), *file.parent.glob("*.md")):  # its template or table; licenses
            shutil.copyfile(part, copied.with_name(part.name))
    shutil.copyfile(recipe, target / recipe.name)
    for name in OTHERS:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, target / name)
    (target / "requirements.txt").write_text("\n".join(needed) + "\n")
    lines = sum(len(file.read_text().splitlines()) for file in behind)
    return (
        f"{target} has {recipe.name}, {count_of(len(behind), 'file')} of shared/ with {lines:,} lines, and "
        f"requirements.txt with {count_of(len(needed), 'package')}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m shared.vendor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("modules", nargs="*", help="further modules of shared/, such as shared.predict")
    given = parser.parse_args()
    run_work(lambda: print(vendor(given.recipe, given.target, given.modules)))
