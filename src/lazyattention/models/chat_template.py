# SPDX-License-Identifier: Apache-2.0
"""From messages to prompt text by a chat template: the tokenizer's own, a plain one, or one given as Jinja text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lazyattention.errors import RequestError

PLAIN = "plain"
# For base models: roles as words, one blank line between turns. It marks no end of turn, so give a stop string.
PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def choose_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> str:
    """Return the Jinja text of the template to use.

    Args:
        tokenizer: Its own template is used when none is named; where it has several, the one named "default".
        chat_template: None, "plain", the name of one of the tokenizer's templates, or Jinja text (holds "{").

    Raises:
        RequestError: There is no such template, or none was named and the tokenizer has none.
    """
    own = getattr(tokenizer, "chat_template", None)
    named: dict[str, str] = own if isinstance(own, dict) else {"default": own} if own else {}
    if chat_template is None:
        if "default" in named:
            return named["default"]
        raise RequestError(
            "the model's tokenizer has no chat template, so messages cannot become a prompt; pass "
            "chat_template='plain' (roles as words) or a Jinja template, or give a finished prompt to generate()"
        )
    if chat_template == PLAIN:
        return PLAIN_TEMPLATE
    if chat_template in named:
        return named[chat_template]
    if "{" in chat_template:
        return chat_template
    known = ", ".join(repr(name) for name in (PLAIN, *named))
    raise RequestError(
        f"chat_template={chat_template!r} is not known; allowed are {known} and Jinja text; check the spelling"
    )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    template_fields: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt text of a conversation. It holds its own BOS where the template wants one.

    Args:
        tokenizer: Of the model.
        messages: `{"role": ..., "content": str}` each.
        chat_template: See `choose_chat_template`.
        add_generation_prompt: End with the opening of the assistant's turn.
        template_fields: Further names that the template may read.

    Raises:
        RequestError: There is no template, or the template refuses these messages.
    """
    template = choose_chat_template(tokenizer, chat_template)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(template_fields or {}),
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise RequestError(
            f"the chat template refuses these messages: {error}; roles must come in an order that the model knows "
            "(usually system, then user and assistant in turn); change them, or pass chat_template='plain'"
        ) from error
    return str(text)
