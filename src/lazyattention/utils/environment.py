# SPDX-License-Identifier: Apache-2.0
"""What a number was measured with: hardware, versions, commit. Written beside every result."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_PACKAGES = ("lazyattention", "torch", "transformers", "triton", "numpy", "vllm")


def describe_environment() -> dict[str, object]:
    """Return hardware, operating system, package versions and, inside a checkout, the commit."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "gpu": _gpu_names(),
        "versions": versions,
        "commit": _commit(),
    }


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


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
