"""The NLP recipe, whose mirror looks at the folder of checkpoints all the time."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs

from shared.remote import mirror
from shared.run import command

if __name__ == "__main__":
    mirror.POLL, mirror.BETWEEN_ATTEMPTS = 0.01, 0.1
    recipe = runs.load_recipe("nlp")
    command.run(recipe.main, recipe.Config)
