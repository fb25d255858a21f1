"""Run a script until the end of its first optimizer step: run_to_first_step.py FILE SCRIPT [FLAGS OF THE SCRIPT].

Rank 0 writes the time of that moment into FILE, in seconds since 1970. launch_to_first_step.py starts this script.
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
        time.sleep(0.5)  # until all have noted it: the launcher ends the other processes when one has ended
        os._exit(0)

    register_optimizer_step_post_hook(end_process)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
