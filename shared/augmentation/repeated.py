"""Repeated augmentation: a step has each image several times (Hoffer et al. 2019, "Augment your batch")."""

from typing import Any

import numpy as np

from shared.errors import say
from shared.plan.batches import Plan
from shared.plan.draws import Ints, permutation


class RepeatedPlan(Plan):
    """A plan in which each sample appears `repeats` consecutive times in the stream, as if in `repeats` epochs.

    Augmentation draws from (seed, epoch, sample), so the copies differ. A pass over all samples takes `repeats` epochs,
    each as long as without repeats. Everything else is as in `Plan`: the run does not depend on the processes.
    """

    repeats = 1

    @classmethod
    def of_run(cls, config: Any, accelerator: Any, **data: Any) -> "RepeatedPlan":
        """As in the base class, with --repeated_augmentation."""
        plan = super().of_run(config, accelerator, **data)
        assert isinstance(plan, RepeatedPlan)
        plan.repeats = config.repeated_augmentation
        if plan.repeats > 1 and plan.total_samples < plan.repeats * plan.num_samples:
            say(f"--repeated_augmentation {plan.repeats}: some images are not used, a pass takes {plan.repeats} epochs")
        return plan

    def global_batch(self, step: int) -> tuple[Ints, Ints]:
        """As in the base class. The first copies of all samples come first, so that mixing mixes different images."""
        start = step * self.global_batch_size
        places = np.arange(start, min(start + self.global_batch_size, self.total_samples))
        passes, places = np.divmod(places, self.repeats * self.num_samples)
        places, copies = np.divmod(places, self.repeats)
        samples = np.empty_like(places)
        for one in np.unique(passes).tolist():
            mine = np.flatnonzero(passes == one)
            first, last = places[mine[0]], places[mine[-1]]
            order = permutation(self.seed, one * self.repeats, self.num_samples, int(first), int(last) + 1)
            samples[mine] = order[places[mine] - first]
        apart = copies.argsort(kind="stable")
        return samples[apart], (passes * self.repeats + copies)[apart]
