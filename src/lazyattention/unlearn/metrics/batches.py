# SPDX-License-Identifier: Apache-2.0
"""How many examples one pass takes: enough to keep a device busy, fewer once its memory does not suffice."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from lazyattention.errors import ConfigError
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

# A small model on a GPU takes as long for one example as for a hundred; a CPU gains nothing from more.
_GPU_BATCH_SIZE, _CPU_BATCH_SIZE = 128, 8

Result = TypeVar("Result")


def run_in_batches(
    model: nn.Module, order: Sequence[int], batch_size: int | None, run: Callable[[list[int]], Result]
) -> Iterator[tuple[list[int], Result]]:
    """Call `run` on one part of `order` after the other.

    Args:
        model: Says by its device what None means.
        order: Places of examples; neighbours should be of similar length.
        batch_size: Places per call at most; None = by device. When a GPU's memory does not suffice, this batch and
            all later ones get half as long, down to one.
        run: From places to a result.

    Yields:
        The places of each batch and what `run` returned.
    """
    size = batch_size
    if size is None:
        size = _GPU_BATCH_SIZE if next(model.parameters()).device.type == "cuda" else _CPU_BATCH_SIZE
    if size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {size}")
    start = 0
    while start < len(order):
        batch = list(order[start : start + size])
        try:
            result = run(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            size = len(batch) // 2
        else:
            yield batch, result
            start += len(batch)
            continue
        # Outside of the handler: the error's frames held the tensors that have to go.
        torch.cuda.empty_cache()
        logger.warning("the device's memory does not suffice for batches of %d; going on with %d", len(batch), size)
