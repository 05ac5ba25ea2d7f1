# SPDX-License-Identifier: Apache-2.0
"""Examples to token ids: where the prompt ends, which tokens are the answer, how a batch is padded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.data.example import QAExample
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

IGNORE_INDEX = -100
PLAIN_QUESTION = "Question: {question}\nAnswer:"
_MARK = "ANSWERGOESHERE"

Template = Literal["auto", "chat", "plain"]


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """One example as the model sees it.

    Attributes:
        input_ids: Prompt, answer and end token, in order.
        labels: As long as `input_ids`; -100 on the prompt, else equal to it. Not shifted: transformers shifts.
        num_prompt_tokens: How many tokens stand before the answer; at least 1, as no token predicts the first.
        num_end_tokens: 1 if the last label is the token that ends an answer, 0 if it was cut off or not wanted.
        num_truncated_tokens: Answer tokens that `max_len` cut off.
        example_id: Of the example it was made from.
    """

    input_ids: list[int]
    labels: list[int]
    num_prompt_tokens: int
    num_end_tokens: int = 0
    num_truncated_tokens: int = 0
    example_id: str = ""

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the answer."""
        return self.input_ids[: self.num_prompt_tokens]

    @property
    def answer_ids(self) -> list[int]:
        """The tokens of the answer without the end token."""
        return self.input_ids[self.num_prompt_tokens : len(self.input_ids) - self.num_end_tokens]


def resolve_template(tokenizer: PreTrainedTokenizerBase, template: Template) -> Literal["chat", "plain"]:
    """Turn "auto" into "chat" if the tokenizer has a chat template, else "plain"; check the other two.

    Raises:
        ConfigError: An unknown template, or "chat" without a chat template.
    """
    has_chat_template = bool(getattr(tokenizer, "chat_template", None))
    if template == "auto":
        return "chat" if has_chat_template else "plain"
    if template not in ("chat", "plain"):
        raise ConfigError(f"template must be 'auto', 'chat' or 'plain', got {template!r}")
    if template == "chat" and not has_chat_template:
        raise ConfigError("template='chat' but the tokenizer has no chat template; use template='plain' or set one")
    return template


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str, template: Literal["chat", "plain"]) -> str:
    """Return the text before the answer, special tokens of a chat template included.

    What the chat template writes between the prompt and an answer (an empty "thinking" block, say) belongs to it.
    """
    if template == "plain":
        return PLAIN_QUESTION.format(question=question)
    rendered = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
    )
    glue = _answer_frame(tokenizer)[0]
    return rendered + glue if glue.strip() else rendered


def render_end(tokenizer: PreTrainedTokenizerBase, template: Literal["chat", "plain"]) -> str:
    """Return the token that ends an answer as text: the chat template's end of turn, else the end of sequence."""
    tail = _answer_frame(tokenizer)[1].strip() if template == "chat" else ""
    return tail or str(tokenizer.eos_token or "")


