"""`--profile STEPS`: what the operators of a few steps cost, as a trace per process and a table."""

from pathlib import Path
from typing import Any

from shared.errors import count_of
from shared.monitoring.hooks import Hook

WARMUP = 2  # steps of this process before the profile: allocators and caches settle
MOST_EXPENSIVE = 10


class Profiler(Hook):
    """Profiles `config.profile` steps of this process into OUTPUT_DIR/profile.

    Writes trace-RANK.json, which chrome://tracing and Perfetto show, and operators-RANK.txt, the ten operators that
    took most time of their own.
    """

    running: Any = None  # a torch.profiler.profile, until its last step has ended

    def begun(self, run: Any) -> None:
        from torch import profiler

        self.run, self.accelerator, self.steps = run, run.accelerator, run.config.profile
        self.folder = Path(run.config.output_dir) / "profile"
        schedule = profiler.schedule(wait=WARMUP - 1, warmup=1, active=self.steps, repeat=1)
        self.running = profiler.profile(schedule=schedule, on_trace_ready=self.write)
        self.running.record_steps = False  # a step is not an operator: it would head the table
        self.running.start()

    def step_ended(self) -> None:
        """Count a step; PyTorch's profiler starts and stops where the profile begins or ends."""
        if not self.running:
            return
        with self.run.monitor.timed("profile"):  # the time to start it and to write its files is not part of a step
            self.running.step()
        if self.running.step_num == WARMUP + self.steps:
            self.running = None

    def closed(self) -> None:
        """If the run ends before the profile does, write what there is and print how many steps are missing."""
        if not self.running:
            return
        done = self.running.step_num
        missing = min(self.steps, WARMUP + self.steps - done)
        self.running.stop()
        self.running = None
        self.accelerator.print(
            f"--profile: the run ended after {count_of(done, 'step')}, {missing} of the profile are missing"
        )

    def write(self, profile: Any) -> None:
        """Write the files of a profile that has stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = self.accelerator.process_index
        profile.export_chrome_trace(str(self.folder / f"trace-{rank}.json"))
        by = "self_cuda_time_total" if self.accelerator.device.type == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=MOST_EXPENSIVE, max_name_column_width=60)
        (self.folder / f"operators-{rank}.txt").write_text(table + "\n")
        self.accelerator.print(f"profile of {count_of(profile.step_num - WARMUP, 'step')} in {self.folder}")
