# SPDX-License-Identifier: Apache-2.0
"""What an engine counts, for metrics and `LLM.stats`."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Counters since start, for metrics; see also CacheStats.

    Attributes:
        num_steps: Forward passes.
        num_prompt_tokens: Prompt tokens of requests that ran and ended.
        num_computed_tokens: Tokens computed, output included.
        num_output_tokens: Tokens sampled.
        num_finished: Requests that ended, for whatever reason.
        num_failed: Of these, with an error.
        num_recomputed_tokens: Document tokens in blocks that were computed anew, of requests that ran and ended.
        num_selections: Requests for which it was measured which blocks to compute anew.
        num_selection_tokens: Tokens computed for that, in the share of the model's layers that they went through.
        selection_s: Seconds inside passes made for that alone.
        forward_s: Seconds inside the model's forward.
        step_s: Seconds inside `step`.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_recomputed_tokens: int = 0
    num_selections: int = 0
    num_selection_tokens: float = 0.0
    selection_s: float = 0.0
    forward_s: float = 0.0
    step_s: float = 0.0
