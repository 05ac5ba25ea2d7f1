# SPDX-License-Identifier: Apache-2.0
"""When and by what evidence requests choose the blocks of stored documents that they compute anew."""

from typing import TYPE_CHECKING

from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.admission import Admission
from lazyattention.engine.kv_deviation import LAYER, kv_deviations
from lazyattention.engine.model_runner import ModelRunner
from lazyattention.engine.question_attention import watch_questions
from lazyattention.engine.request import RequestGroup, Sequence
from lazyattention.engine.scheduler import Step
from lazyattention.errors import ConfigError, RequestError
from lazyattention.ops import Observer
from lazyattention.reuse import REUSE_METHODS, ReuseMethod, SpanUse
from lazyattention.reuse.recompute import RECOMPUTE_POLICIES, Evidence, Recompute

if TYPE_CHECKING:
    from lazyattention.models.loaded_model import LoadedModel


def check_recompute(recompute: Recompute, method: ReuseMethod, loaded: "LoadedModel") -> None:
    """Refuse what cannot go together.

    Raises:
        RequestError: The method does not read chunks in place, or the model is too small for the policy.
    """
    if method.document_use is not SpanUse.SHARED:
        names = sorted(name for name, one in REUSE_METHODS.items() if one.document_use is SpanUse.SHARED)
        raise RequestError(
            f"recompute={recompute} needs a reuse method that reads stored documents in place ({', '.join(names)}), but "
            f"this request's is {method.name}; leave one of them out"
        )
    if RECOMPUTE_POLICIES[recompute.policy].evidence is Evidence.KV_DEVIATION and loaded.num_layers <= LAYER:
        raise RequestError(
            f"recompute={recompute} compares the second layer, but the model has {loaded.num_layers}; use first:TOKENS"
        )


def check_positions(recompute: Recompute, options: ChunkOptions) -> None:
    """Refuse positions at which a recomputed block would stand before what it sees.

    Raises:
        RequestError: Documents stand side by side.
    """
    if options.positions != "contiguous":
        raise RequestError(
            f"recompute={recompute} needs documents that stand one behind the other, but positions is {options.positions}; "
            "leave one of them out"
        )


def default_recompute(config: EngineConfig, loaded: "LoadedModel") -> Recompute | None:
    """Return what requests recompute unless they say otherwise.

    Raises:
        ConfigError: The option is malformed, or does not go with the configured reuse method, positions or the model.
    """
    try:
        recompute = Recompute.of(config.recompute)
        if recompute is not None:
            check_recompute(recompute, REUSE_METHODS[config.reuse_method], loaded)
            check_positions(recompute, config.chunk)
    except RequestError as error:
        raise ConfigError(str(error)) from error
    return recompute


class BlockChooser:
    """Collects evidence during steps and chooses between them. The engine's thread calls it."""

    def __init__(self, runner: ModelRunner, admission: Admission) -> None:
        """Keeps both; owns nothing."""
        self._runner = runner
        self._admission = admission
        self._dtype = runner.model.dtype  # found by a walk over the parameters: once, not every step

    def choose_at_once(self, group: RequestGroup) -> None:
        """Choose if no evidence is needed, because of the policy or because there is nothing to choose from."""
        if group.recompute is None:
            return
        if not any(self._admission.block_counts(group.plan)):
            group.chosen_blocks = ((),) * len(group.plan.spans)
        elif RECOMPUTE_POLICIES[group.recompute.policy].evidence is None:
            self._admission.choose(group)

    def watch(self, step: Step) -> Observer | None:
        """Return what must observe the step's forward pass, if anything."""
        return watch_questions(step, self._runner.kv_pool.block_size, self._runner.device, self._dtype)

    def choose(self, sequence: Sequence) -> float | None:
        """Choose a running sequence's blocks if the evidence is there.

        Returns:
            The tokens computed for the evidence, times the share of the layers they went through; None = not yet.
        """
        group = sequence.group
        if not all(span.chunk is None or span.chunk.is_ready for span in sequence.spans):
            return None
        if group.missing_evidence is Evidence.KV_DEVIATION:
            token_scores = kv_deviations(self._runner, sequence).tolist()
            cost = len(token_scores) * (LAYER + 1) / len(self._runner.kv_pool.layers)
        elif sequence.num_remaining == 0 and sequence.question_attention is not None:
            token_scores = sequence.question_attention.mass.tolist()
            first = next(index for index, span in enumerate(group.layout.spans) if span.is_document)
            # Text before the documents stays; what follows them is computed once more.
            cost = float(sum(len(span.token_ids) for span in group.layout.spans[first:] if not span.is_document))
        else:
            return None
        self._admission.choose(group, self._block_scores(group, token_scores))
        return cost

    def _block_scores(self, group: RequestGroup, token_scores: list[float]) -> list[list[float]]:
        """Sum each block's tokens."""
        block_size = self._runner.kv_pool.block_size
        scores = []
        for planned in group.plan.spans:
            end = planned.start + planned.num_tokens
            can_choose = planned.span.is_document and not planned.is_hidden
            blocks = range(planned.start, end, block_size) if can_choose else range(0)
            scores.append([sum(token_scores[block : min(block + block_size, end)]) for block in blocks])
        return scores
