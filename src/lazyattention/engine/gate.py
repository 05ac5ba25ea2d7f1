# SPDX-License-Identifier: Apache-2.0
"""The gate: reuse only where its measured cost in answers is small enough. Losses are measured elsewhere, kept here.

A loss belongs to weights (adapter included), chunk options and prompt options; it is kept in LAZYATTENTION_CACHE_DIR/quality.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from lazyattention.config import EngineConfig
from lazyattention.engine.measured import find, keep, path_of
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

_WHAT = "measured loss"
FULL_ATTENTION_METHODS = ("full_recompute", "prefix")


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


def decide(weights_id: str, config: EngineConfig) -> GateDecision:
    """Choose between the configured reuse method and full attention. Says so in the log when full attention wins.

    Without `max_loss`, or with a method that is full attention anyway, there is nothing to decide. A loss that is not
    known counts as too large.
    """
    limit = config.max_loss
    if limit is None or config.reuse_method in FULL_ATTENTION_METHODS:
        return GateDecision(config.reuse_method, "")
    found = find_loss(weights_id, config)
    if found is None:
        reason = (
            f"max_loss is {limit:g}, but no loss was measured for this model with these options; documents are "
            "recomputed with full attention; measure with `lazyattention quality`, or leave max_loss out"
        )
    else:
        measured = (
            f"the loss of reuse is {found.loss:.3f} nats per answer token, at most {found.loss_high:.3f} "
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
