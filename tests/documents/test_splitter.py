# SPDX-License-Identifier: Apache-2.0
"""Splitting loses nothing, respects the limit, and prefers natural borders."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.documents.document import Document
from lazyattention.documents.splitter import split_document, split_text
from lazyattention.errors import ConfigError


def count_words(text):
    """A tokenizer-like count: words, single punctuation marks and runs of spaces; long words are several tokens."""
    return sum(1 + len(token) // 8 for token in re.findall(r"\w+|[^\w\s]|\s+", text))


def count_bytes(text):
    return len(text.encode("utf-8", "surrogatepass"))


TEXTS = st.text(alphabet=st.sampled_from("ab .!?\n\t。é漢\u200b,x"), max_size=400) | st.text(max_size=200)


@given(TEXTS, st.integers(4, 60))
def test_pieces_concatenate_to_the_text_and_fit(text, limit):
    for count in (count_words, count_bytes, len):
        pieces = split_text(text, count, limit)
        assert "".join(pieces) == text
        assert all(pieces)
        assert all(count(piece) <= limit for piece in pieces)


@given(TEXTS, st.integers(4, 60))
def test_a_text_that_fits_is_one_piece(text, limit):
    if text and count_words(text) <= limit:
        assert split_text(text, count_words, limit) == [text]


@given(st.lists(st.text(alphabet="abcdefg", min_size=1, max_size=9), min_size=1, max_size=80), st.integers(10, 40))
def test_words_are_not_cut(words, limit):
    text = " ".join(words)
    for piece in split_text(text, len, limit)[:-1]:
        assert piece.endswith(" ")


def test_paragraphs_win_over_sentences_and_sentences_over_words():
    paragraph = "One two three. Four five six."
    assert split_text(f"{paragraph}\n\n{paragraph}\n\n{paragraph}", len, 40) == [
        f"{paragraph}\n\n",
        f"{paragraph}\n\n",
        paragraph,
    ]
    assert split_text("One two three four. Five six seven eight. Nine.", len, 30) == [
        "One two three four. ",
        "Five six seven eight. Nine.",
    ]
    assert split_text("今日は晴れ。明日は雨。昨日は雪。", len, 13) == ["今日は晴れ。明日は雨。", "昨日は雪。"]


def test_a_border_in_the_first_half_does_not_leave_a_tiny_piece():
    pieces = split_text("Title\n\n" + "word " * 30, len, 60)
    assert len(pieces[0]) > 30


def test_one_very_long_word_is_cut():
    assert split_text("x" * 25, len, 10) == ["x" * 10, "x" * 10, "x" * 5]


def test_count_that_is_not_monotone_is_still_respected():
    # Merging tokenizers can need more tokens for a shorter text: here "x y" is one token, and "x " is two.
    def count(text):
        return len(text.replace("x y", "#"))

    assert count("abcx y") == 4 < count("abcx ")
    text = "abcx y" * 7
    pieces = split_text(text, count, 4)
    assert "".join(pieces) == text
    assert max(map(count, pieces)) <= 4


def test_long_text_needs_few_counts():
    calls = 0

    def count(text):
        nonlocal calls
        calls += 1
        return len(text) // 4

    pieces = split_text("Some words in a row. " * 5000, count, 200)
    assert calls < 20 * len(pieces)


def test_document_is_split_like_its_text():
    assert split_document(Document("aa bb cc", title="t"), len, 6) == ["aa bb ", "cc"]


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_must_be_positive(limit):
    with pytest.raises(ConfigError, match="max_chunk_len must be at least 1"):
        split_text("a", len, limit)


def test_limit_smaller_than_one_character_is_named():
    with pytest.raises(ConfigError, match=r"max_chunk_len = 2 tokens is too small: the character '漢' alone"):
        split_text("漢字", count_bytes, 2)
