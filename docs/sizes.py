"""Prints the size of the project: files behind each recipe, lines and statements of folders, the longest function."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPES = [*sorted((ROOT / "recipes").glob("*.py")), ROOT / "docs/examples/diabetes.py"]


def imported_modules(file: Path) -> Iterator[str]:
    """The modules of `shared` that a file imports, at its top or inside of functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "shared")


def files_of(module: str) -> Iterator[Path]:
    """The files that an import of a module runs: those of its packages, and its own."""
    path = ROOT
    for part in module.split("."):
        path /= part
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())


def closure(start: Path) -> set[Path]:
    """The files of `shared` that a recipe imports, directly or through others; without empty ones."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        for module in imported_modules(waiting.pop()):
            new = set(files_of(module)) - found
            found |= new
            waiting += new
    return {file for file in found if file.read_text().strip()}


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
