"""How much stands behind a recipe: a limit that only goes down."""

import importlib.util

import pytest
import runs

spec = importlib.util.spec_from_file_location("sizes", runs.ROOT / "docs/sizes.py")
sizes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sizes)
MOST = {  # files and lines
    "diabetes": (36, 6_000),
    "nlp": (79, 13_870),
    "mlm": (80, 13_840),
    "token_classification": (79, 13_865),
    "embeddings": (81, 14_060),
    "image_classification": (82, 14_200),
}


@pytest.mark.parametrize("recipe", sizes.RECIPES, ids=lambda path: path.stem)
def test_a_recipe_imports_no_more_than_today(recipe):
    behind = sizes.closure(recipe)
    files, lines = MOST[recipe.stem]
    assert len(behind) <= files
    assert sizes.lines(behind) <= lines


def test_a_recipe_of_a_table_imports_the_kernel_only():
    rooms = {file.relative_to(sizes.ROOT / "shared").parts[0] for file in sizes.closure(sizes.RECIPES[-1])}
    kernel = {"checkpoints", "compat", "config", "monitoring", "optimization", "plan", "processes"}
    assert rooms <= kernel | {"run", "disk.py", "errors.py"}
