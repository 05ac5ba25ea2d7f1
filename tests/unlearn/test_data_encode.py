# SPDX-License-Identifier: Apache-2.0
"""Exactly the answer and its end are labelled; prompt plus answer are the tokens of the whole text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qa_fixtures import qa_tokenizer
from tokenizers.processors import TemplateProcessing

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.data import (
    IGNORE_INDEX,
    QAExample,
    collate,
    encode_example,
    encode_examples,
    generate_people,
    pad_id_of,
    split_long_texts,
)

EXAMPLE = QAExample("Who plays the oboe?", "Dora plays it.", example_id="x")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1).filter(str.strip)


def test_plain_template_word_for_word():
    tokenizer = qa_tokenizer()
    encoded = encode_example(tokenizer, EXAMPLE, template="plain")
    assert tokenizer.decode(encoded.prompt_ids) == "Question: Who plays the oboe?\nAnswer:"
    assert tokenizer.decode(encoded.answer_ids) == " Dora plays it."
    assert encoded.input_ids[-1] == tokenizer.eos_token_id
    assert encoded.num_end_tokens == 1


def test_chat_template_ends_with_its_own_end_of_turn():
    tokenizer = qa_tokenizer(chat=True)
    encoded = encode_example(tokenizer, EXAMPLE)
    assert tokenizer.decode(encoded.prompt_ids) == "<s><|user|>\nWho plays the oboe?<|end|>\n<|assistant|>\n"
    assert tokenizer.decode(encoded.answer_ids) == "Dora plays it."
    assert tokenizer.decode(encoded.input_ids[-1:]) == "<|end|>"


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, st.sampled_from(["chat", "plain"]))
def test_labels_are_the_answer_and_nothing_else(question, answer, template):
    tokenizer = qa_tokenizer(chat=True)
    encoded = encode_example(tokenizer, QAExample(question, answer), template=template, max_len=10_000)
    n = encoded.num_prompt_tokens
    assert encoded.labels[:n] == [IGNORE_INDEX] * n
    assert encoded.labels[n:] == encoded.input_ids[n:] == [*encoded.answer_ids, encoded.input_ids[-1]]
    assert encoded.prompt_ids + encoded.answer_ids == encoded.input_ids[:-1]
    # A token may join the last character of the prompt to the answer, so the text may begin a little earlier.
    assert tokenizer.decode(encoded.answer_ids).endswith(answer)


@pytest.mark.parametrize(
    ("before_answer", "prompt_end", "answer"),
    [
        (" ", "<|assistant|>", " Dora plays it."),  # white space belongs to the answer
        ("<think></think>\n", "<|assistant|><think></think>\n", "Dora plays it."),  # a block does not
    ],
)
def test_what_a_chat_template_writes_before_an_answer(before_answer, prompt_end, answer):
    tokenizer = qa_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}BEFORE{% endif %}"
        "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("BEFORE", before_answer.replace("\n", "{{ '\\n' }}"))
    encoded = encode_example(tokenizer, EXAMPLE)
    assert tokenizer.decode(encoded.prompt_ids).endswith("<|end|>" + prompt_end)
    assert tokenizer.decode(encoded.answer_ids) == answer


def test_completion_has_no_template_and_no_end():
    tokenizer = qa_tokenizer(chat=True)
    encoded = encode_example(tokenizer, QAExample("Once upon", "a time", kind="completion"))
    assert tokenizer.decode(encoded.input_ids) == "Once upon a time"
    assert encoded.num_end_tokens == 0
    assert tokenizer.decode(encoded.answer_ids) == " a time"
    text = encode_example(tokenizer, QAExample("", "Once upon a time", kind="completion"))
    # No token predicts the first one, as this tokenizer puts none before it.
    assert text.labels[0] == IGNORE_INDEX
    assert text.labels[1:] == text.input_ids[1:]


def test_special_tokens_that_the_tokenizer_adds_by_itself():
    tokenizer = qa_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    text = encode_example(tokenizer, QAExample("", "Once", kind="completion"))
    assert text.input_ids[0] == tokenizer.bos_token_id
    assert text.labels == [IGNORE_INDEX, *text.input_ids[1:]]
    assert tokenizer.eos_token_id not in text.input_ids
    question = encode_example(tokenizer, EXAMPLE, template="plain")
    assert question.input_ids.count(tokenizer.eos_token_id) == 1
    assert question.input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(question.answer_ids) == " Dora plays it."


def test_a_long_answer_is_cut_counted_and_warned_of(caplog):
    tokenizer = qa_tokenizer()
    whole = encode_example(tokenizer, EXAMPLE)
    cut = encode_examples(tokenizer, [EXAMPLE], max_len=len(whole.input_ids) - 2)[0]
    assert cut.input_ids == whole.input_ids[:-2]
    assert (cut.num_truncated_tokens, cut.num_end_tokens) == (2, 0)
    assert cut.answer_ids == whole.answer_ids[:-1]
    assert "cuts 1 of 1 answers" in caplog.text


def test_a_prompt_that_fills_everything_is_refused():
    with pytest.raises(RequestError, match=r"example 'x' has \d+ prompt tokens and no answer token within max_len=6"):
        encode_example(qa_tokenizer(), EXAMPLE, max_len=6)


def test_templates_are_checked():
    with pytest.raises(ConfigError, match="tokenizer has no chat template"):
        encode_example(qa_tokenizer(), EXAMPLE, template="chat")
    with pytest.raises(ConfigError, match="'auto', 'chat' or 'plain', got 'llama'"):
        encode_example(qa_tokenizer(), EXAMPLE, template="llama")


def test_collate_pads_on_the_right():
    encoded = [encode_example(qa_tokenizer(), e) for e in (EXAMPLE, QAExample("Who?", "Me."))]
    batch = collate(encoded, pad_id=9)
    assert {name: (t.dtype, t.shape[0]) for name, t in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (torch.int64, 2)
    )
    for row, item in enumerate(encoded):
        n = len(item.input_ids)
        assert batch["input_ids"][row].tolist() == item.input_ids + [9] * (batch["input_ids"].shape[1] - n)
        assert batch["attention_mask"][row].sum() == n
        assert batch["labels"][row, :n].tolist() == item.labels
        assert (batch["labels"][row, n:] == IGNORE_INDEX).all()
    with pytest.raises(RequestError, match="no examples"):
        collate([], 0)


def test_pad_id_falls_back_to_end_of_sequence():
    tokenizer = qa_tokenizer()
    assert pad_id_of(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert pad_id_of(tokenizer) == tokenizer.eos_token_id


def test_long_texts_are_split_without_loss():
    tokenizer = qa_tokenizer()
    text = " ".join(e.answer for e in generate_people(12, 0)["retain"])
    example = QAExample("", text, kind="completion", example_id="t", split="forget")
    parts = split_long_texts(tokenizer, [example, EXAMPLE], max_len=40)
    assert parts[-1] == EXAMPLE
    assert "".join(part.answer for part in parts[:-1]) == text
    assert [part.example_id for part in parts[:3]] == ["t#0", "t#1", "t#2"]
    assert all(encode_example(tokenizer, part, max_len=40).num_truncated_tokens == 0 for part in parts[:-1])
