# SPDX-License-Identifier: Apache-2.0
"""The attention function that transformers models call under the name "lazyattention": ops calls and nothing else.

Load a model with `attn_implementation="lazyattention"` after importing this module and call it on a flat batch::

    model(input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_metadata=metadata)

What a forward pass needs travels in the required keyword `attention_metadata`; nothing is kept between calls.

Compiled layers cannot carry it: a graph takes tensors. They get a ticket in its place, a small tensor that names the
metadata and the layer, and call one opaque operator, so that a graph has no break and is the same for every layer.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from lazyattention import ops
from lazyattention.errors import UnsupportedError
from lazyattention.ops.metadata import AttentionMetadata

ATTENTION_NAME = "lazyattention"
# The same function for callers that never pass a mask. transformers makes no masks for a name it knows none for; for
# the other one it looks through the positions first, and waits for the GPU to do so.
MASKLESS_ATTENTION_NAME = "lazyattention_maskless"
# Keywords that transformers' models pass along and that do not change what attention computes here.
_HARMLESS_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_hidden_states", "return_dict"}
)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_metadata: AttentionMetadata | torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unknown: Any,  # noqa: ANN401 - inspected below; anything unexpected raises
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values and attend to all KV ranges of the plan.

    Exact: equals attention at true positions under the plan's visibility. Argument names are transformers'.

    Args:
        module: The calling attention module; only its `layer_idx` is read.
        query: `[1, num_q_heads, num_tokens, head_dim]`, turned by the model at `position_ids`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, turned likewise.
        value: As key, not turned.
        attention_mask: Must be None: which keys are visible is the plan's matter.
        attention_metadata: Plan, KV memory and rotary tables of this forward pass, or a layer's ticket for them. The KV
            memory is written in place.
        scaling: softmax_scale; None = `head_dim ** -0.5`.
        dropout: Must be 0.
        sliding_window: Keys at this distance or farther are not seen. None = all; it is never read from the module.
        softcap: Scores are capped softly at this value before softmax.
        s_aux: Attention sinks, `[num_q_heads]`: one more score per head without a value.
        unknown: Refused unless known to leave attention alone.

    Returns:
        `([1, num_tokens, num_q_heads, head_dim], None)`.

    Raises:
        UnsupportedError: A mask, dropout or a keyword that could change the mathematics was given.
    """
    _refuse_unknown(module, attention_mask, dropout, unknown)
    if query.shape[0] != 1:
        raise UnsupportedError(
            f"input_ids has a batch of {query.shape[0]}; only 1 is allowed; put all requests' tokens in one row and "
            "tell them apart in attention_metadata"
        )
    softmax_scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_metadata, torch.Tensor):
        # Nothing of the module but its constants may be read here: a graph is shared by all layers alike.
        output = attention_by_ticket(
            query, key, value, attention_metadata, softmax_scale, sliding_window, softcap, s_aux
        )
        return output, None
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int), "transformers numbers its attention modules"
    output = ops.run(
        query[0].transpose(0, 1),  # [num_tokens, num_q_heads, head_dim]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_metadata,
        layer_idx,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logit_softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


@torch.library.custom_op("lazyattention::attention_by_ticket", mutates_args=())
def attention_by_ticket(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ticket: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `attention_forward`, opaque to compilers: KV memory is written behind the graph's back.

    The output depends on everything written, and a layer's graph calls this once, so nothing can be reordered.

    Args:
        query: As the following, in transformers' layout.
        key: As above.
        value: As above.
        ticket: int64 `[2]` on the CPU: number of an open `TicketBook`, layer index.
        softmax_scale: Multiplies q·k.
        sliding_window: As above.
        logit_softcap: As above.
        sinks: As above.

    Returns:
        `[1, num_tokens, num_q_heads, head_dim]`, a new tensor.
    """
    number, layer_idx = ticket.tolist()
    return ops.run(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _open_books[number],
        layer_idx,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )[None]


@attention_by_ticket.register_fake
def _attention_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ticket: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


class TicketBook:
    """The tickets of one model's layers, made once; they lead to a forward pass's metadata while it is open.

    Attributes:
        tickets: Layer index -> int64 `[2]` on the CPU.
    """

    def __init__(self, layer_indices: "set[int]") -> None:
        """Make a ticket for each layer."""
        self._number = next(_book_numbers)
        self.tickets = {layer_idx: torch.tensor([self._number, layer_idx]) for layer_idx in layer_indices}

    @contextmanager
    def open(self, metadata: AttentionMetadata) -> Iterator["TicketBook"]:
        """Let the tickets stand for `metadata` inside the block; one block at a time."""
        assert self._number not in _open_books, "a forward pass is running on these layers"
        _open_books[self._number] = metadata
        try:
            yield self
        finally:
            del _open_books[self._number]


_book_numbers = itertools.count(1)
# Only what is inside `TicketBook.open` right now, each under its own number.
_open_books: dict[int, AttentionMetadata] = {}


def refuse_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:  # noqa: ANN401
    """Build no mask; refuse one that was given. Without this, transformers drops a padding mask in silence."""
    if attention_mask is not None:
        raise UnsupportedError(
            "attention_mask was given; visibility comes from attention_metadata, so only None is allowed; drop the "
            "mask and leave padding out of input_ids"
        )


def _refuse_unknown(
    module: nn.Module, attention_mask: torch.Tensor | None, dropout: float, unknown: dict[str, Any]
) -> None:
    refuse_mask(attention_mask=attention_mask)
    if dropout:
        raise UnsupportedError(
            f"dropout={dropout} was asked for; only 0 is allowed, since reuse serves inference; call model.eval()"
        )
    # A keyword that is None or False asks for nothing; `position_bias=None` and the like are common.
    names = sorted(
        name
        for name, value in unknown.items()
        if value is not None and value is not False and name not in _HARMLESS_KEYWORDS
    )
    if names:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(names)} to its attention function; allowed are scaling, "
            "sliding_window, softcap and s_aux, because others may change the result; this model cannot be served"
        )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionInterface.register(MASKLESS_ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, refuse_mask)
