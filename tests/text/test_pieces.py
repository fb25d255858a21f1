"""The pieces of a corpus: those of the selected documents, cut block by block into memory-mapped files."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.plan.draws import hash64
from shared.text import pieces as pieces_module
from shared.text.masking import Masking
from shared.text.pieces import Selection, cut_into_pieces, held_out

pytestmark = pytest.mark.usefixtures("own_cache")

MASKING = Masking(0.3, 1.0, 0.0, 1, np.arange(5, 100))


def offsets_of(sizes):
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pieces_cover_the_selected_documents(data):
    sizes = np.array(data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=20)))
    room, excluded = data.draw(st.integers(1, 30)), data.draw(st.booleans())
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=len(sizes) - 1))))
    selected = np.setdiff1d(np.arange(len(sizes)), numbers) if excluded else numbers
    offsets = offsets_of(sizes)
    expected = [
        (start, min(room, offsets[d + 1] - start))
        for d in selected
        for start in range(offsets[d], offsets[d + 1], room)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "BLOCK", data.draw(st.integers(1, 8)))
        name = f"{sizes.tolist()} {pieces_module.BLOCK}"
        found = cut_into_pieces(name, offsets, Selection(numbers, excluded), room + 2, 2, MASKING)
    assert found.starts.tolist() == [start for start, _ in expected]
    assert found.lengths.tolist() == [size + 2 for _, size in expected]
    assert found.masked.tolist() == MASKING.counts(np.array([size for _, size in expected])).tolist()
    assert found.longest == found.lengths.argmax()
    assert found.total == found.lengths.sum()


def test_other_settings_have_other_pieces():
    offsets = offsets_of([10, 20, 30])
    given_ = [("a", offsets, Selection(), 12, 2, MASKING)]
    given_ += [("b", *given_[0][1:]), ("a", offsets_of([10, 20]), *given_[0][2:])]
    for i, other in ((2, Selection(np.array([1]))), (2, Selection(np.array([1]), False)), (3, 11), (4, 3)):
        given_.append((*given_[0][:i], other, *given_[0][i + 1 :]))
    given_.append((*given_[0][:5], Masking(0.2, 1.0, 0.0, 1, MASKING.random_tokens)))
    made = [cut_into_pieces(*arguments) for arguments in given_]
    assert len({pieces.starts.ctypes.data for pieces in made}) == len(given_)
    folders = {path.name for path in pieces_module.build_once("x", lambda _: None).parent.glob("pieces-*/")}
    assert len(folders) == len(given_)


def test_the_held_out_documents_are_those_with_the_smallest_hashes_and_are_found_once(monkeypatch):
    found = held_out("digest", 100, 7, 3)
    expected = np.sort(np.argsort(hash64(3, np.arange(100, dtype=np.uint64)))[:7]).tolist()
    assert found.tolist() == expected
    monkeypatch.setattr(pieces_module, "chosen_by_hash", SimpleNamespace())  # cannot be called
    assert held_out("digest", 100, 7, 3).tolist() == expected


@given(st.integers(2, 40), st.data())
def test_a_limit_keeps_some_of_the_selected_documents(documents, data):
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, documents - 1), max_size=documents - 1))), np.int64)
    most, excluded = data.draw(st.integers(1, documents)), data.draw(st.booleans())
    selection = Selection(numbers, excluded)
    everything = selection.between(0, documents)
    assert selection.count(documents) == len(everything)
    limited = selection.limited(documents, most, 5, "--max_train_samples")
    kept = limited.between(0, documents).tolist()
    assert len(kept) == min(most, len(everything)) == limited.count(documents)
    rows = pieces_module.subset(len(everything), most, 5, "--max_train_samples")
    assert kept == (everything if rows is None else everything[rows]).tolist()


def test_a_million_documents_are_cut_in_little_memory():
    offsets = np.arange(0, 3_000_003, 3, dtype=np.int64)
    tracemalloc.start()
    try:
        found = cut_into_pieces("many", offsets, Selection(), 4, 2, MASKING)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.lengths) == 2_000_000
    assert peak < 60 << 20  # the arrays themselves take 32 MB on disk
