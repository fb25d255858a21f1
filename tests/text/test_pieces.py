"""The pieces of a corpus: those of the selected documents, cut block by block into memory-mapped files."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.prepared import cache_dir
from shared.datasets.tables import SUBSET
from shared.plan.draws import hash64
from shared.text import pieces as pieces_module
from shared.text.masking import Masking
from shared.text.pieces import Selection, cut_into_pieces

pytestmark = pytest.mark.usefixtures("own_cache")

SEEDS = st.integers(0, 2**64 - 1)
MASKING = Masking(0.3, 1.0, 0.0, 1, np.arange(5, 100))


def offsets_of(sizes):
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def smallest(count, most, *words):
    """Whether each of `count` rows is among the `most` with the smallest hashes."""
    ranks = np.argsort(np.argsort(hash64(*words, np.arange(count, dtype=np.uint64))))
    return ranks < most


@settings(max_examples=60)
@given(st.data())
def test_pieces_cover_the_selected_documents(data):
    sizes = np.array(data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=20)))
    held, inside, seed = data.draw(st.integers(1, len(sizes) - 1)), data.draw(st.booleans()), data.draw(SEEDS)
    room, most = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 25))
    selection = Selection(seed, held, inside).limited(len(sizes), most, "--max_train_samples")
    selected = np.flatnonzero(smallest(len(sizes), held, seed) == inside)
    selected = selected[smallest(len(selected), most, seed, SUBSET)]
    offsets = offsets_of(sizes)
    expected = [
        (start, min(room, offsets[d + 1] - start))
        for d in selected
        for start in range(offsets[d], offsets[d + 1], room)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "BLOCK", data.draw(st.integers(1, 8)))
        name = f"{sizes.tolist()} {pieces_module.BLOCK}"
        found = cut_into_pieces(name, offsets, selection, room + 2, 2, MASKING)
    assert found.starts.tolist() == [start for start, _ in expected]
    assert found.lengths.tolist() == [size + 2 for _, size in expected]
    assert found.masked.tolist() == MASKING.counts(np.array([size for _, size in expected])).tolist()
    assert found.longest == found.lengths.argmax()
    assert found.total == found.lengths.sum()


def test_other_settings_have_other_pieces():
    offsets = offsets_of([10, 20, 30])
    usual = ("a", offsets, Selection(), 12, 2, MASKING)
    others = [(0, "b"), (1, offsets_of([10, 20])), (3, 11), (4, 3), (5, Masking(0.2, 1.0, 0.0, 1, np.arange(9)))]
    others += [(2, selection) for selection in (Selection(0, 1), Selection(0, 1, True), Selection(most=1))]
    for arguments in (usual, *((*usual[:i], other, *usual[i + 1 :]) for i, other in others)):
        cut_into_pieces(*arguments)
    assert len([*cache_dir().glob("pieces-*/")]) == 1 + len(others)


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
