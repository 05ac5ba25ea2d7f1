# SPDX-License-Identifier: Apache-2.0
"""Where one engine step's device time goes: torch.profiler, kernels grouped by what they are for."""

import re
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lazyattention.engine.engine import Engine

# The first pattern that a kernel's name contains decides.
GROUPS = (
    (
        "attention",
        r"_shared_decode|_chunk_prefill|_merge_parts|_merge_states|chunk_prefill|shared_decode|flash_fwd|sdpa",
    ),
    ("store_kv", r"_store_kv"),
    ("copy and turn", r"_copy_turned"),
    ("linear layers", r"gemm|cutlass|nvjet|splitK|gemv|cublas"),
    ("norms, activation, rotary", r"^triton_"),
    ("copies", r"Memcpy|Memset"),
    ("sampling and the rest", r""),
)


def group_of(kernel: str) -> str:
    """Return what a kernel is for."""
    return next(group for group, pattern in GROUPS if re.search(pattern, kernel))


def profile_step(engine: Engine) -> dict[str, Any]:
    """Run one step under the profiler.

    Returns:
        `wall_ms` (with the profiler's own cost), `device_ms`, `groups` and the longest `kernels`: name, calls, ms.
    """
    _wait()
    before = engine.stats.step_s
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine.step()
        _wait()
    wall_ms = (engine.stats.step_s - before) * 1e3
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            entry = kernels.setdefault(event.name, [0, 0.0])
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us() / 1e3
            spans.append((event.time_range.start, event.time_range.end))
    groups: dict[str, float] = {}
    for name, (_, ms) in kernels.items():
        group = group_of(name)
        groups[group] = groups.get(group, 0.0) + ms
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:25]
    return {
        "wall_ms": wall_ms,
        "device_ms": sum(ms for _, ms in kernels.values()),
        "from_first_to_last_kernel_ms": (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3
        if spans
        else 0.0,
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1])),
        "kernels": [{"name": name, "calls": int(calls), "ms": ms} for name, (calls, ms) in longest],
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile_table(title: str, result: dict[str, Any]) -> str:
    """Return a profile as Markdown."""
    lines = [
        f"## {title}",
        "",
        f"Device time {result['device_ms']:.2f} ms in kernels; {result['from_first_to_last_kernel_ms']:.2f} ms from the "
        f"first kernel's start to the last one's end; the step took {result['wall_ms']:.2f} ms under the profiler.",
        "",
        "| group | ms |",
        "|---|---|",
        *(f"| {group} | {ms:.3f} |" for group, ms in result["groups"].items()),
        "",
        "| kernel | calls | ms |",
        "|---|---|---|",
        *(f"| `{kernel['name'][:90]}` | {kernel['calls']} | {kernel['ms']:.3f} |" for kernel in result["kernels"]),
        "",
    ]
    return "\n".join(lines) + "\n"
