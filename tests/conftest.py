"""Fixtures for every test: memory nobody wrote is NaN, and random numbers are the same in every run."""

import os
import sys

import pytest
import torch
from hypothesis import settings

# Test machines are shared: a time limit for each example would fail for reasons that are not ours. In continuous
# integration the same examples run each time, so that a change fails for what it did; elsewhere new ones are explored.
settings.register_profile("shared machine", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("shared machine")

if not torch.cuda.is_available():
    # Without a GPU, kernels run in Triton's interpreter. Triton looks at this when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch):
    """An output a kernel forgot to write is NaN and fails loudly."""

    def poisoned(original):
        def make(*args, **kwargs):
            x = original(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return x.fill_(float("nan")) if caller.startswith("lazyattention.") and x.is_floating_point() else x

        return make

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
