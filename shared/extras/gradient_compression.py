"""`--gradient_compression`: all-reduce gradients in a 16-bit format."""

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from shared.monitoring.hooks import Hook

HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class GradientCompression(Hook):
    """Makes DDP average gradients in the format of --gradient_compression, if there is one and several processes.

    In fp16 a gradient above 65,504 becomes infinite, and the update is skipped as for any non-finite gradient.
    """

    def prepared(self, run: Any) -> None:
        """Register a hook of DDP, which keeps nothing, so checkpoints need not save it; say so on the launch card."""
        compression = run.config.gradient_compression
        if compression != "none" and run.accelerator.num_processes > 1:
            run.card["gradients"] = f"sent and summed in {compression}"
            compress = HOOKS[compression]
            # Without the lambda, DDP would refuse the one for bf16 by its name on a CPU, where it works.
            run.model.register_comm_hook(None, lambda group, bucket: compress(group, bucket))  # noqa: PLW0108
