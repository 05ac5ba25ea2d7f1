# SPDX-License-Identifier: Apache-2.0
"""Attacks that try to bring back what was forgotten. One probe, one file."""

# Importing a probe registers it; those that change no weights come first and share one copy of the model.
from lazyattention.unlearn.probes import (  # noqa: F401
    paraphrase,
    prefix,
    quantize,
    relearn,
)
from lazyattention.unlearn.probes.context import ProbeContext, ProbeOptions, ProbeUnavailableError
from lazyattention.unlearn.probes.registry import PROBES, Probe
from lazyattention.unlearn.probes.run import compare_probes, run_probes

__all__ = [
    "PROBES",
    "Probe",
    "ProbeContext",
    "ProbeOptions",
    "ProbeUnavailableError",
    "compare_probes",
    "run_probes",
]
