"""Start a recipe with settings of DDP that no flag has: variant.py '{"bucket_cap_mb": 1}' recipes/nlp.py --flags ...

The settings are arguments of DistributedDataParallel, and `power_sgd_rank`, which sends gradients as products of two
thin matrices of that rank (Vogels et al., 2019).
"""

import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from shared import compression, launch


def use(settings: dict[str, int]) -> None:
    """Have every DDP model of this process made with `settings`."""
    rank = settings.pop("power_sgd_rank", None)
    usual = compression.DDPSettings.to_kwargs
    compression.DDPSettings.to_kwargs = lambda self: usual(self) | settings  # type: ignore[method-assign]
    if rank:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        def register(self, model):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        compression.DDPSettings.register_comm_hook = register  # type: ignore[method-assign]


if __name__ == "__main__":
    settings, recipe = json.loads(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    use(settings)
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module
    spec.loader.exec_module(module)
    launch.run(module.main, module.Config)
