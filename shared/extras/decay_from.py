"""--decay_from: a run that begins with a checkpoint of another run, in its stable phase, and decays from there."""

from pathlib import Path
from typing import Any

from torch import nn

from shared.checkpoints.resuming import problem_with, read_state
from shared.config import options
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.processes.collectives import on_writers

# The settings that may differ between both runs, and what the new run begins without.
DECAY_OR_END = ("num_train_epochs", "max_train_steps", "lr_scheduler_type", "decay_ratio", "decay_from")
NONE_YET: dict[str, Any] = {"best_step": None, "best_results": {}, "evaluations_since_best": 0, "run_id": None}


def step_of(checkpoint: str) -> int:
    """The step of a checkpoint, from its name.

    Raises:
        UserError: it is not the name of a checkpoint.
    """
    step = Path(checkpoint).name.removeprefix("step_")
    if not step.isdecimal():
        raise UserError(f"--decay_from {checkpoint}: expected a folder such as out/checkpoints/step_00000200")
    return int(step)


class DecayFrom(Hook):
    """Gives a new run the checkpoint --decay_from, and requires that its decay begins there."""

    begins = False  # whether this start is at the checkpoint of the other run

    def opened(self, run: Any) -> None:
        self.run, self.flag = run, f"--decay_from {run.config.decay_from}"

    def first_checkpoint(self) -> tuple[Path, dict[str, Any]]:
        """The checkpoint, and its state with a best model and a tracker of its own.

        Raises:
            UserError: the checkpoint is missing or damaged, or has the name of another step.
        """
        config, self.begins = self.run.config, True
        path = Path(config.decay_from)

        def read() -> dict[str, Any]:
            if problem := problem_with(path):
                raise UserError(f"{self.flag}: {problem}")
            state = read_state(path)
            if (step := state["step"]) != config.decay_start:
                raise UserError(f"{self.flag} is the checkpoint of step {step}: give it back its name")
            return state

        state = on_writers(self.run.accelerator, config, read)[0]
        own = options.plain(config)
        settings = state["config"] | {name: own[name] for name in DECAY_OR_END}
        return path, state | NONE_YET | {"evaluated_at_end": False, "config": settings}

    def given(self, run: Any, model: nn.Module) -> None:
        """Check that the run goes on, and that the last step before the checkpoint had the peak learning rate.

        Raises:
            UserError: the run ends there, or that step had another rate, or none is known.
        """
        if run.plan.total_steps <= run.config.decay_start:
            raise UserError(f"{self.flag}: the run ends at step {run.plan.total_steps}: give it more steps")
        rate, peak = run.progress.learning_rate, run.config.peak_learning_rate()
        if self.begins and rate != peak:
            raise UserError(
                f"{self.flag}: its last step had a learning rate of {rate}, and the peak is {peak}: name a checkpoint "
                "after the warm-up and before the decay"
            )
