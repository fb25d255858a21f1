"""`--report_to`: wandb, TensorBoard and trackio get the numbers of metrics.jsonl, through Accelerate.

A tracker that fails is named once and never ends a run.
"""

import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.tracking import get_available_trackers

from shared.config.options import plain
from shared.errors import Preempted, UserError, complain, error_in_words
from shared.extras.hub import unreachable
from shared.monitoring.hooks import Hook, Value
from shared.processes.collectives import on_main_process

PROJECT = "accelerate-recipes"
UPLOAD_TIMEOUT = 120  # seconds that a lost network may hold up the end of a run; `wandb sync` uploads the rest


class Trackers(Hook):
    """Starts the trackers of a run, sends them its numbers, and closes them. Only the main process has any."""

    def opened(self, run: Any) -> None:
        on_main_process(run.accelerator, lambda: require_trackers(run.config.report_to))

    def loaded(self, run: Any) -> None:
        """Start the trackers, except in a dry run; the launch card says where they keep their data.

        A resumed run continues under the id that its checkpoint has.
        """
        self.accelerator, config, progress = run.accelerator, run.config, run.progress

        def start() -> tuple[str, str]:
            # A sweep of wandb sets the id. A new id does not come from `random`: runs of one seed would share it.
            identity = progress.run_id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
            states = []
            for kind in (kind for kind in dict.fromkeys(config.report_to) if kind in STARTERS and not config.dry_run):
                try:
                    tracker, state = STARTERS[kind](config, identity, progress.step)
                    self.accelerator.trackers.append(tracker)
                    states.append(state)
                except Exception as error:  # a tracker that did not start cannot be ended either
                    failure = f"{kind} did not start: {error_in_words(error)}"
                    complain(f"warning: --report_to {failure}; metrics.jsonl will have all values")
            return identity, "; ".join(states) or "none"

        progress.run_id, run.card["tracker"] = on_main_process(self.accelerator, start)
        run.closing.push(self.closed)

    def logged(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the numbers of a line. Text, such as the digest of the samples, stays in metrics.jsonl."""
        numbers = {key: value for key, value in values.items() if not isinstance(value, str)}

        def send(tracker: Any) -> None:
            if tracker.name == "wandb":  # its own counter drops the steps that a resumed run trains again
                tracker.log({"step": step, **numbers})
            else:
                tracker.log({**numbers}, step=step)

        self._guarded("failed and was dropped", send)

    def closed(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Close the trackers: a process that ends at once loses their lines. wandb shows an `error` as a failed run."""
        wrong = error is not None and not issubclass(error, Preempted)
        self._guarded(
            "could not be closed", lambda it: it.run.finish(1) if wrong and it.name == "wandb" else it.finish()
        )
        self.accelerator.trackers.clear()  # or Accelerate's end_training would end them again

    def _guarded(self, failure: str, act: Callable[[Any], None]) -> None:
        """Call `act` on each tracker; one that fails is named and not used again."""
        for tracker in list(self.accelerator.trackers):
            try:
                act(tracker)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                complain(f"warning: {tracker.name} {failure}: {error_in_words(error)}; metrics.jsonl has all values")


def require_trackers(report_to: Sequence[str]) -> None:
    """Refuse a tracker that is not installed: the run would go on without it.

    Raises:
        UserError: names --report_to and the command that installs the package.
    """
    for name in {*report_to} - {"none", *(tracker.value for tracker in get_available_trackers())}:
        raise UserError(f"--report_to {name}: the package is not installed; run `pip install {name}`")


def start_wandb(config: Any, run_id: str, step: int) -> tuple[Any, str]:
    """Start wandb in OUTPUT_DIR/wandb, online or offline; the tracker, and the line for the launch card."""
    import wandb
    from accelerate.tracking import WandBTracker

    mode, why_offline = wandb_mode()
    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT", PROJECT),  # an argument of wandb.init would override it
        id=run_id,
        name=config.run_name,
        dir=config.output_dir,
        mode=mode,
        resume="allow",
        settings=wandb.Settings(finish_timeout=UPLOAD_TIMEOUT),
    )
    tracker.start()
    tracker.store_init_configuration(plain(config))
    tracker.run.define_metric("*", step_metric="step")
    if tracker.run.disabled:
        return tracker, f"wandb (disabled: {why_offline})"
    if tracker.run.offline:
        parts = f"{shlex.quote(config.output_dir)}/wandb/offline-run-*-{run_id}"  # a folder for each start of the run
        return tracker, f"wandb (offline: {why_offline}; sync later with `wandb sync {parts}`)"
    return tracker, f"wandb ({tracker.run.url})"


def wandb_mode() -> tuple[str, str]:
    """The mode for wandb.init, and the reason why the run is not online, if it is not.

    Call this before wandb.init, which raises without a key, and after which this process cannot go offline.
    """
    import wandb

    settings = wandb.setup().settings  # of the environment and of wandb's settings file
    if settings.mode != "online":
        return settings.mode, f"wandb's mode is set to {settings.mode}"
    reason = unreachable(settings.base_url)  # wandb would wait for two minutes, and then track nothing
    if not reason and not wandb.login(prompt=False, verify=False):
        reason = "no API key: run `wandb login`"
    return ("offline", reason) if reason else ("online", "")


def start_tensorboard(config: Any, run_id: str, step: int) -> tuple[Any, str]:
    """Start TensorBoard in OUTPUT_DIR/tensorboard; the tracker, and the line for the launch card."""
    from accelerate.tracking import TensorBoardTracker

    # Hides the events of steps that are trained again; in a new run, those of an earlier run in the same folder.
    tracker = TensorBoardTracker("tensorboard", config.output_dir, purge_step=step + 1 if step else 0)
    tracker.start()
    settings = {name: it if isinstance(it, int | float | str) else str(it) for name, it in plain(config).items()}
    tracker.store_init_configuration(settings)
    return tracker, f"tensorboard (`tensorboard --logdir {shlex.quote(config.output_dir)}`)"


def start_trackio(config: Any, run_id: str, step: int) -> tuple[Any, str]:
    """Start trackio, which keeps its data in TRACKIO_DIR; the tracker, and the line for the launch card."""
    from accelerate.tracking import TrackioTracker

    name = f"{config.run_name}-{run_id}" if config.run_name else run_id  # trackio resumes by name, which must be unique
    tracker = TrackioTracker(PROJECT, name=name, resume="allow", embed=False)
    tracker.start()
    tracker.store_init_configuration(plain(config))
    return tracker, f"trackio (run {name}; `trackio show --project {PROJECT}`)"


STARTERS = {"wandb": start_wandb, "tensorboard": start_tensorboard, "trackio": start_trackio}
