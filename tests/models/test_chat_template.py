# SPDX-License-Identifier: Apache-2.0
import pytest

from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.errors import RequestError
from lazyattention.models.chat_template import choose_chat_template, render_chat

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_the_tokenizers_own_template_is_the_default():
    assert render_chat(tiny_tokenizer(), MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not render_chat(tiny_tokenizer(), MESSAGES, add_generation_prompt=False).endswith("assistant\n")


def test_missing_template_offers_the_plain_one():
    tokenizer = tiny_tokenizer(with_chat_template=False)
    with pytest.raises(RequestError, match="chat_template='plain'"):
        render_chat(tokenizer, MESSAGES)
    text = "System: Be brief.\n\nUser: Hello\n\nAssistant:"
    assert render_chat(tokenizer, MESSAGES, chat_template="plain") == "<|bos|>" + text
    no_bos = tiny_tokenizer(with_bos=False, with_chat_template=False)
    assert render_chat(no_bos, MESSAGES, chat_template="plain") == text


def test_template_may_be_given_as_text_or_by_name():
    tokenizer = tiny_tokenizer()
    jinja = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tone }}"
    assert render_chat(tokenizer, MESSAGES, chat_template=jinja, template_fields={"tone": "!"}) == "[Be brief.][Hello]!"
    tokenizer.chat_template = {"default": "d{{ 1 }}", "rag": "r{{ 2 }}"}
    assert choose_chat_template(tokenizer) == "d{{ 1 }}"
    assert render_chat(tokenizer, MESSAGES, chat_template="rag") == "r2"
    with pytest.raises(RequestError, match="chat_template='rga' is not known; allowed are 'plain', 'default', 'rag'"):
        render_chat(tokenizer, MESSAGES, chat_template="rga")


@pytest.mark.parametrize(
    "jinja", ["{{ raise_exception('roles must alternate') }}", "{% for %}", "{{ messages[9].role }}"]
)
def test_template_that_refuses_messages_is_the_requests_fault(jinja):
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        render_chat(tiny_tokenizer(), MESSAGES, chat_template=jinja)
