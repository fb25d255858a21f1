"""Prints the size of the project: files behind each recipe, lines and statements of folders, the longest function."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shared import vendor  # noqa: E402  # this script is run by its path

RECIPES = [*sorted((ROOT / "recipes").glob("*.py")), ROOT / "docs/examples/diabetes.py"]


def closure(recipe: Path) -> set[Path]:
    """The files of `shared` that a recipe imports, directly or through others; without empty ones."""
    return {file for file in vendor.closure(recipe) if file.read_text().strip()}


def lines(files: Iterator[Path] | set[Path]) -> int:
    """The lines of all files."""
    return sum(len(file.read_text().splitlines()) for file in files)


def statements(files: Iterator[Path]) -> int:
    """The statements of all files; a docstring is one."""
    return sum(isinstance(node, ast.stmt) for file in files for node in ast.walk(ast.parse(file.read_text())))


def longest_function(files: Iterator[Path]) -> tuple[int, str]:
    """The lines of the longest function, and where it is."""
    return max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{node.name} in {file.relative_to(ROOT)}")
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    )


def mean_line(files: Iterator[Path]) -> float:
    """The mean number of characters of a line that is not blank, without its indentation."""
    texts = [line.strip() for file in files for line in file.read_text().splitlines() if line.strip()]
    return sum(map(len, texts)) / len(texts)


def python_files(folder: str) -> Iterator[Path]:
    """The Python files in a folder of the project."""
    return (ROOT / folder).rglob("*.py")


def main() -> None:
    """Print the table."""
    for recipe in RECIPES:
        behind = closure(recipe)
        print(f"{recipe.relative_to(ROOT)}: imports {len(behind)} files, {lines(behind):,} lines")
    for folder in ("shared", "recipes", "benchmarks", "tests"):
        print(f"{folder}/: {lines(python_files(folder)):,} lines, {statements(python_files(folder)):,} statements")
    length, name = longest_function(python_files("shared"))
    print(f"longest function of shared/: {name}, {length} lines")
    print(f"mean line of shared/: {mean_line(python_files('shared')):.1f} characters")


if __name__ == "__main__":
    main()
