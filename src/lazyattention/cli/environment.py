# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs to know about this machine, to print: versions, hardware, settings. Nothing private."""

import os
import sys

from lazyattention import __version__, envs
from lazyattention.utils.environment import PACKAGES, describe_environment


def printable_environment() -> dict[str, str]:
    """Return name -> value, in the order to print."""
    found = describe_environment()
    versions = found["versions"]
    assert isinstance(versions, dict)
    return {
        "lazyattention": __version__,
        "commit": str(found["commit"] or "not a checkout"),
        "python": f"{found['python']} ({sys.executable})",
        "platform": str(found["system"]),
        **{name: versions.get(name, "not installed") for name in PACKAGES if name != "lazyattention"},
        "cpu": f"{found['processor']}, {found['num_cores']} core(s) usable",
        "memory": _memory(),
        "accelerator": _accelerator(found["gpu"]),
        "torch threads": _torch_threads(),
        "model cache": str(envs.CACHE_DIR),
        "settings": _settings(),
    }


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _accelerator(names: object) -> str:
    import torch

    assert isinstance(names, list)
    if not names:
        return "none" if torch.version.cuda is None else f"none usable (torch is built for CUDA {torch.version.cuda})"
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def _torch_threads() -> str:
    import torch

    return str(torch.get_num_threads())


def _settings() -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(envs).items() if name.isupper() and name != "CACHE_DIR")
