# SPDX-License-Identifier: Apache-2.0
"""Optional packages: their absence is said before work begins, with the command that installs them."""

import importlib
from typing import Any

from lazyattention.errors import ConfigError


def require_package(name: str, what: str, extra: str) -> Any:  # noqa: ANN401 - a module
    """Import a package and return it, or say how to get it.

    Args:
        name: The package's import name.
        what: Who needs it, for the message.
        extra: The extra of this project that brings it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{what} needs the package {name}; run: pip install 'lazyattention[{extra}]'") from error
