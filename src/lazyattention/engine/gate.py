# SPDX-License-Identifier: Apache-2.0
"""The gate: reuse only where its measured cost in answers is small enough. Losses are measured elsewhere, kept here.

A loss belongs to weights (adapter included), chunk options and prompt options; it is kept in LAZYATTENTION_CACHE_DIR/quality.
"""

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.measured import find, keep, path_of
from lazyattention.reuse.recompute import Recompute
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

_WHAT = "measured loss"
FULL_ATTENTION_METHODS = ("full_recompute", "prefix")
_NUM_KEPT_DECISIONS = 64


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """How much less likely answers become when documents are reused instead of recomputed with full attention.

    Attributes:
        loss: Mean over questions, nats per answer token.
        loss_high: Upper end of its 95 % interval; what the gate compares.
        num_questions: How many questions.
        answers: Whose answers: "gold_nll" gold ones, "nll" full attention's own.
        data: What the questions were.
    """

    loss: float
    loss_high: float
    num_questions: int
    answers: str
    data: str


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate decided.

    Attributes:
        reuse_method: The method requests use unless they say otherwise.
        reason: Why, in a sentence; empty when no gate was asked for.
    """

    reuse_method: str
    reason: str


def remember_loss(weights_id: str, config: EngineConfig, measured: MeasuredLoss) -> Path:
    """Keep a loss for engines of these weights and options; the newest one counts. Returns the file.

    Raises:
        ConfigError: It cannot be written.
    """
    path = _path(weights_id, config)
    keep(path, _WHAT, asdict(measured))
    return path


def find_loss(weights_id: str, config: EngineConfig) -> MeasuredLoss | None:
    """Return what was measured for these weights and options, or None.

    Raises:
        ConfigError: The file is broken.
    """
    return find(_path(weights_id, config), _WHAT, MeasuredLoss)


class Gate:
    """The decisions of one engine: for its own options at once, for those that requests bring when they first do.

    Attributes:
        reuse_method: The method of requests that bring no options and say nothing else.
        reason: Why, in a sentence; empty when no gate was asked for.
    """

    def __init__(self, weights_id: str, config: EngineConfig) -> None:
        """Decides for the engine's options and says so in the log."""
        own = decide(weights_id, config)
        self.reuse_method, self.reason = own.reuse_method, own.reason
        self._weights_id, self._config = weights_id, config
        self._own = config.chunk, Recompute.of(config.recompute)
        # Clients name options: what is kept of them is bounded.
        self._decide = functools.lru_cache(maxsize=_NUM_KEPT_DECISIONS)(self._decide_for)

    def method_for(self, chunk: ChunkOptions, recompute: Recompute | None) -> str:
        """Return the reuse method of a request with these options. The log says once what was decided for others."""
        return self.reuse_method if (chunk, recompute) == self._own else self._decide(chunk, recompute)

    def _decide_for(self, chunk: ChunkOptions, recompute: Recompute | None) -> str:
        config = replace(self._config, chunk=chunk, recompute=None if recompute is None else str(recompute))
        own, brought = asdict(self._own[0]), asdict(chunk)
        changes = [f"{name}={value}" for name, value in brought.items() if value != own[name]]
        if recompute != self._own[1]:
            changes.append(f"recompute={recompute or 'none'}")
        return decide(self._weights_id, config, f"a request's {', '.join(changes)}").reuse_method


def decide(weights_id: str, config: EngineConfig, what: str = "these options") -> GateDecision:
    """Choose between the configured reuse method and full attention. Says so in the log; `what` names the options there.

    Without `max_loss`, or with a method that is full attention anyway, there is nothing to decide. A loss that is not
    known counts as too large.
    """
    limit = config.max_loss
    if limit is None or config.reuse_method in FULL_ATTENTION_METHODS:
        return GateDecision(config.reuse_method, "")
    found = find_loss(weights_id, config)
    if found is None:
        reason = (
            f"max_loss is {limit:g}, but no loss was measured for this model with {what}; documents are "
            "recomputed with full attention; measure with `lazyattention quality`, or leave max_loss out"
        )
    else:
        measured = (
            f"the loss of reuse with {what} is {found.loss:.3f} nats per answer token, at most {found.loss_high:.3f} "
            f"({found.num_questions} questions, {found.data})"
        )
        if found.loss_high <= limit:
            logger.info("%s, within max_loss %g: documents are reused", measured, limit)
            return GateDecision(config.reuse_method, f"{measured}, within max_loss {limit:g}: documents are reused")
        reason = (
            f"{measured}, above max_loss {limit:g}: documents are recomputed with full attention; train an adapter with "
            "`lazyattention adapt`, measure with more questions, or raise max_loss"
        )
    logger.warning("%s", reason)
    return GateDecision("full_recompute", reason)


def _path(weights_id: str, config: EngineConfig) -> Path:
    return path_of(_WHAT, weights_id, config, config.chunk)
