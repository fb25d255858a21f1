"""Repeated augmentation: a step has each of its images several times (Hoffer et al. 2019, "Augment your batch")."""

from dataclasses import dataclass

import numpy as np

from shared.errors import say
from shared.plan.batches import Plan
from shared.plan.draws import Ints


@dataclass(kw_only=True, eq=False)
class RepeatedPlan(Plan):
    """A plan whose stream has each sample `repeats` times in succession, as if in as many epochs.

    Augmentation makes the copies differ. A pass over the data takes as many epochs.
    """

    repeats: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats > 1 and self.total_samples < self.repeats * self.num_samples:
            say(f"--repeated_augmentation {self.repeats}: some images are not used, a pass takes {self.repeats} epochs")

    def global_batch(self, step: int) -> tuple[Ints, Ints]:
        """As in the base class; the first copies of all samples come first, so that mixing mixes different images."""
        passes, places = np.divmod(self.places(step), self.repeats * self.num_samples)
        places, copies = np.divmod(places, self.repeats)
        samples, apart = self.samples_at(passes * self.repeats, places), copies.argsort(kind="stable")
        return samples[apart], (passes * self.repeats + copies)[apart]
