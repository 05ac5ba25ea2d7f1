# SPDX-License-Identifier: Apache-2.0
"""Applies a PEFT adapter to a loaded model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lazyattention.errors import ConfigError
from lazyattention.models.reading import READ_ERRORS, short
from lazyattention.models.weights_id import folder_digest
from lazyattention.utils.hashing import digest_fields
from lazyattention.utils.logging import get_logger
from lazyattention.utils.packages import require_package

logger = get_logger(__name__)

_CONFIG_NAME = "adapter_config.json"
_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
# Beside them, where `lazyattention adapt` made the adapter.
REPORT_NAME = "adapt.json"


@dataclass(frozen=True, slots=True)
class AdapterNotes:
    """What `lazyattention adapt` wrote down beside an adapter it made.

    Attributes:
        folder: The adapter's.
        model: Name of the model it was made for.
        base_weights_id: Fingerprint of that model's weights.
        options: The engine's options it was made for, by name.
    """

    folder: Path
    model: str
    base_weights_id: str
    options: Mapping[str, Any]

    def warn_of_other_weights(self, weights_id: str, name: str) -> None:
        """Say in the log when the adapter was applied to other weights than those it was made for.

        No error: the same model in another precision or file format is another set of weights, too.
        """
        if weights_id != self.base_weights_id:
            logger.warning(
                "adapter %s was made for other weights (of %s) than those of %s: what it was measured to do need not hold; "
                "measure again with `lazyattention quality`, or load the model that it was made for",
                self.folder,
                self.model,
                name,
            )

    def warn_of_other_options(self, options: Mapping[str, Any]) -> None:
        """Say in the log when the adapter serves with other options than those it was made for."""
        differing = sorted(name for name, value in self.options.items() if options.get(name) != value)
        if differing:
            logger.warning(
                "adapter %s was made for %s, but the engine has %s: serve it with the same, or measure what it does with these",
                self.folder,
                ", ".join(f"{name}={self.options[name]}" for name in differing),
                ", ".join(f"{name}={options[name]}" if name in options else f"no {name}" for name in differing),
            )


def read_notes(folder: Path) -> AdapterNotes | None:
    """Return what is known of an adapter; None for one from elsewhere."""
    try:
        report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
        return AdapterNotes(folder, report["model"], report["base_weights_id"], report["served_with"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def apply_adapter(model: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, str]:
    """Merge the adapter into dense weights; keep it beside packed (quantised) ones, where merging would round.

    Args:
        model: The base model; it is changed.
        folder: Has adapter_config.json and adapter_model.safetensors.

    Returns:
        `(model, digest of the adapter's files)`.

    Raises:
        ConfigError: peft is missing, or the folder is no adapter that fits the model.
    """
    if not (folder / _CONFIG_NAME).is_file():
        raise ConfigError(
            f"adapter {str(folder)!r} has no {_CONFIG_NAME}; expected the folder of a PEFT adapter; check the path, or let "
            "`lazyattention adapt` end if it writes there"
        )
    if not any((folder / name).is_file() for name in _WEIGHTS_NAMES):  # peft would look for them on the hub
        raise ConfigError(
            f"adapter {str(folder)!r} has no weights: expected {' or '.join(_WEIGHTS_NAMES)} beside {_CONFIG_NAME}; copy the "
            "whole folder"
        )
    require_package("peft", "adapter=", "unlearn")
    from peft import PeftModel

    digest = digest_fields([(folder / _CONFIG_NAME).read_bytes(), folder_digest(folder)]).hex()
    try:
        wrapped = PeftModel.from_pretrained(model, str(folder))
        # Only a second load tells what did not find its place; the first one warns at most.
        found = wrapped.load_adapter(str(folder), wrapped.active_adapter)
    except READ_ERRORS as error:
        raise ConfigError(
            f"adapter {str(folder)!r} does not fit the model: {short(error)}; it must be "
            "made for this very model; check which base model its adapter_config.json names"
        ) from error
    strays = [*found.missing_keys, *found.unexpected_keys]
    if strays:
        raise ConfigError(
            f"adapter {str(folder)!r} does not fit the model: {len(strays)} weights have no counterpart, such as "
            f"{strays[0]}; it must be made for this very model; check which base model its adapter_config.json names"
        )
    is_packed = getattr(model, "quantization_method", None) is not None
    applied: Any = wrapped.get_base_model() if is_packed else wrapped.merge_and_unload()
    return applied, digest
