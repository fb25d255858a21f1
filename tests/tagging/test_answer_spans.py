"""Extractive question answering: windows of passages beside their questions, and the answer's first and last token."""

import numpy as np
import pyarrow as pa
import pytest

from shared.tagging.pieces import cut_words
from shared.tagging.windows import cut_into_windows, windows_of
from shared.text.tokenized import train_tokenizer

CLS, SEP = 1, 2
PASSAGES = [
    f"The tower number {i} is {100 + i} metres tall. It was built in {1800 + i}, and {'very ' * (i % 9)}"
    f"many people visit it. Its café belongs to Zoë {'and Ada ' * (i % 3)}today."
    for i in range(30)
]
QUESTIONS = [f"Who runs the café{' of the tower' * (i % 4)}?" for i in range(30)]
ANSWERS = [f"Zoë{' and Ada' * (i % 3)}" for i in range(30)]
MAX_LENGTH, STRIDE = 40, 12


class Answers:
    """Windows of passages, each with its question before it, and where the answer begins and ends in its tokens."""

    def __init__(self, passages, questions, spans):
        self.passages, self.questions = passages, questions
        room = MAX_LENGTH - 3 - np.diff(questions.offsets)
        self.windows = windows_of(passages.offsets, np.arange(len(passages.pieces)), room, STRIDE)
        self.texts = np.searchsorted(passages.offsets, self.windows.starts, "right") - 1
        self.lengths = self.windows.sizes + 3 + np.diff(questions.offsets)[self.texts]
        self.spans = spans

    def before(self, window):
        """The tokens before the passage."""
        begin, end = self.questions.offsets[self.texts[window] :][:2]
        return [CLS, *self.questions.pieces[begin:end], SEP]

    def __getitem__(self, window):
        """The tokens, and the places of the answer's first and last token: 0, the [CLS], if it is not all here."""
        start, size, before = self.windows.starts[window], self.windows.sizes[window], self.before(window)
        pieces, places = self.passages.pieces[start : start + size], self.passages.characters[start : start + size]
        begin, end = self.spans[self.texts[window]]
        first, last = np.flatnonzero(places[:, 0] <= begin)[-1:], np.flatnonzero(places[:, 1] >= end)[:1]
        here = len(first) and len(last) and places[0, 0] <= begin and first[0] <= last[0]
        target = (len(before) + int(first[0]), len(before) + int(last[0])) if here else (0, 0)
        return [*before, *pieces.tolist(), SEP], target

    def text_of(self, window, first, last):
        """The characters of a passage from one token of a window to another."""
        start = self.windows.starts[window] - len(self.before(window))
        places = self.passages.characters
        return PASSAGES[self.texts[window]][places[start + first, 0] : places[start + last, 1]]


@pytest.fixture(scope="module", params=["wordpiece", "bpe"])
def answers(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        texts = pa.table({"text": [*PASSAGES, *QUESTIONS]})
        tokenizer = train_tokenizer(texts, ("text",), request.param, 300, MAX_LENGTH)
        lists = pa.large_list(pa.large_string())
        passages, questions = (
            cut_words(pa.table({"tokens": pa.array([[text] for text in column], lists)}), tokenizer, characters=True)
            for column in (PASSAGES, QUESTIONS)
        )
        begins = [passage.index(answer) for passage, answer in zip(PASSAGES, ANSWERS, strict=True)]
        return Answers(passages, questions, [(b, b + len(a)) for b, a in zip(begins, ANSWERS, strict=True)])


def test_the_answer_is_found_in_the_windows_that_contain_it(answers):
    found = {}
    for window, text in enumerate(answers.texts):
        tokens, (first, last) = answers[window]
        assert len(tokens) == answers.lengths[window] <= MAX_LENGTH
        if first:
            assert answers.text_of(window, first, last) == ANSWERS[text]
            found.setdefault(int(text), []).append(window)
    assert [*found] == [*range(len(PASSAGES))], "an answer shorter than --stride is complete in a window"
    assert len(answers.texts) > len(PASSAGES)


def test_each_token_counts_in_one_window_and_rooms_of_texts_are_those_of_each_alone(answers):
    offsets, every = answers.passages.offsets, np.arange(len(answers.passages.pieces))
    assert answers.windows.num_words.sum() == len(every)
    room = MAX_LENGTH - 3 - np.diff(answers.questions.offsets)
    alone = [cut_into_windows(offsets[i : i + 2], every, int(room[i]), STRIDE) for i in range(len(room))]
    for name, array in vars(answers.windows).items():
        assert array.tolist() == np.concatenate([getattr(each, name) for each in alone]).tolist()
