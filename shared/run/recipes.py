"""For commands that work with the script of a recipe, such as `shared.predict`: which made a run; its import."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.config import options
from shared.errors import UserError, first_line
from shared.run.command import ran_out, require_own_shared, run


def run_work(work: Callable[[], object]) -> None:
    """Call `work()` and end every process as a recipe does, for a command that reads its arguments itself."""

    def main(_: options.Options) -> None:
        try:
            work()
        except Exception as error:
            if ran_out(error):  # no flag of these commands is known to help
                raise UserError(f"out of memory: {first_line(error)}") from error
            raise

    run(main, options.Options, lambda kind: kind(dry_run=True))


def recipe_of(path: Path) -> Path | None:
    """The script that made the run with this config.yaml, which may be missing here; None if the file does not say it.

    A script of this project is looked up beside this `shared/`, so that a copy of the project finds its own.
    """
    lines = path.read_text(encoding="utf-8").splitlines()[:2]
    found = [line.removeprefix(options.RECIPE) for line in lines if line.startswith(options.RECIPE)]
    return options.PROJECT / found[0] if found else None


def load_recipe(path: Path) -> ModuleType:
    """Import a recipe, a script with `Config`, `main` and `load_data`, as a module.

    Raises:
        UserError: the file does not exist or is no recipe; or see `require_own_shared` of shared/run/command.py.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file: give the path of a recipe")
    require_own_shared(path)
    module: Any = None
    if (spec := importlib.util.spec_from_file_location(path.stem, path)) and spec.loader:  # None for a file of data
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look up their module there
        spec.loader.exec_module(module)
    if not hasattr(module, "Config"):
        raise UserError(f"{path} has no Config, so it is no recipe: give the path of one, such as recipes/nlp.py")
    return module
