# SPDX-License-Identifier: Apache-2.0
"""Greedy answers in batches, independent of what a model's own generation settings say."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.unlearn.data.encode import Template, pad_id_of, render_end, resolve_template
from lazyattention.unlearn.metrics.batches import run_in_batches
from lazyattention.unlearn.metrics.score import evaluating


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_token_ids: Sequence[int],
    batch_size: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[str]:
    """Continue each prompt greedily.

    Prompts of similar length are batched, padded on the left and masked. Sampling, penalties and other settings of
    `model.generation_config` are put aside for the call: they would change what "greedy" means from model to model.

    Args:
        model: Runs on the device it is on; its mode and generation settings are restored.
        tokenizer: Decodes; special tokens are dropped.
        prompts: Token ids, each at least one.
        max_new_tokens: For all prompts, or one number for each. A text is cut to its own number, so the others in
            its batch do not matter.
        stop_token_ids: Any of them ends a text.
        batch_size: Prompts per call; see `run_in_batches`.
        on_batch: Called after each batch with the number of prompts in it.

    Returns:
        The texts without prompt and surrounding white space, in the order of `prompts`.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda index: (-limits[index], -len(prompts[index])))
    texts: dict[int, str] = {}
    with evaluating(model), _plain_generation_config(model):
        for indices, new_ids in run_in_batches(
            model,
            order,
            batch_size,
            lambda places: _generate_batch(
                model,
                tokenizer,
                [prompts[place] for place in places],
                max(limits[place] for place in places),
                list(stop_token_ids),
            ),
        ):
            for index, token_ids in zip(indices, new_ids, strict=True):
                kept = _until_stop(token_ids[: limits[index]], stop_token_ids)
                texts[index] = str(tokenizer.decode(kept, skip_special_tokens=True)).strip()
            if on_batch is not None:
                on_batch(len(indices))
    return [texts[index] for index in range(len(prompts))]


def stop_token_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """Collect the tokens that end an answer: of the tokenizer, of the model's settings, of the template."""
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [cast("int", value)])
    end = render_end(tokenizer, resolve_template(tokenizer, template))
    if end:
        found.add(int(tokenizer(end, add_special_tokens=False)["input_ids"][0]))
    return sorted(found)


def _generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: list[int],
) -> list[list[int]]:
    device = next(model.parameters()).device
    pad_id = pad_id_of(tokenizer)
    prompt_len = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), prompt_len), pad_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, prompt_len - len(prompt) :] = torch.tensor(list(prompt))
        attention_mask[row, prompt_len - len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad_id, eos_token_id=stop_token_ids or None
    )
    output = cast("Any", model).generate(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=settings
    )
    return cast("list[list[int]]", output[:, prompt_len:].tolist())


def _until_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    for position, token_id in enumerate(token_ids):
        if token_id in stop_token_ids:
            return token_ids[:position]
    return token_ids


@contextlib.contextmanager
def _plain_generation_config(model: nn.Module) -> Iterator[None]:
    """Give the model, and what a PEFT wrapper holds, library defaults for generation; put its own back afterwards."""
    get_base_model = getattr(model, "get_base_model", None)
    owners: list[Any] = [model, *([get_base_model()] if callable(get_base_model) else [])]
    saved = [(owner, owner.generation_config) for owner in owners if hasattr(owner, "generation_config")]
    for owner, _ in saved:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in saved:
            owner.generation_config = config
