"""What a run reports while it trains: metrics.jsonl, trackers on request, a progress bar, and a picture at the end.

metrics.jsonl is the record that other programs rely on. wandb, TensorBoard and trackio get the same numbers through
Accelerate; a tracker that fails is named once and never ends a run.
"""

import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.checkpoints.progress import Progress
from shared.compat import of_accelerate
from shared.config.options import Options, plain
from shared.errors import UserError
from shared.launch.hub import unreachable
from shared.monitoring.curves import draw_curves
from shared.monitoring.pictures import Picture
from shared.monitoring.time_report import breakdown
from shared.processes.collectives import on_main_process

Value = float | int | str
TRACKERS = ("wandb", "tensorboard", "trackio")
# JSON has no NaN. JavaScript and protobuf use these names, and Python's float() reads them.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PROMPT_TIMEOUT = 120  # seconds that wandb may wait for a key to be typed; below the process group's time-out
UPLOAD_TIMEOUT = 120  # seconds that a lost network may hold up the end of a run; `wandb sync` uploads the rest


class Tracker:
    """Logs a run's numbers. Constructed and called on all processes; only the main process writes.

    Attributes:
        run_id: eight characters, the same on all processes; kept in the checkpoint, so that a resumed run continues it.
        state: one line for the launch card: where the trackers keep their data, or why one does not run.
        bar: the progress bar, which `log` moves.
        data: the digests of the run's data, for the last line: a finished run may have no checkpoint with them.
    """

    data: Sequence[str] = ()

    def __init__(
        self,
        accelerator: Any,
        output_dir: Path,
        *,
        report_to: Sequence[str],
        project: str,
        run_name: str | None,
        run_id: str | None,
        config: Mapping[str, object],
        step: int,
        total_steps: int,
    ) -> None:
        """Start the trackers `report_to`, at `step`, where the run begins.

        `output_dir` exists; `run_id` is the one in the checkpoint, None in a new run.
        """
        self.accelerator, self.acts = accelerator, accelerator.is_main_process
        self.metrics_file = output_dir / "metrics.jsonl"
        # Flags that are already set, that FSDP refuses, or that the recipe lacks are no advice.
        self.compressed = config.get("gradient_compression", "none") != "none" or accelerator.is_fsdp2
        self.unpacked = config.get("packing") is False

        def start() -> tuple[str, str]:
            # A sweep of wandb sets the id. A new id does not come from `random`: runs of one seed would share it.
            identity = run_id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
            started, states = [], []
            for name in report_to:
                accelerator.trackers.clear()
                try:
                    if name == "wandb":
                        states.append(start_wandb(accelerator, output_dir, project, run_name, identity, config))
                    elif name == "tensorboard":
                        states.append(start_tensorboard(accelerator, output_dir, config, step))
                    elif name == "trackio":
                        states.append(start_trackio(accelerator, project, run_name, identity, config))
                    else:
                        states.append(name)
                    started += accelerator.trackers  # the next init_trackers empties this list
                except Exception as error:  # a tracker that did not start cannot be ended either
                    failure = f"{name} did not start: {first_line(error)}"
                    warn(f"--report_to {failure}; metrics.jsonl will have all values")
                    states.append(f"none ({failure})")
            accelerator.trackers = started
            return identity, "; ".join(states)

        self.run_id, self.state = on_main_process(accelerator, start)
        self.bar = progress_bar(accelerator, total_steps, step)

    @classmethod
    def of_run(cls, accelerator: Any, config: Options, progress: Progress, total_steps: int) -> "Tracker":
        """The tracker of a recipe's run; stores its id in `progress`, for the checkpoints."""
        tracker = cls(
            accelerator,
            Path(config.output_dir),
            report_to=config.report_to,
            project="accelerate-recipes",
            run_name=config.run_name,
            run_id=progress.run_id,
            config=plain(config),
            step=progress.step,
            total_steps=total_steps,
        )
        progress.run_id, tracker.data = tracker.run_id, progress.data or ()
        if config.report_to != ("none",):
            accelerator.print(f"  tracker  {tracker.state}")
        return tracker

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one line of metrics.jsonl, show it, and pass its numbers to the tracker."""
        if not self.acts:
            return
        line = {"step": step} | {key: finite_or_name(value) for key, value in values.items()}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")  # closed, so flushed: a killed run has its last line
        show(self.bar, step, values)
        numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
        self.guarded("failed and was dropped", lambda tracker: send(tracker, step, numbers))

    def finish(self, step: int, summary: Mapping[str, float], pictures: Sequence[Picture] = ()) -> None:
        """Write the last line of a run that has reached its end, and print where its time went.

        Then draw curves.png with `pictures` below the curves, and close.
        """
        self.log(step, {**summary, **({"data": " ".join(self.data)} if self.data else {})})
        if self.acts:
            lines = read_metrics(self.metrics_file)
            if said := breakdown(lines, self.compressed, self.unpacked):
                with tqdm.external_write_mode():
                    print(said, flush=True)
            try:
                draw_curves(lines, self.metrics_file.with_name("curves.png"), pictures)
            except Exception as error:  # the run is complete even without a picture
                warn(f"curves.png was not drawn: {first_line(error)}")
        self.close()

    def close(self) -> None:
        """End the progress bar and the trackers."""
        self.bar.close()
        self.guarded("could not be closed", lambda tracker: tracker.finish())
        self.accelerator.trackers.clear()  # or Accelerate's end_training would end them again

    def guarded(self, failure: str, act: Callable[[Any], None]) -> None:
        """Call `act` on each tracker; one that fails is named and not used again."""
        for tracker in list(self.accelerator.trackers):
            try:
                act(tracker)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                warn(f"{tracker.name} {failure}: {first_line(error)}; metrics.jsonl has all values")


def require_trackers(report_to: Sequence[str]) -> None:
    """Refuse a tracker that is unknown or not installed, which Accelerate would silently leave out.

    Raises:
        UserError: names --report_to and the command that installs the package.
    """
    for name in report_to:
        if name == "none":
            continue
        if name not in TRACKERS:
            raise UserError(f"--report_to {name} is unknown: use none, {', '.join(TRACKERS)}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without origin: only a folder of that name, such as wandb/
            raise UserError(f"--report_to {name}: the package is not installed; run `pip install {name}`")


def start_wandb(
    accelerator: Any, output_dir: Path, project: str, run_name: str | None, run_id: str, config: Mapping[str, object]
) -> str:
    """Start wandb in OUTPUT_DIR/wandb, online or offline; the line for the launch card."""
    import wandb
    from accelerate.tracking import WandBTracker

    mode, why_offline = wandb_mode()
    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT", project),  # an argument of wandb.init would override it
        id=run_id,
        name=run_name,
        dir=str(output_dir),
        mode=mode,
        resume="allow",
        settings=wandb.Settings(finish_timeout=UPLOAD_TIMEOUT),
    )
    of_accelerate.set_trackers(accelerator, [tracker])
    accelerator.init_trackers(project, config=dict(config))
    run = tracker.run
    # The step is a field and not wandb's own counter, which drops the steps that a resumed run trains again.
    run.define_metric("*", step_metric="step")
    if run.disabled:
        return f"wandb (disabled: {why_offline})"
    if run.offline:
        parts = output_dir / "wandb" / f"offline-run-*-{run_id}"  # one folder for each time the run is resumed
        return f"wandb (offline: {why_offline}; sync later with `wandb sync {parts}`)"
    return f"wandb ({run.url})"


def wandb_mode() -> tuple[str | None, str]:
    """The mode for wandb.init, None where the user has set it, and the reason why the run is offline, if it is.

    Call this before wandb.init, which raises without a key, and after which this process cannot go offline.
    """
    import wandb

    if "WANDB_MODE" in os.environ:
        return None, f"WANDB_MODE={os.environ['WANDB_MODE']}"
    settings = wandb.setup().settings
    if settings.mode != "online":
        return None, "set in wandb's settings file"
    if reason := unreachable(settings.base_url):  # wandb would wait for two minutes, and then track nothing
        return "offline", reason
    try:
        # Looks for a key in the environment, netrc and wandb's settings, and asks for one in a terminal.
        found = wandb.login(verify=False, timeout=PROMPT_TIMEOUT)
    except wandb.errors.UsageError:
        return "offline", "no API key and no terminal"
    return (None, "") if found else ("offline", "no API key was given")


def start_tensorboard(accelerator: Any, output_dir: Path, config: Mapping[str, object], step: int) -> str:
    """Start TensorBoard in OUTPUT_DIR/tensorboard; the line for the launch card."""
    from accelerate.tracking import TensorBoardTracker

    # Hides the events of steps that are trained again; in a new run, those of an earlier run in the same folder.
    purge_step = step + 1 if step else 0
    tracker = TensorBoardTracker("tensorboard", str(output_dir), purge_step=purge_step)
    of_accelerate.set_trackers(accelerator, [tracker])
    accelerator.init_trackers("tensorboard", config=flat(config))
    return f"tensorboard (`tensorboard --logdir {output_dir}`)"


def start_trackio(
    accelerator: Any, project: str, run_name: str | None, run_id: str, config: Mapping[str, object]
) -> str:
    """Start trackio, which keeps its data in TRACKIO_DIR; the line for the launch card."""
    from accelerate.tracking import TrackioTracker

    name = f"{run_name}-{run_id}" if run_name else run_id  # trackio resumes by name, so the name has to be unique
    tracker = TrackioTracker(project, name=name, resume="allow", embed=False)
    of_accelerate.set_trackers(accelerator, [tracker])
    accelerator.init_trackers(project, config=dict(config))
    return f"trackio (run {name}; `trackio show --project {project}`)"


def send(tracker: Any, step: int, numbers: Mapping[str, float | int]) -> None:
    """Log one line's numbers; text, such as the digest of the samples, stays in metrics.jsonl."""
    if tracker.name == "wandb":
        tracker.log({"step": step, **numbers})
    else:
        tracker.log(dict(numbers), step=step)


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings as TensorBoard accepts them: nested names joined by a slash, other values than numbers as text."""
    plain: dict[str, bool | int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            plain |= flat(value, f"{prefix}{name}/")
        else:
            plain[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return plain


def read_metrics(metrics_file: Path) -> list[dict[str, Value]]:
    """The lines of a metrics.jsonl, with NaN and infinities as floats again.

    Raises:
        UserError: a line is not a JSON object with a step. An incomplete last line, left by a crash, is ignored.
    """
    return [
        {key: NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in line.items()}
        for _, line in parsed_lines(metrics_file)
    ]


def cut_metrics(metrics_file: Path, step: int) -> None:
    """Remove the lines after `step`, and the summary of a finished run, from metrics.jsonl; at step 0, all lines.

    The file is replaced as a whole, so that a crash leaves the old file or the new one.

    Raises:
        UserError: the file is not a metrics.jsonl.
    """
    if not metrics_file.exists():
        return
    known = [text for text, line in parsed_lines(metrics_file) if line["step"] <= step and "train_runtime" not in line]
    replacement = metrics_file.with_name("metrics.jsonl.new")
    with replacement.open("w", encoding="utf-8") as file:
        file.writelines(text + "\n" for text in known if step > 0)
        file.flush()
        os.fsync(file.fileno())
    replacement.replace(metrics_file)


def parsed_lines(metrics_file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line as text and parsed.

    Raises:
        UserError: a line other than the last is not a JSON object with a step.
    """
    texts = metrics_file.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append((text, line))
        elif number < len(texts):
            raise UserError(f"{metrics_file}, line {number}: not a JSON object with a step; correct or delete the file")
    return lines


