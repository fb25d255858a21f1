"""The settings of shared/extras, in addition to those of `Options`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shared.config.fields import Limits, Meaning
from shared.config.options import Options, Rule
from shared.extras.costs import Costs
from shared.extras.flops import Mfu
from shared.extras.gradient_compression import GradientCompression
from shared.extras.hub import Upload
from shared.extras.profiling import Profiler
from shared.extras.trackers import Trackers
from shared.fsdp.strategy import RULES as RULES_OF_FSDP
from shared.fsdp.strategy import Sharding
from shared.monitoring.hooks import Hook
from shared.remote.mirror import Mirror
from shared.report.page import Report

TrackerName = Literal["none", "wandb", "tensorboard", "trackio"]


@dataclass(frozen=True, kw_only=True)
class ExtraOptions(Options):
    """Settings of what a run can do besides training."""

    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Number format of gradients sent between processes; 16 bits halve the traffic. No effect with one process."""
    report_to: Annotated[tuple[TrackerName, ...], Meaning.NOT_IN_RESULT] = ("none",)
    """One or more experiment trackers, in addition to metrics.jsonl."""
    peak_tflops: Annotated[float | None, Limits(above=0), Meaning.NOT_IN_RESULT, Meaning.MAY_DIFFER] = None
    """Peak speed of one device in TFLOP/s, from which mfu is computed. None: measured at the start."""
    profile: Annotated[int | None, Meaning.NOT_IN_RESULT] = None
    """Profile this many steps, after two warm-up steps: profile/ gets a trace and the ten most expensive operators."""
    mirror_checkpoints: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """URL (s3://bucket/folder) to which checkpoints are copied. A start on an empty machine loads the newest one."""
    push_to_hub: Annotated[bool, Meaning.NOT_IN_RESULT] = False
    """Upload model/ to the Hub at the end."""
    hub_model_id: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """Repository for --push_to_hub. None: the name of --output_dir, in your own account."""

    NEEDS: ClassVar = (*Options.NEEDS, ("hub_model_id", "push_to_hub"))
    RULES: ClassVar[tuple[Rule, ...]] = RULES_OF_FSDP  # instead of the rule of `Options`, which refuses FSDP

    def hooks(self) -> list[Hook]:
        # Profiles and mirrors are closed before trackers, whose uploads may take longer than a scheduler allows.
        return [
            *super().hooks(),
            Sharding(),
            GradientCompression(),
            Mfu(),
            Costs(),
            Profiler(),
            Mirror(),
            Upload(),
            Report(),
            Trackers(),
        ]
