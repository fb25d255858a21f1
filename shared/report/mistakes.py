"""What an evaluation got wrong, in mistakes.json: counts of each class, confused classes, and the worst samples."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.disk import replace_file
from shared.errors import complain, error_in_words
from shared.monitoring.hooks import Hook, Value
from shared.monitoring.log import finite_or_name

Ints = NDArray[np.int64]
FILE = "mistakes.json"
WORST = 16  # samples
MOST_CLASSES = 100  # with counts
MOST_CONFUSED = 20  # classes of the matrix
MOST_POINTS = 500  # [target, prediction] of a regression, evenly spread over the data
LONGEST = 400  # characters of a text


class Mistakes(Hook):
    """Writes mistakes.json after an evaluation of the model that is exported: the last one, or the best so far.

    A recipe gives it to `prepare`, and calls `keep` when it evaluates.

    Args:
        names: of the classes or labels, in the order of the model's outputs; empty for regression.
        show: makes a sample visible: {"text": ...}, with "before" and "after" around a word, or {"picture": data URL}.
    """

    def __init__(self, names: Sequence[str], show: Callable[[int], dict[str, str]]) -> None:
        self.names, self.show, self.found = names, show, dict[str, Any]()

    def given(self, run: Any, model: Any) -> None:
        self.run = run

    def keep(self, predictions: NDArray[Any], losses: NDArray[np.float64], targets: NDArray[Any]) -> None:
        """Keep what an evaluation found, on the main process.

        Args:
            predictions: [N] class ids or numbers, [N, labels] of 0 and 1, or [N, k] class ids, the likeliest first.
            losses: [N].
            targets: [N] class ids or numbers, or [N, labels] of 0 and 1.
        """
        if self.run.accelerator.is_main_process:
            with not_fatal(FILE):
                first = predictions if predictions.ndim == targets.ndim else predictions[:, 0]
                self.found = mistakes(self.names, self.show, first, losses, targets)

    def logged(self, step: int, values: Mapping[str, Value]) -> None:
        """Write what was kept, once the scores of its evaluation are logged."""
        best = self.run.progress.best_step == step or not self.run.config.load_best_model_at_end
        if self.found and best and "eval_loss" in values:
            with not_fatal(FILE):
                replace_file(Path(self.run.config.output_dir) / FILE, json.dumps({"step": step} | self.found))
        self.found = {}


@contextmanager
def not_fatal(file: str) -> Iterator[None]:
    """Warn that `file` was not written, because a run is complete even without it."""
    try:
        yield
    except Exception as error:
        complain(f"warning: {file} was not written: {error_in_words(error)}")


def mistakes(
    names: Sequence[str],
    show: Callable[[int], dict[str, str]],
    predictions: NDArray[Any],
    losses: NDArray[np.float64],
    targets: NDArray[Any],
) -> dict[str, Any]:
    """The content of mistakes.json; `predictions` have the shape of `targets`, for the rest see `Mistakes`."""
    found: dict[str, Any]
    if not names:
        some = np.linspace(0, len(targets) - 1, min(len(targets), MOST_POINTS)).astype(np.int64)
        both = np.stack([targets[some], predictions[some]], 1).astype(np.float64)
        found = {"points": both[np.isfinite(both).all(1)].tolist()}
    elif targets.ndim == 1:
        predictions, targets = predictions.astype(np.int64), targets.astype(np.int64)
        hits = targets[predictions == targets]
        true, predicted, hit = (np.bincount(each, minlength=len(names)) for each in (targets, predictions, hits))
        errors = true + predicted - 2 * hit
        found = classes(names, true, predicted, hit) | confused(names, predictions, targets, errors)
    else:
        predictions, targets = predictions == 1, targets == 1
        found = classes(names, targets.sum(0), predictions.sum(0), (predictions & targets).sum(0))

    def says(value: Any) -> str:
        if not names:
            return f"{value:.6g}"
        return names[int(value)] if targets.ndim == 1 else ", ".join(itertools.compress(names, value)) or "none"

    wrong = (predictions != targets).reshape(len(targets), -1).any(1)
    worst = np.flatnonzero(wrong)
    order = np.argsort(-np.nan_to_num(losses[worst], nan=np.inf), kind="stable")[:WORST]
    samples = [
        {"row": i + 1, "says": says(predictions[i]), "is": says(targets[i]), "loss": finite_or_name(float(losses[i]))}
        | {name: cut(value) for name, value in show(i).items()}
        for i in worst[order].tolist()
    ]
    return {"samples": len(targets), "wrong": int(wrong.sum()), "worst": samples} | found


def cut(text: str) -> str:
    """At most LONGEST characters of a text; data URLs are whole."""
    return text if len(text) <= LONGEST or text.startswith("data:") else text[: LONGEST - 1] + "\u2026"


def classes(names: Sequence[str], true: Ints, predicted: Ints, hits: Ints) -> dict[str, Any]:
    """How often each class is true, predicted, and both; of many classes, those with the most errors."""
    errors = true + predicted - 2 * hits
    kept: Ints = np.sort(np.argsort(-errors, kind="stable")[:MOST_CLASSES])
    counts = zip(*(each[kept].tolist() for each in (true, predicted, hits)), strict=True)
    rows = [[names[i], *row] for i, row in zip(kept.tolist(), counts, strict=True)]
    return {"num_classes": len(names), "classes": rows}


def confused(names: Sequence[str], predicted: Ints, true: Ints, errors: Ints) -> dict[str, Any]:
    """The confusion matrix: `counts[t][p]` samples of class t are predicted as p.

    Of many classes, it has those with the most `errors`.
    """
    most = np.argsort(-errors, kind="stable")[:MOST_CONFUSED]
    shown = np.sort(most[errors[most] > 0]) if len(names) > MOST_CONFUSED else np.arange(len(names))
    counts = [np.bincount(predicted[true == label], minlength=len(names))[shown].tolist() for label in shown]
    return {"confused": [names[i] for i in shown], "counts": counts}


def as_text(tokenizer: Any, tokens: NDArray[Any]) -> dict[str, str]:
    """Tokens [n] as the text that the model sees; special tokens between two texts become a bar."""
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    parts = [[*part] for ends, part in itertools.groupby(tokens.tolist(), special.__contains__) if not ends]
    return {"text": " | ".join(tokenizer.decode(part) for part in parts)}
