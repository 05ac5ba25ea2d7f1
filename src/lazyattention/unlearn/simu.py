# SPDX-License-Identifier: Apache-2.0
"""The two steps of SIMU, and by other options its baselines: find critical neurons, then move only them and attention.

Source:
    SIMU, arXiv:2510.07822, as far as it can be read without its code; docs/unlearning_fidelity.md lists what is open.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import RequestError
from lazyattention.unlearn.adapters import add_attention_lora
from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.attribution import AttributionScores, CostEstimate, attribute, estimate_cost
from lazyattention.unlearn.batch import TokenBatch, pad_right
from lazyattention.unlearn.config import UnlearnConfig
from lazyattention.unlearn.data import EncodedExample, QAExample, encode_examples, find_overlap, pad_id_of
from lazyattention.unlearn.guards import Guard, Measurement
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.metrics.quick import measure, quick_metrics
from lazyattention.unlearn.neuron_mask import (
    NeuronMask,
    dual_share,
    freeze_all_but,
    select_neurons,
    trainable_parameters,
)
from lazyattention.unlearn.objectives import IDK_ANSWERS, OBJECTIVES
from lazyattention.unlearn.snapshot import Snapshot, base_weights
from lazyattention.unlearn.trainer import TrainingSets, UnlearnTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearnSets:
    """What to forget, what to keep, and what the model never saw.

    Attributes:
        forget: Not empty.
        retain: May be empty for objectives without a retain term; then nothing guards utility.
        holdout: Gives the default target: forget answers as unlikely as these. May be empty.
    """

    forget: Sequence[QAExample]
    retain: Sequence[QAExample] = ()
    holdout: Sequence[QAExample] = ()

    def __post_init__(self) -> None:
        if not self.forget:
            raise RequestError("the forget set is empty; give at least one example")
        for name, other in (("retain", self.retain), ("holdout", self.holdout)):
            overlap = find_overlap(self.forget, other)
            if overlap:
                raise RequestError(
                    f"{len(overlap)} examples stand in the forget set and in the {name} set, first {overlap[0][0]!r} "
                    f"and {overlap[0][1]!r}; take them out of one"
                )


@dataclass(slots=True, kw_only=True)
class UnlearnResult:
    """What a run did. The model passed in has been changed; `model` is it, or a PEFT wrapper of it.

    Attributes:
        model: With the accepted weights, in evaluation mode.
        mask: Selected neurons.
        scores: Of step 1, if it ran.
        dual_share: Share of critical neurons that are critical for the retain set too, if that was scored.
        guard: Measurements, target and stop reason.
        steps: Telemetry of each micro-batch.
        original: Captured entries of the base model before the run, by name.
        base: Reads the same entries of the base model now (before a LoRA merge: its unmerged weights).
        num_trainable: Entries that could change, adapters included.
        num_changed: Entries that did.
        timings_s: "attribution", "training".
        peak_memory_bytes: Of the device during training; None on a CPU.
    """

    model: PreTrainedModel
    mask: NeuronMask
    scores: AttributionScores | None
    dual_share: float | None
    guard: Guard
    steps: list[dict[str, Any]]
    original: dict[str, torch.Tensor]
    base: Snapshot
    num_trainable: int
    num_changed: int
    timings_s: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None


def unlearn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: UnlearnSets,
    config: UnlearnConfig,
    *,
    output_dir: Path,
    scores: AttributionScores | None = None,
    resume_from: str | None = None,
    progress: Progress | None = None,
) -> UnlearnResult:
    """Make `model` forget `sets.forget`.

    Args:
        model: Changed in place, on the device it is on.
        tokenizer: Of the model.
        sets: Encoded here with the template of `config.train`.
        config: Everything else.
        output_dir: Checkpoints go here when `config.train.save_steps` is set.
        scores: Of an earlier step 1 with the same model, sets and options; skips it.
        resume_from: A checkpoint folder of an interrupted run with the same model, sets and options.
        progress: Shows bars; None shows nothing.

    Raises:
        UnsupportedError: The architecture is not known.
        RequestError: The sets overlap, or the run changed no weight.
        ConfigError: Options that do not fit together.
    """
    architecture = architecture_of(model)
    # The same weights and the same draws in every run with this seed, whatever was done before.
    torch.manual_seed(config.train.seed)

    # Step 1: which neurons.
    if scores is None and config.needs_attribution:
        scores = run_attribution(model, tokenizer, sets, config, progress=progress)
    mask, share = choose_neurons(model, scores, config)
    # One choice for all processes: scores of two GPUs may differ in the last bit.
    mask = broadcast_object_list([mask])[0]

    # Step 2: move them, and attention.
    everything = config.train.trainable == "everything"
    base = base_weights(model, architecture, mask, attention=config.train.attention, everything=everything)
    original = base.capture()
    trained = add_attention_lora(model, architecture, config.train) if config.train.attention == "lora" else model
    params, selections = trainable_parameters(
        trained, architecture, mask, config.train.attention, everything=everything
    )
    freeze_all_but(trained, params.values())
    snapshot = Snapshot(params, selections)
    guard = _make_guard(trained, tokenizer, sets, config, snapshot)
    trainer = UnlearnTrainer(
        trained,
        encode_sets(tokenizer, sets, config),
        config,
        guard,
        output_dir=output_dir,
        progress=progress,
    )
    on_gpu = trained.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(trained.device)
    start = time.monotonic()
    trainer.run(resume_from)
    return UnlearnResult(
        model=trained,
        mask=mask,
        scores=scores,
        dual_share=share,
        guard=guard,
        steps=trainer.telemetry.plain(),
        original=original,
        base=base,
        num_trainable=snapshot.num_entries,
        num_changed=guard.num_changed(),
        timings_s={"attribution": scores.elapsed_s if scores else 0.0, "training": time.monotonic() - start},
        peak_memory_bytes=torch.cuda.max_memory_allocated(trained.device) if on_gpu else None,
    )


def run_attribution(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: UnlearnSets,
    config: UnlearnConfig,
    *,
    progress: Progress | None = None,
) -> AttributionScores:
    """Step 1 on the forget set and, where contrast or a dual policy needs it, on the retain set."""
    forget, retain = attribution_batches(model, tokenizer, sets, config)
    return attribute(model, forget, retain, config.attribution, progress=progress)


def attribution_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sets: UnlearnSets, config: UnlearnConfig
) -> tuple[list[TokenBatch], list[TokenBatch] | None]:
    """Encode what step 1 reads, on the model's device."""
    needs_retain = config.attribution.contrast or config.neurons.dual != "keep"
    if needs_retain and not sets.retain:
        raise RequestError("attribution.contrast and neurons.dual need a retain set; give one, or turn them off")
    size, limit = config.attribution.batch_size, config.attribution.max_examples

    def batches(examples: Sequence[QAExample]) -> list[TokenBatch]:
        encoded = _encode(tokenizer, list(examples)[:limit], config)
        # Similar lengths together: less padding.
        encoded.sort(key=lambda row: len(row.input_ids))
        rows = [(row.input_ids, row.labels) for row in encoded]
        pad_id = pad_id_of(tokenizer)
        return [pad_right(rows[i : i + size], pad_id).to(model.device) for i in range(0, len(rows), size)]

    return batches(sets.forget), batches(sets.retain) if needs_retain else None


