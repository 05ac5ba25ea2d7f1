# SPDX-License-Identifier: Apache-2.0
"""How one layer's heads are turned by position, and the turn itself in obvious PyTorch.

A turn multiplies each pair of dimensions by a rotation of `delta * inv_freq` radians. Its magnitude is 1: YaRN's
attention factor is already in q and k once and must not enter a second time.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotary:
    """Which dimensions of a head turn, and how fast.

    Attributes:
        inv_freq: float32 `[rotary_dim // 2]`, radians per token of each pair; None in layers without RoPE, which are
            never turned.
        rotary_dim: Number of dimensions that turn; 0 in layers without RoPE.
        is_interleaved: True: pairs are (2i, 2i + 1). False: pairs are (i, i + rotary_dim // 2).
        rotary_start: First dimension that turns.
    """

    inv_freq: torch.Tensor | None
    rotary_dim: int
    is_interleaved: bool = False
    rotary_start: int = 0


def turn_table(inv_freq: torch.Tensor, deltas: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of `deltas * inv_freq`, each `[num_rows, rotary_dim // 2]` in `dtype`.

    Angles are formed in float64: at 128K tokens a float32 angle is off by up to 8e-3 radians.

    Args:
        inv_freq: `[rotary_dim // 2]`, radians per token.
        deltas: int64 `[num_rows]`, tokens.
        dtype: float32, or float64 for reference runs.
    """
    angles = deltas.to(torch.float64)[:, None] * inv_freq.to(torch.float64)[None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: LayerRotary) -> torch.Tensor:
    """Turn each row of `x` by the angles whose cos and sin are given. Returns a new tensor of x's dtype.

    Args:
        x: `[num_rows, num_heads, head_dim]`.
        cos: `[num_rows, rotary_dim // 2]`, float32 or float64; arithmetic runs in its dtype.
        sin: As cos.
        rotary: Which dimensions turn and how they pair.
    """
    start, end = rotary.rotary_start, rotary.rotary_start + rotary.rotary_dim
    part = x[..., start:end].to(cos.dtype)
    cos, sin = cos[:, None, :], sin[:, None, :]
    if rotary.is_interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(x.dtype)
    if rotary.rotary_dim == x.shape[-1]:
        return turned
    return torch.cat((x[..., :start], turned, x[..., end:]), dim=-1)
