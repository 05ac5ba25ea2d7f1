# SPDX-License-Identifier: Apache-2.0
"""What a layer's attention computes besides softmax(q k) v."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttendOptions:
    """Constants of one layer's attention.

    Attributes:
        softmax_scale: Multiplies q·k.
        sliding_window: A key is visible only at a distance below this many tokens, counted on true positions; None =
            no window.
        logit_softcap: Scores become `softcap * tanh(score / softcap)`; None = no cap.
    """

    softmax_scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
