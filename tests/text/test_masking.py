"""Each document has an exact number of masked tokens, which depend on (seed, epoch, document, position) only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import refusal
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from shared.text.masking import Masking, masking_for

MASK, VOCABULARY = 1, 500
ORDINARY = np.arange(5, VOCABULARY)
CONTINUES = np.arange(VOCABULARY) % 3 == 0


def masking(probability=0.3, mask_share=0.8, random_share=0.1, continues=None):
    return Masking(probability, mask_share, random_share, MASK, ORDINARY, continues)


@st.composite
def documents(draw):
    """Concatenated tokens, the length of each document, and the epochs and numbers of the documents."""
    lengths = np.array(draw(st.lists(st.integers(1, 60), min_size=1, max_size=12)))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    tokens = generator.integers(5, VOCABULARY, lengths.sum())
    return tokens, lengths, generator.integers(0, 3, len(lengths)), generator.permutation(1000)[: len(lengths)]


def parts(flat, lengths):
    return np.split(flat, np.cumsum(lengths)[:-1])


@settings(max_examples=200)
@given(documents(), st.floats(0.01, 0.99), st.booleans(), st.integers(0, 2**31))
def test_the_number_of_masked_tokens_of_each_document_is_exact_and_words_are_whole(
    found, probability, whole_words, seed
):
    tokens, lengths, epochs, numbers = found
    masker = masking(probability, continues=CONTINUES if whole_words else None)
    chosen = masker.choose(tokens, lengths, seed, epochs, numbers)
    assert (np.diff(chosen) > 0).all()
    masked = np.isin(np.arange(len(tokens)), chosen)
    counts = np.array([mask.sum() for mask in parts(masked, lengths)])
    assert counts.tolist() == masker.counts(lengths).tolist()
    assert (counts >= 1).all()
    assert (np.abs(counts - probability * lengths) <= 0.5 + 1e-9)[probability * lengths >= 0.5].all()
    for piece, mask in zip(parts(tokens, lengths), parts(masked, lengths), strict=True):
        words = np.split(mask, np.flatnonzero(~CONTINUES[piece][1:]) + 1) if whole_words else []
        partly = [word.tolist() for word in words if word.any() and not word.all()]
        assert len(partly) <= 1, "the last word may be masked in part"
        assert all(word == sorted(word, reverse=True) for word in partly), "masked from its beginning"


@settings(max_examples=100)
@given(documents(), st.booleans(), st.randoms(use_true_random=False))
def test_the_masked_tokens_of_a_document_do_not_depend_on_the_other_documents(found, whole_words, random):
    """In another order or alone, a document has the same masked tokens and the same replacements."""
    tokens, lengths, epochs, numbers = found
    masker = masking(continues=CONTINUES if whole_words else None)

    def masked(order):
        pieces = [parts(tokens, lengths)[i] for i in order]
        flat, size = np.concatenate(pieces), lengths[order]
        chosen = masker.choose(flat, size, 7, epochs[order], numbers[order])
        owner = np.repeat(np.arange(len(order)), size)[chosen]
        place = chosen - (np.cumsum(size) - size)[owner]
        put = masker.replace(flat[chosen], 7, epochs[order][owner], numbers[order][owner], place)
        rows = zip(np.array(order)[owner].tolist(), place.tolist(), put.tolist(), strict=True)
        return sorted(rows)

    everything = list(range(len(lengths)))
    shuffled = random.sample(everything, len(everything))
    assert masked(shuffled) == masked(everything)
    assert sorted(row for i in everything for row in masked([i])) == masked(everything)


def test_masks_equal_the_golden_values():
    """The masks of every run ever made depend on these: they must never change."""
    tokens, one = np.arange(5, 25), np.array([1])
    chosen = masking().choose(tokens, np.array([20]), 0, one, 3 * one)
    put = masking().replace(tokens[chosen], 0, np.repeat(one, 6), np.repeat(3, 6), chosen)
    assert chosen.tolist() == [1, 6, 8, 9, 13, 18]
    assert put.tolist() == [6, 1, 1, 1, 1, 257]


def test_every_position_is_masked_equally_often():
    """Chi-square over 20 positions and 4,000 documents, 99.9 % bounds for 19 degrees of freedom."""
    lengths = np.full(4000, 20)
    chosen = masking().choose(np.full(80_000, 9), lengths, 3, np.zeros(4000, int), np.arange(4000))
    counts = np.bincount(chosen % 20, minlength=20)
    assert 3 < ((counts - 1200) ** 2 / (1200 * 0.7)).sum() < 46


@pytest.mark.parametrize(("mask_share", "random_share"), [(0.8, 0.1), (1.0, 0.0), (0.5, 0.5)])
def test_masked_tokens_are_replaced_in_the_given_shares(mask_share, random_share):
    tokens = np.full(40_000, 2)  # no ordinary token: a random one is never the same
    places, zeros = np.arange(40_000), np.zeros(40_000, int)
    put = masking(0.3, mask_share, random_share).replace(tokens, 0, zeros, zeros, places)
    assert (put == MASK).mean() == pytest.approx(mask_share, abs=0.01)
    assert np.isin(put, ORDINARY).mean() == pytest.approx(random_share, abs=0.01)
    assert np.isin(put, [2, MASK, *ORDINARY]).all()
    assert np.isin(ORDINARY, put).mean() >= 0.98 * (random_share > 0), "random tokens come from the whole vocabulary"


def tokenizer(tokens, **special):
    names = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", "[UNK]", *tokens]
    vocabulary = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    given = {"pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"} | special
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), unk_token="[UNK]", **given)


@pytest.mark.parametrize(
    ("tokens", "continuing"),
    [
        (["a", "##b", "##", "c"], ["##b"]),
        (["Ġa", "b", "Ġ", "Ċ", "(", "Ġc", "##", "###"], ["b"]),  # BPE has headings of Markdown
        (["▁a", "b", "▁c", ".", ""], ["b"]),
        # Bytes as symbols: last bytes of é and of —, é and — complete, first bytes of é, of — and of an emoji.
        (["Ġa", "Ġb", "©", "ĶÃ", "Ã©t", "âĢĶ", "Ã", "âĢ", "ðŁĺ", "Ġ©", ""], ["©", "ĶÃ", "Ã©t", "Ã"]),
    ],
)
def test_tokens_that_continue_a_word_are_found_for_each_kind_of_tokenizer(tokens, continuing):
    masker = masking_for(tokenizer(tokens), 0.3, whole_words=True)
    assert [token for i, token in enumerate(tokens) if masker.continues_word[5 + i]] == continuing
    assert masker.random_tokens.tolist() == list(range(5, 5 + len(tokens)))
    assert masker.mask_token == 1


def test_whole_words_of_unknown_ends_and_a_tokenizer_without_a_mask_token_are_refused():
    assert "--whole_word_masking" in refusal(masking_for, tokenizer(["a", "b"]), 0.3, whole_words=True)
    assert "no mask token" in refusal(masking_for, tokenizer(["a"], mask_token=None), 0.3)
