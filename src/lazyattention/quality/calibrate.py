# SPDX-License-Identifier: Apache-2.0
"""Finds the temperature and bias of attention scores on chunks with which answers come closest to full attention's.

No labels: what is made small is the KL from full attention along its own answers. Two numbers are searched on one half of
the questions; the other half says whether they help.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lazyattention.config import ChunkOptions
from lazyattention.engine.calibration import Calibration
from lazyattention.engine.engine import Engine
from lazyattention.engine.scoring import ScoredAnswer, generate, score
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample
from lazyattention.quality.measure import MeasureConfig, kl_divergence, layout_of
from lazyattention.quality.options import REUSE_METHOD
from lazyattention.reuse import PromptLayout
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

MAX_TRIALS = 40
"""Pairs of numbers tried at most."""
# Of ln(temperature) and of the bias, to begin with; halved where no neighbour is better, this many times.
_STEPS = (0.2, 0.5)
_NUM_HALVINGS = 3


def calibrate(
    engine: Engine,
    examples: Sequence[QualityExample],
    options: ChunkOptions,
    config: MeasureConfig,
    *,
    data: str,
    on_trial: Callable[[int, str], None] | None = None,
) -> Calibration:
    """Search temperature and bias for these chunk options.

    Memory grows with the number of questions times their answers' lengths times the vocabulary.

    Args:
        engine: Whose model is calibrated.
        examples: At least 4 questions.
        options: Chunk options; their own temperature and bias are where the search begins from: none.
        config: How to ask.
        data: What the questions are, for the record.
        on_trial: Called after each pair of numbers, with 1 and what was found so far.

    Returns:
        The best pair, or 1 and 0 where it does not help on the other half of the questions.

    Raises:
        ConfigError: There are too few questions.
    """
    if len(examples) < 4:
        raise ConfigError(f"there are {len(examples)} questions to calibrate with; at least 4 are needed")
    layouts = [layout_of(engine, example, config.system) for example in examples]
    full = generate(
        engine, layouts, max_tokens=config.max_tokens, reuse_method="full_recompute", chunk_options=ChunkOptions()
    )
    tried: dict[tuple[float, float], float] = {}

    def kl(point: tuple[float, float], half: int) -> float:
        scaled = replace(options, calibrated=False, chunk_temperature=math.exp(point[0]), chunk_bias=point[1])
        return _mean_kl(engine, layouts[half::2], full[half::2], scaled)

    def try_point(point: tuple[float, float]) -> float:
        if point not in tried and len(tried) < MAX_TRIALS:
            tried[point] = kl(point, 0)
            if on_trial is not None:
                best = min(tried, key=tried.__getitem__)
                on_trial(1, f"temperature {math.exp(best[0]):.2f}, bias {best[1]:+.2f}: KL {tried[best]:.4f}")
        return tried.get(point, math.inf)

    best = (0.0, 0.0)
    try_point(best)
    steps = _STEPS
    for _ in range(_NUM_HALVINGS + 1):
        while True:
            neighbours = [
                (round(best[0] + x * steps[0], 9), round(best[1] + y * steps[1], 9))
                for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1))
            ]
            better = min(neighbours, key=try_point)
            if tried.get(better, math.inf) >= tried[best]:
                break
            best = better
        steps = (steps[0] / 2, steps[1] / 2)
    before, after = kl((0.0, 0.0), 1), kl(best, 1)
    if after >= before:
        logger.warning("temperature and bias do not help: KL %.4f with the best ones, %.4f without", after, before)
        best, after = (0.0, 0.0), before
    return Calibration(math.exp(best[0]), best[1], after, before, len(examples), data)


def _mean_kl(
    engine: Engine, layouts: Sequence[PromptLayout], full: Sequence[ScoredAnswer], options: ChunkOptions
) -> float:
    answers = [answer.token_ids for answer in full]
    scored = score(engine, layouts, answers, reuse_method=REUSE_METHOD, chunk_options=options)
    engine.cache.forget_unused_texts()  # of no use to the next trial
    return sum(kl_divergence(one.logprobs, other.logprobs) for one, other in zip(full, scored, strict=True)) / len(full)
