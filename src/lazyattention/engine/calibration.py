# SPDX-License-Identifier: Apache-2.0
"""Temperature and bias of attention scores on chunks, found once per model and options, and loaded by name `calibrated`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.measured import find, keep, path_of
from lazyattention.errors import ConfigError
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

_WHAT = "calibration"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found.

    Attributes:
        chunk_temperature: The best temperature.
        chunk_bias: The best bias.
        kl: Mean KL from full attention with them, nats per answer token, on questions they were not chosen by.
        kl_before: The same without them.
        num_questions: How many questions.
        data: What the questions were.
    """

    chunk_temperature: float
    chunk_bias: float
    kl: float
    kl_before: float
    num_questions: int
    data: str


def remember_calibration(weights_id: str, config: EngineConfig, calibration: Calibration) -> Path:
    """Keep it for engines of these weights and options; the newest one counts. Returns the file."""
    path = _path(weights_id, config, config.chunk)
    keep(path, _WHAT, asdict(calibration))
    return path


def find_calibration(weights_id: str, config: EngineConfig, options: ChunkOptions) -> Calibration | None:
    """Return what was found for these weights and chunk options, or None.

    Raises:
        ConfigError: The file is broken.
    """
    return find(_path(weights_id, config, options), _WHAT, Calibration)


def resolve(weights_id: str, config: EngineConfig, options: ChunkOptions) -> ChunkOptions:
    """Replace `calibrated` by what was found. Says so in the log.

    Raises:
        ConfigError: Nothing was.
    """
    if not options.calibrated:
        return options
    found = find_calibration(weights_id, config, options)
    if found is None:
        raise ConfigError(
            "calibrated is on, but nothing was calibrated for this model with these options; run `lazyattention quality "
            "--calibrate` with them, or leave it out"
        )
    logger.info(
        "calibrated on %s (%d questions): chunk_temperature %.3f, chunk_bias %+.3f; KL from full attention %.3f, without "
        "them %.3f",
        found.data,
        found.num_questions,
        found.chunk_temperature,
        found.chunk_bias,
        found.kl,
        found.kl_before,
    )
    return replace(options, chunk_temperature=found.chunk_temperature, chunk_bias=found.chunk_bias, calibrated=False)


def _path(weights_id: str, config: EngineConfig, options: ChunkOptions) -> Path:
    return path_of(_WHAT, weights_id, config, replace(options, calibrated=False, chunk_temperature=1.0, chunk_bias=0.0))