def finite_or_name(value: Value) -> Value:
    """A value that JSON can hold: a float that is not finite becomes its name."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def progress_bar(accelerator: Any, total: int, initial: int) -> "tqdm[Any]":
    """A bar over `total` steps of which `initial` are done, drawn by the main process, and only in a terminal."""
    hidden = not (accelerator.is_main_process and sys.stderr.isatty())
    return tqdm(total=total, initial=initial, disable=hidden, unit="step", dynamic_ncols=True, mininterval=0.5)


def show(bar: "tqdm[Any]", step: int, values: Mapping[str, Value]) -> None:
    """Show one line's values: in the bar, or as a line of text where there is no bar (a log file).

    Evaluation scores always get a line, because the bar would show them for a moment only.
    """
    text = readable(values)
    if text and (bar.disable or "loss" not in values):
        with nullcontext() if bar.disable else tqdm.external_write_mode():
            print(f"step {step}/{bar.total}  {text}", flush=True)
    elif text:
        bar.set_postfix_str(text, refresh=False)
    bar.update(step - bar.n)


def readable(values: Mapping[str, Value]) -> str:
    """Loss, learning rate and rate of a training line, or the scores of an evaluation line; "" for others."""
    numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
    if "loss" not in numbers:
        return "  ".join(f"{key} {value:.4g}" for key, value in numbers.items() if key.startswith("eval_"))
    parts = [f"loss {numbers['loss']:.4f}"]
    if "learning_rate" in numbers:
        parts.append(f"lr {numbers['learning_rate']:.2e}".replace("e-0", "e-"))
    if "samples_per_second" in numbers:
        parts.append(f"{numbers['samples_per_second']:,.0f} samples/s")
    if "slowest_process" in numbers:
        behind = numbers["slowest_process_behind"]
        parts.append(f"process {numbers['slowest_process']:.0f} is {behind:.0%} behind".replace("%", " %"))
    return "  ".join(parts)


def warn(text: str) -> None:
    """One line on stderr, above the progress bar."""
    tqdm.write(f"warning: {text}", file=sys.stderr)


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its message: libraries add paragraphs."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
