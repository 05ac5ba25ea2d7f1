# SPDX-License-Identifier: Apache-2.0
"""Argument checks that name the argument, what came and what is allowed."""

from collections.abc import Sequence

import torch


def check_shape(name: str, x: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `x` has this shape; None matches any size."""
    if x.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, x.shape, strict=True)):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {wanted}")


def check_dtype(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `x` has one of these dtypes."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}, expected {' or '.join(map(str, dtypes))}")
