# SPDX-License-Identifier: Apache-2.0
"""Checks on the loaded model itself that its heads are turned as `models/rope.py` claims, and that nothing is missing.

Turn check: the same tokens run from position 0 and from position `delta`, with attention replaced by a function that
lets each token see only itself. Hidden states are then the same in both runs, whatever the precision and whichever
experts are chosen, so the queries and keys of every layer must be equal once the first are turned by `delta`. A wrong
pairing, width or frequency, a layer wrongly taken to have (no) RoPE, weights applied after the rotation and scales that
depend on the position all show. Two deltas: a small one, where rounding is small, and one beyond
`max_position_embeddings`, where frequencies that depend on the length show.

Output check: through our attention function the model must give the logits that its own eager attention gives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.models.attention import ATTENTION_NAME, refuse_mask
from lazyattention.models.rope import attention_modules
from lazyattention.ops import AttentionMetadata, KVRange, LayerRotary, RowGroup, make_plan
from lazyattention.ops.rotary import turn, turn_table

_OBSERVER_NAME = "lazyattention_observer"
_NUM_TOKENS = 16
_SMALL_DELTA = 37


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe measured. Errors are relative to the size of what is compared.

    Attributes:
        kv_shapes: Per layer `(num_kv_heads, head_dim)`.
        turn_errors: Per layer, the largest error of its queries and keys over both deltas.
        logit_error: Difference from the model's own attention: median over the tokens, so that one token whose
            experts tip over in low precision does not count.
    """

    kv_shapes: tuple[tuple[int, int], ...]
    turn_errors: tuple[float, ...]
    logit_error: float


# layer_idx -> (query, key) as the attention function received them, token-major.
_Observed = dict[int, tuple[torch.Tensor, torch.Tensor]]


def check_model(model: PreTrainedModel, rotaries: Sequence[LayerRotary]) -> ProbeResult:
    """Probe the model and refuse it if it does not behave as claimed. Four forward passes of 16 or 32 tokens.

    Args:
        model: With `attn_implementation="lazyattention"`, in eval mode.
        rotaries: The claim, one per layer.

    Raises:
        ConfigError: The weights give values that are not finite.
        UnsupportedError: A layer is not turned as claimed, or the logits differ from the model's own.
    """
    result = probe(model, rotaries)
    turn_tolerance, logit_tolerance = tolerances(model)
    if not np.isfinite([*result.turn_errors, result.logit_error]).all():
        raise ConfigError(
            f"the weights of {type(model).__name__} give values that are not finite; only intact weights can be "
            "served; load the model again, or with dtype='float32' if float16 overflows"
        )
    wrong = [layer_idx for layer_idx, error in enumerate(result.turn_errors) if error > turn_tolerance]
    if wrong:
        raise UnsupportedError(
            f"layers {wrong} of {type(model).__name__} are not turned by position as expected (error "
            f"{max(result.turn_errors):.1e}, allowed {turn_tolerance:.1e}), so reused documents would be wrong; this "
            "model cannot be served; if its config.json was edited, undo that"
        )
    if result.logit_error > logit_tolerance:
        raise UnsupportedError(
            f"{type(model).__name__} gives other logits through our attention function than through its own (error "
            f"{result.logit_error:.1e}, allowed {logit_tolerance:.1e}): its attention does something that is not "
            "implemented; this model cannot be served"
        )
    return result


def tolerances(model: PreTrainedModel) -> tuple[float, float]:
    """Return what turn and logit errors may be, for the model's dtype and the angles it forms in float32.

    Measured over every row of the matrix and on SmolLM2-135M: see docs/models.md, "The load-time probe".
    """
    if model.dtype in (torch.float32, torch.float64):
        # A float32 angle near `delta` radians is off by up to delta * 2**-24, in the model and again in the shift.
        return min(1e-3 + _large_delta(model) * 2.0**-22, 0.25), 1e-3
    return 0.05, 0.3


def probe(model: PreTrainedModel, rotaries: Sequence[LayerRotary]) -> ProbeResult:
    """Measure turn and logit errors; see `check_model`."""
    token_ids, large_delta = _token_ids(model), _large_delta(model)
    positions = torch.arange(_NUM_TOKENS, device=model.device)
    with torch.inference_mode():
        with _attention(model, _OBSERVER_NAME):
            # Tokens see only themselves, so both near runs fit into one call. The far one must stand alone: what
            # depends on the length of the text would otherwise be the same in both. It has as many tokens, since
            # matrix products of another size round otherwise, and deep models add that up.
            near = _observe_run(model, token_ids.repeat(2), torch.cat((positions, positions + _SMALL_DELTA)))
            far = _observe_run(model, token_ids.repeat(2), (positions + large_delta).repeat(2))
        turn_errors = []
        for near_heads, far_heads, rotary in zip(near, far, rotaries, strict=True):
            errors = []
            for near_x, far_x in zip(near_heads, far_heads, strict=True):
                base, shifted = near_x.chunk(2)
                errors.append(_turn_error(base, shifted, rotary, _SMALL_DELTA))
                errors.append(_turn_error(base, far_x.chunk(2)[0], rotary, large_delta))
            turn_errors.append(float(np.max(errors)))  # max() would drop a nan that is not first
        kv_shapes = tuple((keys.shape[1], keys.shape[2]) for _, keys in near)
        ours = _run(model, token_ids, rotaries, kv_shapes).float()
        with _attention(model, "eager"):
            eager = model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    logit_error = ((ours - eager).norm(dim=-1) / eager.norm(dim=-1)).median()
    return ProbeResult(kv_shapes, tuple(turn_errors), float(logit_error))


