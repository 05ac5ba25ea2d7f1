# SPDX-License-Identifier: Apache-2.0
"""The audit record of a run: everything a reader needs to judge it, as plain JSON, with what it does not claim."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lazyattention.unlearn.config import UnlearnConfig
from lazyattention.unlearn.data import QAExample, dataset_digest
from lazyattention.unlearn.metrics.context import EvalContext, EvalOptions
from lazyattention.unlearn.metrics.quick import evenly_spaced
from lazyattention.unlearn.objectives import OBJECTIVES
from lazyattention.unlearn.simu import UnlearnResult
from lazyattention.utils.hashing import digest_fields

SCHEMA = "lazyattention.unlearn.run/1"
NON_CLAIMS = (
    "Approximate unlearning is not proof of erasure. The forgotten text may still be recoverable by attacks that were "
    "not tried here, or by stronger ones of the same kind.",
    "Numbers hold for this model, these sets and these seeds. They say nothing about other questions on the same "
    "subject unless a probe below asked them.",
    "Copies of the original model, its backups, caches and logs are untouched by this run.",
    "That a neuron was selected does not show that it stores the forgotten text; only the controls, where they were "
    "run, tell whether the selection helped.",
    "This report is no legal advice, and no law is claimed to be satisfied by it.",
)
# What the SIMU paper leaves open, with the option that decides it here. The full list: docs/unlearning_fidelity.md.
UNKNOWN_FROM_PAPER = (
    "attribution.num_steps",
    "attribution.neuron_axis",
    "attribution.sign",
    "attribution.rule",
    "attribution.positions",
    "neurons.threshold",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.rho",
    "optimizer.clip_target",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.estimator",
    "optimizer.hessian_interval",
    "optimizer.curvature_set",
    "optimizer.clip_over",
    "objective.retain_weight",
    "train.num_epochs",
    "train.batch_size",
    "train.schedule",
)


def config_digest(config: UnlearnConfig) -> str:
    """Fingerprint of all options."""
    return digest_fields((json.dumps(config.to_dict(), sort_keys=True),)).hex()


def describe_data(sources: Mapping[str, str], splits: Mapping[str, Sequence[QAExample]]) -> dict[str, Any]:
    """Where each set came from, its size and fingerprint; no text."""
    return {
        name: {"source": sources[name], "num_examples": len(examples), "digest": dataset_digest(examples)}
        for name, examples in splits.items()
    }


def describe_training(result: UnlearnResult, config: UnlearnConfig) -> dict[str, Any]:
    """What step 1 chose and what step 2 changed."""
    guard, scores = result.guard, result.scores
    clip = [row["clip_fraction"] for row in result.steps if row.get("clip_fraction") is not None]
    return {
        "neurons": {
            "axis": result.mask.axis,
            "per_layer": result.mask.counts,
            "of": int(result.mask.layers[0].numel()),
            "share": result.mask.share,
            "empty_layers": result.mask.empty_layers,
            "dual_share": result.dual_share,
            "digest": result.mask.digest(),
        },
        "attribution": None
        if scores is None
        else {
            "elapsed_s": scores.elapsed_s,
            "num_forget_tokens": scores.num_forget_tokens,
            "residual_per_layer": scores.residuals,
        },
        "objective_source": OBJECTIVES[config.objective.name].source,
        "stop_reason": guard.stop_reason,
        "kept_step": guard.after["step"],
        "target_metric": config.guards.target_metric,
        "target": guard.target,
        "num_trainable": result.num_trainable,
        "num_changed": result.num_changed,
        "num_weights": sum(param.numel() for param in result.model.parameters()),
        "mean_clip_fraction": sum(clip) / len(clip) if clip else None,
        "timings_s": result.timings_s,
        "peak_memory_bytes": result.peak_memory_bytes,
        "trajectory": guard.history,
        "steps": result.steps,
    }


def sample_answers(
    model: Any,  # noqa: ANN401 - a transformers model or a PEFT wrapper
    tokenizer: Any,  # noqa: ANN401
    splits: Mapping[str, Sequence[QAExample]],
    config: UnlearnConfig,
    num_examples: int,
) -> dict[str, list[dict[str, str]]]:
    """What the model answers to a few questions of each set, greedily."""
    answers = {}
    options = EvalOptions(template=config.train.template, max_len=config.train.max_len, max_new_tokens=48)
    for name, examples in splits.items():
        chosen = evenly_spaced(examples, num_examples)
        if not chosen:
            continue
        texts = EvalContext(model, tokenizer, {name: chosen}, options).texts(name)
        answers[name] = [
            {"question": example.question, "expected": example.answer, "given": text}
            for example, text in zip(chosen, texts, strict=True)
        ]
    return answers


def decide(result: UnlearnResult, *, is_refused: bool, is_forced: bool) -> dict[str, Any]:
    """The outcome in one line and what it rests on."""
    guard = result.guard
    if is_refused:
        return {"status": "refused", "reason": "the model collapsed; nothing was written"}
    reached = guard.target_reached(guard.after)
    drop = guard.utility_drop(guard.after)
    utility = (
        f"{'fell' if drop >= 0 else 'rose'} by {abs(drop):.2f} points" if "retain" in guard.after else "not measured"
    )
    reason = f"stopped by: {guard.stop_reason}; utility {utility}"
    if guard.target is None:
        reason += "; no target was given"
    else:
        reason += "; the target was reached" if reached else "; THE TARGET WAS NOT REACHED"
    was_at_target = guard.target_reached(guard.before)
    if was_at_target:
        reason += ", BUT THE ORIGINAL MODEL WAS THERE ALREADY: it may never have known what was to be forgotten"
    return {
        "status": "written (forced)" if is_forced else "written",
        "target_reached": reached,
        "was_at_target": was_at_target,
        "reason": reason,
    }
