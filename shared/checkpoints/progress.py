"""The position of a run: its entries in a checkpoint's `state.json`, all that a recipe's loop keeps between steps."""

import math
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shared.plan import draws


@dataclass(frozen=True)
class BestBy:
    """The evaluation score that selects the best model."""

    name: str  # as in metrics.jsonl: eval_accuracy
    greater_is_better: bool
    promised: tuple[str, ...] = ()  # all names that an evaluation returns at least

    @property
    def names(self) -> list[str]:
        """All names that an evaluation returns at least, the one that selects the best model first."""
        return [*dict.fromkeys((self.name, *self.promised))]

    def missing(self, results: dict[str, float]) -> str:
        """What is wrong with the names of the scores, as a sentence; "" if nothing, or if a signal interrupted them."""
        if others := [name for name in results if not name.startswith("eval_")]:
            return f"evaluate returned {', '.join(others)}, but the names of scores begin with eval_"
        absent = [name for name in self.names if name not in results]
        return f"evaluate returned {', '.join(results)}, but not {', '.join(absent)}" if results and absent else ""

    def improves(self, new: dict[str, float], best: dict[str, float]) -> bool:
        """Whether `new` is better than `best`. NaN is only better than no score.

        `best` has no such score before the first evaluation, and if the run computed other metrics before.
        """
        score, before = new[self.name], best.get(self.name, math.nan)
        if math.isnan(before):
            return self.name not in best or not math.isnan(score)
        return score > before if self.greater_is_better else score < before


@dataclass
class Progress:
    """The position of a run and its evaluations; everything else is a function of the config and `step`."""

    step: int = 0  # optimizer steps done
    learning_rate: float | None = None  # of the last one
    seconds: float = 0.0  # of training in earlier starts of the run
    results: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best_step: int | None = None
    best_results: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    evaluated_at_end: bool = False  # the last evaluation was made only because the run ended there
    evaluation_owed: bool = False  # the one after this step was interrupted or failed: a resumed run makes it first
    run_id: str | None = None  # of the tracker
    data: list[str] | None = None  # digests of the training and the validation data
    model: str | None = None  # digest of the config in a local --model_name_or_path
    first_processes: int = 1  # number of processes of the first launch, for which the steps are cut
    world_size: int | None = None  # number of processes of the launch that saved the checkpoint
    order: int = draws.VERSION  # of the order of samples in which the run began
    monitor: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter, repr=False)

    def record(self, results: dict[str, float], best_by: BestBy, at_end: bool = False) -> bool:
        """Record an evaluation after `step` steps. False if it is empty, because a signal interrupted it."""
        self.evaluation_owed = not results
        if not results:
            return False
        self.results, self.evaluated_at_end = results, at_end
        if best_by.improves(results, self.best_results):
            self.best_step, self.best_results, self.evaluations_since_best = self.step, results, 0
        else:
            self.evaluations_since_best += 1
        return True

    def out_of_patience(self, patience: int | None) -> bool:
        """Whether the last `--early_stopping_patience` evaluations brought no better score."""
        return patience is not None and self.evaluations_since_best >= patience

    def total_seconds(self) -> float:
        """Seconds of training over all starts of the run."""
        return self.seconds + time.perf_counter() - self.started

    def state(self) -> dict[str, Any]:
        """The entries for a checkpoint's `state.json`."""
        state = asdict(self) | {"seconds": self.total_seconds()}
        del state["started"]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """The progress in a checkpoint's state; other entries of the state are ignored."""
        state = {"order": 1} | state  # the first order was not recorded
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})