def _large_delta(model: PreTrainedModel) -> int:
    """Return a power of two (its angles are formed without rounding) beyond every length the model knows.

    At most 2**21: farther out, angles that the model forms in float32 say nothing any more.
    """
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    return min(1 << max(limit, 2048).bit_length(), 1 << 21)


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use another attention function for the length of a `with` block."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _token_ids(model: PreTrainedModel) -> torch.Tensor:
    """Return different token ids spread over the vocabulary, the same in every run."""
    vocab_size: int = model.config.get_text_config().vocab_size
    token_ids: torch.Tensor = ((torch.arange(1, _NUM_TOKENS + 1) * 7919) % vocab_size).to(model.device)
    return token_ids


def _call(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    metadata: Any,  # noqa: ANN401 - AttentionMetadata or what the observer takes
) -> torch.Tensor:
    output = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attention_metadata=metadata
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _observe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_metadata: _Observed,
    **keywords: Any,  # noqa: ANN401 - what they mean is the output check's matter
) -> tuple[torch.Tensor, None]:
    """Attention function that notes queries and keys and lets each token see only itself."""
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int), "transformers numbers its attention modules"
    if layer_idx in attention_metadata or value.shape[-1] != key.shape[-1]:
        raise UnsupportedError(
            f"layer {layer_idx} of this model attends twice, or its values ({value.shape[-1]} wide) differ in width "
            f"from its keys ({key.shape[-1]}); the KV pool holds one pair of equal width per layer; this model cannot "
            "be served"
        )
    attention_metadata[layer_idx] = (query[0].transpose(0, 1), key[0].transpose(0, 1))
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_OBSERVER_NAME, _observe)
AttentionMaskInterface.register(_OBSERVER_NAME, refuse_mask)


def _observe_run(
    model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `(query, key)` of each layer, `[num_tokens, num_heads, head_dim]`."""
    observed: _Observed = {}
    _call(model, token_ids, positions, observed)
    num_layers = len(attention_modules(model))
    if sorted(observed) != list(range(num_layers)):
        raise UnsupportedError(
            f"{type(model).__name__} called the attention function for layers {sorted(observed)}; expected each of "
            f"its {num_layers} layers once; this model cannot be served"
        )
    return [observed[layer_idx] for layer_idx in range(num_layers)]


def _run(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    rotaries: Sequence[LayerRotary],
    kv_shapes: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Run the tokens as one text through our attention function. Return its logits `[num_tokens, vocab_size]`."""
    num_tokens, device = token_ids.shape[0], token_ids.device
    plan = make_plan(
        np.arange(num_tokens),
        np.arange(num_tokens),
        [KVRange(key="probe", block_ids=[0], num_tokens=num_tokens, first_position=0)],
        [RowGroup(range_index=0, token_start=0, num_tokens=num_tokens, position_delta=0)],
        block_size=num_tokens,
        device=device,
    )
    kv_caches = []
    for num_kv_heads, head_dim in kv_shapes:
        k_cache = torch.zeros(1, num_tokens, num_kv_heads, head_dim, dtype=model.dtype, device=device)
        kv_caches.append((k_cache, torch.zeros_like(k_cache)))
    return _call(
        model, token_ids, torch.arange(num_tokens, device=device), AttentionMetadata(plan, kv_caches, rotaries)
    )


def _turn_error(base: torch.Tensor, shifted: torch.Tensor, rotary: LayerRotary, delta: int) -> float:
    """Return the largest error of one head dimension, relative to that dimension's size, after turning by `delta`."""
    want, got = base.float(), shifted.float()
    if rotary.inv_freq is not None:
        deltas = torch.full((base.shape[0],), delta, device=base.device)
        want = turn(want, *turn_table(rotary.inv_freq, deltas, torch.float32), rotary)
    error = (got - want).pow(2).mean(0).sqrt()  # [num_heads, head_dim]
    # Both positions count: turning moves what a dimension's partner holds, and its rounding, into it.
    size = ((got.pow(2) + base.float().pow(2)) / 2).mean(0).sqrt()
    floor = 0.1 * size.pow(2).mean(-1, keepdim=True).sqrt()
    return float((error / (size + floor).clamp_min(torch.finfo(torch.float32).tiny)).max())
