# SPDX-License-Identifier: Apache-2.0
"""How few steps of training on a part of what was forgotten bring back the rest?"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lazyattention.unlearn.data import QAExample, collate, encode_examples, pad_id_of
from lazyattention.unlearn.data.encode import EncodedExample
from lazyattention.unlearn.metrics.quick import evenly_spaced
from lazyattention.unlearn.probes.context import ProbeContext, ProbeUnavailableError, change
from lazyattention.unlearn.probes.registry import Probe, register

_MAX_GRADIENT_NORM = 1.0


def run(context: ProbeContext) -> dict[str, Any]:
    """Fine-tune all weights for a few steps; measure forget examples that are not trained on, and retain.

    A model that never knew the facts learns the wording of the answers too: read the result beside the retrained
    model's.
    """
    options, rng = context.options, random.Random(context.seed)
    attack, rest = _split_forget(context, rng)
    sets = {"forget": evenly_spaced(rest, options.max_examples)}
    if options.relearn_source == "retain":
        attack = list(context.splits.get("retain", []))
        if not attack:
            raise ProbeUnavailableError("needs the split 'retain' for relearn_source='retain'")
    if context.chosen("retain"):
        sets["retain"] = context.chosen("retain")
    model = context.fresh_model()
    if options.relearn_dtype == "float32":
        model.float()
    encoded = encode_examples(context.tokenizer, attack, template=options.template, max_len=options.max_len)
    trajectory: list[dict[str, Any]] = [
        {"step": 0, **{name: item.as_dict() for name, item in context.measure(model, sets).items()}}
    ]
    attacker = _Attacker(model, encoded, pad_id_of(context.tokenizer), context)
    losses: list[float] = []
    for step in range(1, options.relearn_steps[-1] + 1):
        losses.append(attacker.step())
        if step in options.relearn_steps:
            measured = {name: item.as_dict() for name, item in context.measure(model, sets).items()}
            trajectory.append({"step": step, **measured})
    before = {name: trajectory[0][name] for name in sets}
    after = {name: trajectory[-1][name] for name in sets}
    return {
        "method": (
            f"AdamW on all weights in {next(model.parameters()).dtype}, learning rate "
            f"{options.relearn_learning_rate:g}, {options.relearn_steps[-1]} steps of {options.relearn_batch_size} on "
            f"{len(attack)} {options.relearn_source} examples; measured on {len(sets['forget'])} other forget examples"
        ),
        "before": before,
        "after": after,
        "change": {name: change(before[name], after[name]) for name in sets},
        "trajectory": trajectory,
        "attack_losses": losses,
        "attack_example_ids": [example.example_id for example in attack],
    }


def _split_forget(context: ProbeContext, rng: random.Random) -> tuple[list[QAExample], list[QAExample]]:
    """Part the forget set at random into what the attacker has and what is measured; both keep their order."""
    forget: Sequence[QAExample] = context.splits.get("forget", [])
    if len(forget) < 2:
        raise ProbeUnavailableError(
            f"needs at least 2 forget examples, one to train on and one to measure; got {len(forget)}"
        )
    count = min(len(forget) - 1, max(1, round(len(forget) * context.options.relearn_fraction)))
    known = set(rng.sample(range(len(forget)), count))
    return [forget[i] for i in sorted(known)], [item for i, item in enumerate(forget) if i not in known]


class _Attacker:
    """Trains a model on a few examples, shuffled anew each time through."""

    def __init__(
        self, model: PreTrainedModel, encoded: Sequence[EncodedExample], pad_id: int, context: ProbeContext
    ) -> None:
        self._model = model
        self._encoded = encoded
        self._pad_id = pad_id
        self._rng = random.Random(context.seed)
        self._queue: list[EncodedExample] = []
        self._batch_size = min(context.options.relearn_batch_size, len(encoded))
        self._params = [param for param in model.parameters() if param.is_floating_point()]
        for param in self._params:
            param.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self._params, lr=context.options.relearn_learning_rate, weight_decay=0.0)

    def step(self) -> float:
        """Take one optimiser step; return the loss before it, in nats per token.

        In evaluation mode: with dropout the attack would depend on the global random state.
        """
        self._model.eval()
        device = self._params[0].device
        batch = {name: tensor.to(device) for name, tensor in collate(self._next_batch(), self._pad_id).items()}
        with torch.enable_grad():
            loss = self._model(**batch, use_cache=False).loss
            loss.backward()
        nn.utils.clip_grad_norm_(self._params, _MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _next_batch(self) -> list[EncodedExample]:
        if len(self._queue) < self._batch_size:
            again = list(self._encoded)
            self._rng.shuffle(again)
            self._queue += again
        batch, self._queue = self._queue[: self._batch_size], self._queue[self._batch_size :]
        return batch


RELEARN = register(
    Probe(name="relearn", run=run, source="Hu et al. 2024, arXiv:2406.13356; Deeb & Roger 2024, arXiv:2410.08827")
)
