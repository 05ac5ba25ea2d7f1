# SPDX-License-Identifier: Apache-2.0
"""Applies a PEFT adapter to a loaded model."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lazyattention.errors import ConfigError
from lazyattention.models.reading import READ_ERRORS, short
from lazyattention.models.weights_id import folder_digest
from lazyattention.utils.hashing import digest_fields
from lazyattention.utils.packages import require_package

_CONFIG_NAME = "adapter_config.json"


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
            f"adapter {str(folder)!r} has no {_CONFIG_NAME}; expected the folder of a PEFT adapter; check the path"
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
