# SPDX-License-Identifier: Apache-2.0
import functools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lazyattention.engine.detokenizer import Detokenizer, StopScanner

TEXT = "The quick brown fox jumps over the lazy dog. A document, once read, need not be read again; it is kept. " * 3


@functools.cache
def byte_level():
    """Like GPT-2, Llama 3, Qwen: each token is bytes, a character may be spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|reserved|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@functools.cache
def byte_fallback():
    """Like Llama 2, Mistral: words begin with a visible space, unknown characters fall back to byte tokens."""
    words = sorted({"▁" + word for word in TEXT.split()} | set("▁abcdefghijklmnopqrstuvwxyzTA.,;"))
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def full_text(tokenizer, token_ids, **options):
    return tokenizer.decode(token_ids, **{"skip_special_tokens": True, **options}, clean_up_tokenization_spaces=False)


def stream(tokenizer, token_ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    deltas = [detokenizer.push([token_id]) for token_id in token_ids]
    return [*deltas, detokenizer.finish()]


def fallback_ids(text):
    """Token ids of `text`: whole words where there are such tokens, bytes elsewhere."""
    tokenizer, ids = byte_fallback(), []
    for i, word in enumerate(text.split(" ")):
        token_id = tokenizer.convert_tokens_to_ids("▁" + word)
        if word and token_id != tokenizer.unk_token_id:
            ids.append(token_id)
        else:
            ids += [tokenizer.convert_tokens_to_ids("▁")] if i else []
            ids += [3 + byte for byte in word.encode()]
    return ids


# Equality with decoding everything at once


@given(st.lists(st.integers(0, 401), max_size=60))
@settings(deadline=None)
def test_byte_level_deltas_add_up_whatever_the_bytes(token_ids):
    assert "".join(stream(byte_level(), token_ids)) == full_text(byte_level(), token_ids)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_deltas_are_whole_characters(text):
    tokenizer = byte_level()
    deltas = stream(tokenizer, tokenizer.encode(text))
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.sampled_from(["The", "fox", "again;", "é", "中文", "🙂🙃", "", "zz"]), max_size=12))
@settings(deadline=None)
def test_byte_fallback_deltas_add_up_for_valid_text(words):
    token_ids = fallback_ids(" ".join(words))
    assert "".join(stream(byte_fallback(), token_ids)) == full_text(byte_fallback(), token_ids)


@given(st.lists(st.integers(259, 290), max_size=20), st.integers(0, 20))
@settings(deadline=None)
def test_the_output_continues_the_prompt(token_ids, num_prompt_tokens):
    tokenizer = byte_fallback()
    prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    text = full_text(tokenizer, prompt) + "".join(stream(tokenizer, output, prompt_token_ids=prompt))
    assert text == full_text(tokenizer, token_ids)


def test_a_word_after_a_prompt_keeps_its_space_and_at_a_start_has_none():
    prompt, output = fallback_ids("The quick"), fallback_ids("brown fox")
    assert "".join(stream(byte_fallback(), output, prompt_token_ids=prompt)) == " brown fox"
    assert "".join(stream(byte_fallback(), output)) == "brown fox"


def test_a_character_begun_in_the_prompt_is_finished_in_the_output():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("🙂")
    assert "".join(stream(tokenizer, token_ids[2:], prompt_token_ids=token_ids[:2])) == "🙂"


def test_a_replacement_character_in_the_prompt_is_not_part_of_the_output():
    tokenizer = byte_level()
    assert "".join(stream(tokenizer, tokenizer.encode("x"), prompt_token_ids=tokenizer.encode("a\ufffd"))) == "x"


def test_special_tokens_are_left_out_or_kept_as_asked():
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    token_ids = [*tokenizer.encode("ab"), end, end + 1, *tokenizer.encode("c")]
    assert "".join(stream(tokenizer, token_ids)) == "abc"
    assert "".join(stream(tokenizer, token_ids, skip_special_tokens=False)) == "ab<|end|><|reserved|>c"


def test_an_unfinished_character_is_held_back_and_flushed_at_the_end():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a🙂")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


# Stop strings


def cut_at_stop(text, stops, keep):
    """First principles: the stop that ends first, the longest of those."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if keep else end - len(stop)], stop


@given(
    st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.booleans(), st.data()
)
def test_scanner_cuts_at_the_first_stop_however_the_text_is_split(text, stops, keep, data):
    scanner, seen, rest = StopScanner(stops, keep_match=keep), "", text
    expected, matched = cut_at_stop(text, stops, keep)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        seen += scanner.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(seen)
    assert (seen + scanner.finish(), scanner.matched) == (expected, matched)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(deadline=None)
def test_no_piece_of_a_stop_string_leaks(text, stops):
    tokenizer = byte_level()
    expected, matched = cut_at_stop(text, stops, keep=False)
    detokenizer, seen = Detokenizer(tokenizer, stop=stops), ""
    for token_id in tokenizer.encode(text):
        seen += detokenizer.push([token_id])
        assert expected.startswith(seen)
    assert seen + detokenizer.finish() == expected
    assert detokenizer.stop_reason == matched


def test_tokens_after_the_stop_are_not_counted():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("x§y§z")
    detokenizer = Detokenizer(tokenizer, stop=["§"], include_stop_str_in_output=True)
    assert detokenizer.push(token_ids) == "x§"
    assert detokenizer.num_tokens == len(tokenizer.encode("x§"))
    assert detokenizer.push(token_ids) == ""
    assert detokenizer.finish() == ""


def test_a_stop_string_before_min_tokens_does_not_count():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("§§§")
    detokenizer = Detokenizer(tokenizer, stop=["§"], min_tokens=len(token_ids) - 1)
    assert detokenizer.push(token_ids) == "§§"
    assert detokenizer.stop_reason == "§"


# Cost


class CountingTokenizer:
    """Counts the tokens it is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_decoded, self.all_special_ids = tokenizer, 0, tokenizer.all_special_ids

    def decode(self, token_ids, **options):
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("kind", ["words", "emoji", "invalid bytes", "special tokens", "lead bytes"])
def test_the_cost_per_token_does_not_grow(kind):
    tokenizer = byte_level()
    byte = tokenizer.convert_tokens_to_ids
    token_ids = {
        "words": tokenizer.encode(TEXT * 20),
        "emoji": tokenizer.encode("🙂" * 500),
        "invalid bytes": [byte("ÿ")] * 2000,  # 0xFF
        "special tokens": [tokenizer.eos_token_id] * 2000,
        "lead bytes": [byte("ð")] * 2000,  # 0xF0, begins a character of four bytes
    }[kind]
    counting = CountingTokenizer(tokenizer)
    assert "".join(stream(counting, token_ids)) == full_text(tokenizer, token_ids)
    assert counting.num_decoded < 60 * len(token_ids)


def test_a_long_stop_string_costs_no_more_per_character():
    scanner = StopScanner(["a" * 2000 + "b"])
    start = time.perf_counter()
    for _ in range(20000):
        scanner.push("a")
    assert time.perf_counter() - start < 5
