"""Run a script as `python` would, and end with its first optimizer step: first_step.py FILE SCRIPT [ITS FLAGS].

The time at the end of that step, in seconds since 1970, goes into FILE, from rank 0. startup.py starts this.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

if __name__ == "__main__":
    noted, script, *flags = sys.argv[1:]

    def end_process(*_: Any) -> None:
        now = time.time()
        sys.stdout.flush()
        if os.environ.get("RANK", "0") == "0":
            Path(noted).write_text(str(now))
        time.sleep(0.5)  # the launcher ends the others when the first process leaves
        os._exit(0)

    register_optimizer_step_post_hook(end_process)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
