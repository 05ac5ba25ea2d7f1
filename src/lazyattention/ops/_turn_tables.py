# SPDX-License-Identifier: Apache-2.0
"""cos and sin of any whole number of tokens, as two small tables that kernels combine by the angle sum.

A turn by `amount` tokens is a turn by `amount % NUM_LOW` and one by the remaining multiple of NUM_LOW. Both tables
together take about 1.5 MB at rotary_dim 128 and reach MAX_TURN tokens either way; nothing is computed per step. Entries
are formed in float64 and kept in float32, so an angle sum is off by about 2e-7.
"""

import torch

from lazyattention.ops.rotary import LayerRotary, turn_table

LOG2_NUM_LOW = 10
NUM_LOW = 1 << LOG2_NUM_LOW
NUM_HIGH = 2048
# Amounts in [-MAX_TURN, MAX_TURN) have table rows.
MAX_TURN = NUM_HIGH // 2 * NUM_LOW

# Keyed by the identity of inv_freq, which the entry keeps alive so that the identity stays its own.
_memo: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def turn_tables(rotary: LayerRotary, device: torch.device) -> torch.Tensor:
    """Return float32 `[NUM_LOW + NUM_HIGH, 2, rotary_dim // 2]`: cos and sin per row; made once per frequency table.

    Rows 0 to NUM_LOW - 1 turn by their index; row `NUM_LOW + NUM_HIGH // 2 + i` turns by `i * NUM_LOW`.

    Args:
        rotary: A layer that turns.
        device: Where the table goes.
    """
    assert rotary.inv_freq is not None
    memo_key = (id(rotary.inv_freq), device)
    if memo_key not in _memo:
        low = torch.arange(NUM_LOW)
        high = (torch.arange(NUM_HIGH) - NUM_HIGH // 2) * NUM_LOW
        cos, sin = turn_table(rotary.inv_freq.cpu(), torch.cat((low, high)), torch.float32)
        _memo[memo_key] = (torch.stack((cos, sin), dim=1).contiguous().to(device), rotary.inv_freq)
    return _memo[memo_key][0]