def _answer_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what a chat template writes between the generation prompt and an answer, and what it writes after it."""
    user = {"role": "user", "content": "?"}
    prompt = str(tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template([user, {"role": "assistant", "content": _MARK}], tokenize=False))
    before, _, after = whole.rpartition(_MARK)
    # A template whose turn of the assistant begins otherwise than its generation prompt tells us nothing.
    return before[len(prompt) :] if before.startswith(prompt) else "", after


def encode_example(
    tokenizer: PreTrainedTokenizerBase,
    example: QAExample,
    *,
    template: Template = "auto",
    max_len: int = 512,
) -> EncodedExample:
    """Encode prompt, answer and end token; label the answer and the end token only.

    Prompt and answer are tokenised together, so the tokens are those of the whole text; the prompt ends where the
    tokens of the prompt alone and of the whole text first differ. A token that joins the last character of the
    prompt to the first of the answer therefore counts as answer. A "completion" has neither template nor end token.

    Args:
        tokenizer: Of the model.
        example: Its paraphrases are not encoded; use `dataclasses.replace` to encode them.
        template: "chat", "plain" (a line "Question: …", a line "Answer: …") or "auto": chat if the tokenizer has a template.
        max_len: Tokens at most; a longer answer is cut at the end and counted in `num_truncated_tokens`.

    Raises:
        RequestError: The prompt alone fills `max_len`.
        ConfigError: See `resolve_template`.
    """
    prompt, answer, end, add_special_tokens = _render(tokenizer, example, template)
    prompt_ids = _token_ids(tokenizer, prompt, add_special_tokens)
    input_ids = _token_ids(tokenizer, prompt + answer, add_special_tokens)
    # Some tokenizers append an end-of-sequence token by themselves; the answer's end is ours to add.
    prompt_ids = _without_appended_end(tokenizer, prompt, prompt_ids)
    input_ids = _without_appended_end(tokenizer, prompt + answer, input_ids)
    end_ids = _token_ids(tokenizer, end, False) if end else []
    num_prompt_tokens = 0
    for a, b in zip(prompt_ids, input_ids, strict=False):
        if a != b:
            break
        num_prompt_tokens += 1
    num_prompt_tokens = max(1, num_prompt_tokens)
    # Only the first token of an end such as "<end>\n" can be asked of the model: generation stops there.
    input_ids = input_ids + end_ids[:1]
    num_truncated = max(0, len(input_ids) - max_len)
    input_ids = input_ids[:max_len]
    if len(input_ids) <= num_prompt_tokens:
        raise RequestError(
            f"example {example.example_id!r} has {num_prompt_tokens} prompt tokens and no answer token within "
            f"max_len={max_len}; raise max_len or shorten the question"
        )
    return EncodedExample(
        input_ids=input_ids,
        labels=[IGNORE_INDEX] * num_prompt_tokens + input_ids[num_prompt_tokens:],
        num_prompt_tokens=num_prompt_tokens,
        num_end_tokens=len(end_ids[:1]) if num_truncated == 0 else 0,
        num_truncated_tokens=num_truncated,
        example_id=example.example_id,
    )


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[QAExample],
    *,
    template: Template = "auto",
    max_len: int = 512,
) -> list[EncodedExample]:
    """Encode a list; one warning says how many answers `max_len` cut off."""
    encoded = [encode_example(tokenizer, example, template=template, max_len=max_len) for example in examples]
    num_cut = sum(example.num_truncated_tokens > 0 for example in encoded)
    if num_cut:
        logger.warning(
            "max_len=%d cuts %d of %d answers; what is cut is neither trained nor measured. "
            "Raise max_len, or split long texts with split_long_texts()",
            max_len,
            num_cut,
            len(encoded),
        )
    return encoded


def split_long_texts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[QAExample], *, max_len: int = 512
) -> list[QAExample]:
    """Cut plain texts (a "completion" with an empty question) into windows of at most `max_len` tokens.

    Windows do not overlap; each keeps split and group, and its id gains "#0", "#1", … Other examples pass unchanged.
    A window is cut in token space and decoded, so its tokens may differ at the seam when encoded again; 10 % of
    `max_len` (at least 8 tokens) stays free for that and for the beginning-of-sequence token.
    """
    num_window_tokens = max_len - max(8, max_len // 10)
    if num_window_tokens < 1:
        raise ConfigError(f"max_len must be at least 10 to split texts, got {max_len}")
    result: list[QAExample] = []
    for example in examples:
        token_ids = _token_ids(tokenizer, example.answer, False)
        if example.kind != "completion" or example.question or len(token_ids) <= num_window_tokens:
            result.append(example)
            continue
        starts = range(0, len(token_ids), num_window_tokens)
        for index, start in enumerate(starts):
            text = str(tokenizer.decode(token_ids[start : start + num_window_tokens]))
            if text.strip():
                result.append(replace(example, answer=text, example_id=f"{example.example_id}#{index}"))
    return result


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a token id to pad with: pad, else end of sequence, else 0. Padding is masked, so any id is right."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0


def collate(examples: Sequence[EncodedExample], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest example.

    Returns:
        `input_ids`, `attention_mask` (1 on real tokens) and `labels` (-100 on padding), each int64 `[batch, seq_len]`.
    """
    if not examples:
        raise RequestError("collate got no examples; give at least one")
    seq_len = max(len(example.input_ids) for example in examples)
    input_ids = torch.full((len(examples), seq_len), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(examples), seq_len), dtype=torch.long)
    labels = torch.full((len(examples), seq_len), IGNORE_INDEX, dtype=torch.long)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = torch.tensor(example.input_ids)
        attention_mask[row, :length] = 1
        labels[row, :length] = torch.tensor(example.labels)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _render(tokenizer: PreTrainedTokenizerBase, example: QAExample, template: Template) -> tuple[str, str, str, bool]:
    """Return prompt, answer, end, and whether the tokenizer should add its own special tokens."""
    if example.kind == "completion":
        glue = (
            " " if example.question and not example.question[-1].isspace() and not example.answer[0].isspace() else ""
        )
        return example.question, glue + example.answer, "", True
    resolved = resolve_template(tokenizer, template)
    prompt = render_prompt(tokenizer, example.question, resolved)
    # White space before an answer belongs to it: most tokenizers join it to the first word.
    glue = _answer_frame(tokenizer)[0] if resolved == "chat" else " "
    answer = example.answer if glue.strip() else glue + example.answer
    # A chat template writes its special tokens itself.
    return prompt, answer, render_end(tokenizer, resolved), resolved == "plain"


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _without_appended_end(tokenizer: PreTrainedTokenizerBase, text: str, token_ids: list[int]) -> list[int]:
    eos_token, eos_id = tokenizer.eos_token, tokenizer.eos_token_id
    if text and eos_token and token_ids and token_ids[-1] == eos_id and not text.endswith(str(eos_token)):
        return token_ids[:-1]
    return token_ids
