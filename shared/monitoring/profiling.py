"""`--profile STEPS`: what the operators of a few steps cost, as a trace per process and a table."""

from pathlib import Path
from typing import Any

from shared.config.options import Options

WARMUP = 2  # steps of this process before the profile: allocators and caches settle
MOST_EXPENSIVE = 10


class Profiler:
    """Profiles `config.profile` steps of this process into OUTPUT_DIR/profile, if there are any to profile.

    Leaves trace-RANK.json, which chrome://tracing and Perfetto show, and operators-RANK.txt, the ten operators that
    took most time of their own.
    """

    def __init__(self, accelerator: Any, config: Options) -> None:
        self.accelerator, self.left = accelerator, config.profile
        self.folder = Path(config.output_dir) / "profile"
        self.steps = 0  # of this process
        self.running: Any = None

    def end_step(self) -> None:
        """Count a step, while there is one left to profile; start or stop where the profile begins or ends."""
        assert self.left
        self.steps += 1
        if self.running:
            self.left -= 1
            if not self.left:
                self.write()
        elif self.steps == WARMUP:
            from torch import profiler

            activities = [profiler.ProfilerActivity.CPU]
            if self.accelerator.device.type == "cuda":
                activities.append(profiler.ProfilerActivity.CUDA)
            self.running = profiler.profile(activities=activities)
            self.running.start()

    def close(self) -> None:
        """Write what there is when the run ends before the profile does, and say so."""
        if not self.left:
            return
        if self.running:
            self.write()
        self.accelerator.print(
            f"--profile: the run ended after {self.steps} steps, {self.left} of the profile are missing"
        )
        self.left = None

    def write(self) -> None:
        """End the profile and leave its files."""
        self.running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = self.accelerator.process_index
        self.running.export_chrome_trace(str(self.folder / f"trace-{rank}.json"))
        by = "self_cuda_time_total" if self.accelerator.device.type == "cuda" else "self_cpu_time_total"
        table = self.running.key_averages().table(sort_by=by, row_limit=MOST_EXPENSIVE, max_name_column_width=60)
        (self.folder / f"operators-{rank}.txt").write_text(table + "\n")
        self.accelerator.print(f"profile of {self.steps - WARMUP} steps in {self.folder}")
        self.running = None
