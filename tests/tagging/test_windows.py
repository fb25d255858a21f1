"""Windows of long texts: each word belongs to the window in which it has the most context."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.prepared import ranges
from shared.tagging.pieces import TaggedWords, cut_into_windows


def texts():
    """Pieces of each word of each text; a word may have no pieces."""
    pieces = st.lists(st.integers(0, 3), min_size=1, max_size=30)
    return st.lists(pieces, min_size=1, max_size=5).filter(lambda found: any(map(sum, found)))


def cut(pieces_of_words):
    """Stand-in for `WordPieces`: the pieces are numbers from 100, in the order of the texts."""
    sizes = [sum(text) for text in pieces_of_words]
    of_all = np.array([size for text in pieces_of_words for size in text])
    firsts = np.cumsum(of_all) - of_all
    return SimpleNamespace(
        pieces=np.arange(sum(sizes), dtype=np.uint32) + 100,
        offsets=np.cumsum([0, *sizes]),
        firsts=firsts[of_all > 0],
        words=np.flatnonzero(of_all > 0),
        begins=np.array([i == 0 for text in pieces_of_words for i in range(len(text))]),
    )


def dataset(pieces_of_words, room, stride, around=([1], [2, 3])):
    """A data set in which the tag of a word is its number."""
    pieces, special = cut(pieces_of_words), len(around[0]) + len(around[1])
    return TaggedWords(pieces, np.arange(len(pieces.begins)), room + special, stride, around)


@settings(max_examples=50)
@given(pieces_of_words=texts(), room=st.integers(1, 12), data=st.data())
def test_each_word_belongs_to_the_window_in_which_it_has_the_most_context(pieces_of_words, room, data):
    stride = data.draw(st.integers(0, room - 1))
    pieces = cut(pieces_of_words)
    windows = cut_into_windows(pieces.offsets, pieces.firsts, room, stride)
    owned = ranges(windows.first_words, windows.num_words)
    assert owned.tolist() == list(range(len(pieces.firsts)))  # each word once, in order
    owner = np.repeat(np.arange(len(windows.starts)), windows.num_words)
    for begin, end in zip(pieces.offsets[:-1], pieces.offsets[1:], strict=True):
        every = windows_of(begin, end, room, stride)
        for word in np.flatnonzero((begin <= pieces.firsts) & (pieces.firsts < end)):
            place = pieces.firsts[word]
            context = {w: min(place - w[0] if w[0] > begin else room, w[1] - 1 - place if w[1] < end else room)
                       for w in every if w[0] <= place < w[1]}  # fmt: skip
            start, size = windows.starts[owner[word]], windows.sizes[owner[word]]
            assert (start, start + size) == max(context, key=lambda w: (context[w], -w[0]))


def windows_of(begin, end, room, stride):
    """A second implementation of the windows of one text, in a loop."""
    found, start = [], begin
    while start + room < end:
        found.append((start, start + room))
        start += room - stride
    return [*found, (max(begin, end - room), end)]


@settings(max_examples=50)
@given(pieces_of_words=texts(), data=st.data())
def test_a_micro_batch_has_the_tokens_of_its_windows_and_the_tags_of_their_own_words(pieces_of_words, data):
    train = dataset(pieces_of_words, data.draw(st.integers(2, 9)), 1)
    samples = np.array(data.draw(st.lists(st.integers(0, len(train) - 1), min_size=1, max_size=4)))
    lengths, tokens, _, tags, places = train.read_micro_batch(samples, np.zeros(len(samples), int))
    assert lengths.tolist() == train.lengths[samples].tolist()
    expected_tokens, expected = [], []
    for window in samples:
        start, size = train.windows.starts[window], train.windows.sizes[window]
        begin = len(expected_tokens) + 1
        expected_tokens += [1, *range(100 + start, 100 + start + size), 2, 3]
        first, count = train.windows.first_words[window], train.num_words[window]
        for word in range(first, first + count):
            expected.append((begin + train.pieces.firsts[word] - start, train.pieces.words[word]))
    assert tokens.tolist() == expected_tokens
    assert list(zip(places, tags, strict=True)) == expected
    assert train[samples[0]].tolist() == tokens[: lengths[0]].tolist()
    found = train.tags_of_all(np.full(int(train.num_words.sum()), 7), -1)
    assert found.tolist() == [7 if size else -1 for text in pieces_of_words for size in text]


def test_the_digest_changes_with_the_words_the_tags_and_the_windows_and_the_launch_card_has_the_counts():
    usual = dataset([[1, 2, 3], [4]], 5, 2)
    others = [dataset([[1, 3, 2], [4]], 5, 2), dataset([[1, 2, 3], [4]], 4, 2), dataset([[1, 2, 3, 4]], 5, 2)]
    others.append(dataset([[1, 2, 3], [4]], 5, 2))
    others[-1].tags = others[-1].tags[::-1].copy()
    assert usual.digest() == dataset([[1, 2, 3], [4]], 5, 2).digest()
    assert len({each.digest() for each in (usual, *others)}) == 5
    assert str(dataset([[2, 2, 2], [0, 1]], 4, 0)) == "2 texts (3 windows, 5 words)"