def attribution_cost(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sets: UnlearnSets, config: UnlearnConfig
) -> CostEstimate:
    """What step 1 will cost, before it starts."""
    forget, retain = attribution_batches(model, tokenizer, sets, config)
    return estimate_cost(model, [*forget, *(retain or [])], config.attribution)


def choose_neurons(
    model: PreTrainedModel, scores: AttributionScores | None, config: UnlearnConfig
) -> tuple[NeuronMask, float | None]:
    """Select neurons by scores, or by a control that needs none; also the dual share where it is known."""
    axis = config.attribution.neuron_axis
    if config.train.trainable == "everything":
        config = config.with_options({"neurons.control": "all"})
    if scores is None:
        sizes = [torch.zeros(projection.num_neurons(axis)) for projection in architecture_of(model).down]
        return select_neurons(sizes, config.neurons, axis=axis), None
    forget, retain = scores.signed(config.attribution)
    mask = select_neurons(forget, config.neurons, axis=axis, retain_scores=retain)
    if retain is None or config.neurons.control != "attributed":
        return mask, None
    return mask, dual_share(
        select_neurons(forget, config.neurons_without_policy, axis=axis),
        select_neurons(retain, config.neurons_without_policy, axis=axis),
    )


def encode_sets(tokenizer: PreTrainedTokenizerBase, sets: UnlearnSets, config: UnlearnConfig) -> TrainingSets:
    """Encode what training reads; for objectives that need it, with "I don't know" for an answer."""
    forget = list(sets.forget)
    if OBJECTIVES[config.objective.name].needs_idk:
        forget = with_idk_answers(forget)
    retain = _encode(tokenizer, list(sets.retain), config) if check_retain_set(sets, config) else []
    return TrainingSets(_encode(tokenizer, forget, config), retain, pad_id_of(tokenizer))


def check_retain_set(sets: UnlearnSets, config: UnlearnConfig) -> bool:
    """Return whether the objective reads the retain set; RequestError if it does and there is none."""
    uses_retain = OBJECTIVES[config.objective.name].retain_kind(config.objective) != "none"
    if uses_retain and not sets.retain:
        raise RequestError(
            f"objective {config.objective.name!r} needs a retain set; give one, or set objective.retain_weight to 0"
        )
    return uses_retain


def with_idk_answers(examples: Sequence[QAExample]) -> list[QAExample]:
    """Replace each answer by "I don't know" in one of several wordings."""
    return [
        dataclasses.replace(example, answer=IDK_ANSWERS[index % len(IDK_ANSWERS)])
        for index, example in enumerate(examples)
    ]


def _encode(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[QAExample], config: UnlearnConfig
) -> list[EncodedExample]:
    return encode_examples(tokenizer, examples, template=config.train.template, max_len=config.train.max_len)


def _make_guard(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: UnlearnSets,
    config: UnlearnConfig,
    snapshot: Snapshot,
) -> Guard:
    guards, train = config.guards, config.train

    def measure_now() -> Measurement:
        return quick_metrics(
            model,
            tokenizer,
            sets.forget,
            sets.retain,
            max_examples=guards.num_examples,
            # No gradients are kept, and training has a retain example beside each: four times as many fit.
            batch_size=max(4 * train.batch_size, 8),
            template=train.template,
            max_len=train.max_len,
            with_rouge=False,
        )

    target = guards.target
    if target is None and sets.holdout:
        holdout = measure(
            model,
            tokenizer,
            sets.holdout,
            batch_size=max(4 * train.batch_size, 8),
            template=train.template,
            max_len=train.max_len,
            with_rouge=False,
        )
        target = holdout["mean_nll" if guards.target_metric == "loss" else guards.target_metric]
    return Guard(guards, measure_now, snapshot, target)
