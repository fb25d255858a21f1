"""Start a recipe with settings of DDP that have no flag; scaling.py starts this script.

    start_variant.py '{"bucket_cap_mb": 1}' recipes/nlp.py --flags ...

The settings are arguments of DistributedDataParallel and two more. `power_sgd_rank` sends gradients as products of two
thin matrices of that rank (Vogels et al., 2019). `data_parallel` is a number of GPUs: this one process spreads each
micro-batch over them with torch.nn.DataParallel, and multiplies the size of the micro-batches by that number.
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from shared.run import command


def use(settings: dict[str, int]) -> None:
    """Make every DDP model of this process with `settings`."""
    rank = settings.pop("power_sgd_rank", None)
    if gpus := settings.pop("data_parallel", None):
        import torch
        from accelerate import Accelerator

        prepare = Accelerator.prepare_model

        def spread(self, *args, **kwargs):
            return torch.nn.DataParallel(prepare(self, *args, **kwargs), list(range(gpus)))

        Accelerator.prepare_model = spread  # type: ignore[method-assign]
    from accelerate.utils import DistributedDataParallelKwargs

    usual = DistributedDataParallelKwargs.to_kwargs
    DistributedDataParallelKwargs.to_kwargs = lambda self: usual(self) | settings  # type: ignore[method-assign]
    if rank:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        from shared.extras.gradient_compression import GradientCompression

        def register(self, run):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            run.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        GradientCompression.prepared = register  # type: ignore[method-assign]


def enlarged(config: Any, times: int) -> Any:
    """A recipe's config whose limits of a micro-batch are multiplied by `times`."""
    limits = ("max_tokens_per_micro_batch", "per_device_train_batch_size")
    given = {name: limit for name in limits if (limit := getattr(config, name, None))}
    return dataclasses.replace(config, **{name: times * limit for name, limit in given.items()})


if __name__ == "__main__":
    settings, recipe = json.loads(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    times = settings.get("data_parallel", 1)
    use(settings)
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module
    spec.loader.exec_module(module)
    command.run(lambda config: module.main(enlarged(config, times)), module.Config)
