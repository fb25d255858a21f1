"""Schemes of tags, the entities that tags mark, and their scores, which equal those of seqeval."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import metrics as seqeval

from shared.errors import UserError
from shared.tagging import tags as tags_module
from shared.tagging.tags import SCORES, TAGS, Tags, begins_of, sizes_of, tagging_scores

SCHEMES = {
    "IOB": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"),
    "BIOES": ("O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))),
    "without kinds": ("O", "B", "I"),
}


def table(*texts):
    """A table of tagged texts, whose words do not matter."""
    lists = pa.large_list(pa.large_string())
    words = [["word"] * len(text) for text in texts]
    return pa.table({"tokens": pa.array(words, lists), "tags": pa.array(list(map(list, texts)), lists)})


def arguments(tags, *texts):
    """The arguments of `Tags.entities` for texts, each a list of tags."""
    given = table(*texts)
    return tags.encode(given), begins_of(sizes_of(given[TAGS].combine_chunks()))


def texts_of(names):
    return st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=8), min_size=1, max_size=5)


@pytest.mark.filterwarnings("ignore:.*ill-defined")
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=100)
@given(data=st.data())
def test_scores_are_those_of_seqeval_also_where_tags_violate_their_scheme(scheme, data):
    names = SCHEMES[scheme]
    true = data.draw(texts_of(names))
    predicted = [data.draw(st.lists(st.sampled_from(names), min_size=len(t), max_size=len(t))) for t in true]
    tags = Tags(names)
    (numbers, begins), (guessed, _) = arguments(tags, *true), arguments(tags, *predicted)
    found = tagging_scores(tags, guessed, numbers, begins)
    assert tuple(found) == SCORES
    for name in ("f1", "precision", "recall"):
        assert found[name] == pytest.approx(getattr(seqeval, f"{name}_score")(true, predicted)), name
    assert found["accuracy"] == pytest.approx(seqeval.accuracy_score(true, predicted))


@settings(max_examples=30)
@given(texts=texts_of(SCHEMES["BIOES"]))
def test_bilou_tags_mean_the_same_as_bioes_tags(texts):
    other = str.maketrans({"E": "L", "S": "U"})
    renamed = [[tag[0].translate(other) + tag[1:] for tag in text] for text in texts]
    bioes, bilou = Tags(SCHEMES["BIOES"]), Tags(tuple(t[0].translate(other) + t[1:] for t in SCHEMES["BIOES"]))
    both = zip(bioes.entities(*arguments(bioes, *texts)), bilou.entities(*arguments(bilou, *renamed)), strict=True)
    assert all(np.array_equal(one, another) for one, another in both)


@pytest.mark.parametrize(
    ("names", "true", "predicted", "scores"),
    [
        ("NOUN O VERB", "NOUN NOUN O VERB", [0, 2, 0, 2], (4 / 7, 1 / 2, 2 / 3, 1 / 2)),
        ("NOUN VERB", "NOUN VERB", [0, -1], (2 / 3, 1, 1 / 2, 1 / 2)),  # nothing was predicted for the second word
    ],
)
def test_a_word_with_a_plain_tag_is_an_entity_unless_the_tag_is_o(names, true, predicted, scores):
    tags = Tags(tuple(names.split()))
    assert tags.of_no_scheme
    assert (tags.outside == -1) == ("O" not in names.split())
    found = tagging_scores(tags, np.array(predicted), *arguments(tags, true.split()))
    assert tuple(found.values()) == pytest.approx(scores)


def test_a_tag_that_training_lacks_is_refused_with_its_row(monkeypatch):
    monkeypatch.setattr(tags_module, "BATCH_TEXTS", 2)
    with pytest.raises(UserError, match=r"row 4 of the data has the tag I-Z, .* \(known: O, B-X\)"):
        Tags(("O", "B-X")).encode(table(["O"], ["O"], ["O"], ["B-X", "I-Z"]))


def test_tags_are_the_names_of_a_class_label_or_else_the_sorted_tags_that_occur():
    given = table(["B-B", "O"], ["I-A", "O"])
    assert Tags.of(given).names == ("B-B", "I-A", "O")
    names = ("O", "B-A", "I-A", "B-B", "I-B")
    assert Tags.of(given, names).names == names
    assert str(Tags(names)) == "5 tags of words: A, B"
    with pytest.raises(UserError, match="every word has the tag O, so there is nothing to learn"):
        Tags.of(table(["O", "O"], ["O"]), names)
