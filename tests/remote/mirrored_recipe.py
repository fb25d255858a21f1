"""The NLP recipe, whose mirror looks at the folder of checkpoints all the time, and waits for less than a real one.

PATIENCE in the environment is the number of seconds that the run waits for its last upload.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import call_recipe

from shared.remote import mirror
from shared.run import command

if __name__ == "__main__":
    mirror.POLL, mirror.BETWEEN_ATTEMPTS = 0.01, 0.1
    mirror.PATIENCE_AT_END = mirror.PATIENCE_AT_SIGNAL = float(os.environ.get("PATIENCE", "60"))
    recipe = call_recipe.load(Path(__file__).parent.parent.parent / "recipes/nlp.py")
    command.run(recipe.main, recipe.Config)
