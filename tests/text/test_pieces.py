"""The pieces of a corpus: those of the selected documents, cut block by block into memory-mapped files."""

import numpy as np
import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st
from large_data import traced

from shared.cache.prepared import cache_dir
from shared.datasets.tables import SUBSET, hold_out, split
from shared.options.data_options import DataOptions
from shared.plan.draws import hash64
from shared.text import token_files
from shared.text.masking import Masking
from shared.text.token_files import Corpus, MaskedDocuments, cut_into_pieces

pytestmark = pytest.mark.usefixtures("own_cache")

SEEDS = st.integers(0, 2**64 - 1)
MASKING = Masking(0.3, 1.0, 0.0, 1, np.arange(5, 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


def write(folder, sizes, name):
    """A corpus of documents with so many tokens, which are numbers from 5."""
    np.save(folder / "tokens.npy", np.arange(5, 5 + sum(sizes), dtype=np.uint32))
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    return Corpus(folder, name)


def smallest(count, most, *words):
    """Whether each of `count` rows is among the `most` with the smallest hashes."""
    ranks = np.argsort(np.argsort(hash64(*words, np.arange(count, dtype=np.uint64))))
    return ranks < most


@settings(max_examples=60)
@given(st.data())
def test_pieces_hold_every_token_of_the_selected_documents_once(folder, data):
    sizes = np.array(data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=20)))
    percentage, inside, seed = data.draw(st.integers(1, 99)), data.draw(st.booleans()), data.draw(SEEDS)
    held = min(max(1, round(len(sizes) * percentage / 100)), len(sizes) - 1)
    room, most = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 25))
    selected = np.flatnonzero(smallest(len(sizes), held, seed) == inside)
    selected = selected[smallest(len(selected), most, seed, SUBSET)]
    starts = 5 + np.cumsum(sizes) - sizes
    documents = [range(starts[d], starts[d] + sizes[d]) for d in selected]
    expected = [[2, *text[i : i + room], 3] for text in documents for i in range(0, len(text), room)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "BLOCK_PIECES", data.draw(st.integers(1, 8)))
        corpus = write(folder, sizes, f"{sizes.tolist()} {token_files.BLOCK_PIECES}")
        limits = DataOptions(max_train_samples=most, max_eval_samples=most, seed=seed)
        part = split(hold_out(corpus.documents("here"), percentage, seed), limits)[inside]
        found = MaskedDocuments(corpus, part, room + 2, ([2], [3]), MASKING, 0)
    assert [found[i].tolist() for i in range(len(found))] == expected
    assert found.lengths.tolist() == [*map(len, expected)]
    assert found.masked.tolist() == MASKING.counts(found.lengths - 2).tolist()
    assert (found.longest, found.num_tokens) == (found.lengths.argmax(), found.lengths.sum())

    samples = np.random.default_rng(0).permutation(len(found))
    lengths, read, _, labels, places = found.read_micro_batch(samples, np.zeros(len(samples), int))
    assert lengths.tolist() == found.lengths[samples].tolist()
    assert (read[places] == 1).all()
    owner = np.repeat(np.arange(len(samples)), lengths)[places]
    assert np.bincount(owner, minlength=len(samples)).tolist() == found.masked[samples].tolist()
    read[places] = labels
    assert read.tolist() == [token for i in samples for token in expected[i]]


def test_two_epochs_mask_different_tokens_and_as_many_as_are_counted(folder, monkeypatch):
    corpus = write(folder, [30] * 9, "epochs")
    data = MaskedDocuments(corpus, corpus.documents("here"), 32, ([2], [3]), MASKING, 0)
    one, other = (data.read_micro_batch(np.arange(9), np.full(9, epoch)) for epoch in (0, 1))
    assert (one.lengths.tolist(), len(one.masked)) == (other.lengths.tolist(), len(other.masked))
    assert one.masked.tolist() != other.masked.tolist()
    monkeypatch.setattr(Masking, "counts", lambda _, sizes: sizes)
    assert "Masking.choose: choose as many" in runs.refusal(data.read_micro_batch, np.arange(9), np.zeros(9, int))


def test_other_settings_have_other_pieces(folder, monkeypatch):
    usual = (write(folder, [10, 20, 30], "a"), Corpus(folder, "a").documents("here"), 1000, 2, MASKING)
    others = [(1, Corpus(folder, "b").documents("here")), (2, 11), (3, 3), (4, Masking(0.2, 1.0, 0.0, 1, np.arange(9)))]
    limits = DataOptions(max_train_samples=1, max_eval_samples=2)
    others += [(1, part) for part in (*hold_out(usual[1], 30, 0), *split(usual[1:2] * 2, limits))]
    for arguments in (usual, *((*usual[:i], other, *usual[i + 1 :]) for i, other in others)):
        cut_into_pieces(*arguments)
    monkeypatch.setattr(Masking, "counts", lambda *given, usual=Masking.counts: usual(*given) + (given[1] > 999))
    cut_into_pieces(*usual)
    assert len([*cache_dir().glob("pieces-*/")]) == 2 + len(others)


def test_a_million_documents_are_cut_in_little_memory(folder):
    corpus = write(folder, np.full(1_000_000, 3), "many")
    with traced() as memory:
        found = MaskedDocuments(corpus, corpus.documents("here"), 4, ([2], [3]), MASKING, 0)
    assert len(found) == 2_000_000
    assert memory.peak < 60 << 20  # the arrays themselves take 32 MB on disk
