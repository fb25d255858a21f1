"""The embedded data: enough balanced rows, each text once, and no source file in both parts."""

from collections import Counter

import pytest

from shared.demo_data import pairs, tagged_functions, texts


@pytest.mark.parametrize(
    ("module", "columns", "rows"),
    [
        (texts, ["text", "label"], (8130, 1374)),
        (pairs, ["anchor", "positive"], (5968, 1022)),
        (tagged_functions, ["tokens", "tags"], (2400, 480)),
    ],
)
def test_no_text_and_no_source_file_is_in_both_parts(module, columns, rows):
    parts = module.load()
    assert [part.column_names for part in parts] == [[*columns, "file"]] * 2
    assert tuple(part.num_rows for part in parts) == rows
    files = [set(part["file"].to_pylist()) for part in parts]
    assert not files[0] & files[1]
    found = [" ".join(text if isinstance(text, list) else text.split()) for p in parts for text in p[0].to_pylist()]
    assert len(set(found)) == sum(rows)
    assert found[:99] != sorted(found[:99])  # shuffled: the first rows are a sample


def test_the_labels_are_balanced_and_the_documents_contain_the_labeled_texts():
    labels = [Counter(part["label"].to_pylist()) for part in texts.load()]
    assert len(labels[0]) == len(labels[1]) == len(labels[0] | labels[1]) == 5
    assert max(labels[0].values()) < 2 * min(labels[0].values())
    for documents, labeled in zip(texts.documents(), texts.load(), strict=True):
        assert documents.column_names == ["text", "file"]
        assert set(labeled["text"].to_pylist()) <= set(documents["text"].to_pylist())
        assert documents.num_rows > labeled.num_rows


def test_the_tags_of_functions_are_iob2():
    for tags in tagged_functions.load()[1]["tags"].to_pylist():
        for before, tag in zip(["O", *tags], tags, strict=False):
            assert tag[0] in "BO" or before[2:] == tag[2:]
