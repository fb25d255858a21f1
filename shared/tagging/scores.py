"""Scores of predicted tags: precision, recall and F1 of the entities, and accuracy per word.

The entities are those of conlleval, so the scores equal seqeval's in its default mode (a test compares them). seqeval
itself is not required: its last version is from 2020 and has to be built at its installation.
"""

import numpy as np
from numpy.typing import NDArray

from shared.tagging.tags import Ints, Tags

SCORES = ("f1", "precision", "recall", "accuracy")


def tagging_scores(tags: Tags, predicted: Ints, true: Ints, begins: NDArray[np.bool_]) -> dict[str, float]:
    """SCORES by name. An entity is found if its first word, last word and kind are predicted; 0 / 0 is 0.

    Args:
        tags: the meaning of the numbers.
        predicted, true: [words] the tags of all texts, one after the other; -1 is a word outside any entity.
        begins: [words] whether a word is the first of its text.
    """
    found, expected = (tags.entities(numbers, begins) for numbers in (predicted, true))
    last, kind = np.full((2, len(true)), -1)  # of the true entity that begins at a word
    last[expected.first], kind[expected.first] = expected.last, expected.kind
    hits = int(((last[found.first] == found.last) & (kind[found.first] == found.kind)).sum())
    precision, recall = hits / max(1, len(found.first)), hits / max(1, len(expected.first))
    f1 = 2 * hits / max(1, len(found.first) + len(expected.first))
    accuracy = float((predicted == true).mean())
    return dict(zip(SCORES, (f1, precision, recall, accuracy), strict=True))
