# SPDX-License-Identifier: Apache-2.0
"""What can go wrong when transformers reads a model's files, and how it is said."""

import pickle
import struct
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError

from lazyattention.errors import ConfigError

# What the readers raise for files that are missing, cut short or not what they claim to be.
READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    ImportError,
    SafetensorError,
    pickle.UnpicklingError,
    struct.error,
)


def short(error: Exception) -> str:
    """Return an exception's type and first line, for use inside another message."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def refuse_incomplete(found: Mapping[str, Any], what: str) -> None:
    """Refuse weights that do not cover the model. transformers only warns and fills the rest with random numbers.

    Args:
        found: Loading info of `from_pretrained(..., output_loading_info=True)`.
        what: Which weights, for the message.

    Raises:
        ConfigError: Keys are missing or of another shape.
    """
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if names := found.get(kind):
            shown = ", ".join(str(name) for name in sorted(names, key=str)[:3])
            raise ConfigError(
                f"weights of {what} do not match its configuration: {len(names)} {kind.replace('_', ' ')} ({shown} "
                "...); every weight must be there in the right shape; copy or download the model again"
            )
