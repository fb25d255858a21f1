"""Start a recipe with settings of DDP that have no flag; scaling.py starts this script.

    start_variant.py '{"bucket_cap_mb": 1}' recipes/nlp.py --flags ...

The settings are arguments of DistributedDataParallel, and `power_sgd_rank`, which sends gradients as products of two
thin matrices of that rank (Vogels et al., 2019).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from shared.run import command


def use(settings: dict[str, int]) -> None:
    """Make every DDP model of this process with `settings`."""
    from accelerate.utils import DistributedDataParallelKwargs

    rank = settings.pop("power_sgd_rank", None)
    usual = DistributedDataParallelKwargs.to_kwargs
    DistributedDataParallelKwargs.to_kwargs = lambda self: usual(self) | settings  # type: ignore[method-assign]
    if rank:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        from shared.extras.gradient_compression import GradientCompression

        def register(self, run):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            run.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        GradientCompression.prepared = register  # type: ignore[method-assign]


if __name__ == "__main__":
    use(json.loads(sys.argv[1]))
    sys.argv = sys.argv[2:]
    module = command.load_recipe(Path(sys.argv[0]))
    command.run(module.main, module.Config)
