# SPDX-License-Identifier: Apache-2.0
"""The oracle of the engine: what a prompt's logits must be, by the model's own eager attention and nothing of ours.

Every span is computed at its true positions. A document's span is an ordinary causal pass over the document alone, or
over the preamble and the document, the preamble moved up so that it ends where the document begins: all positions of
such a pass shift together, which changes no score in it, and so the document's keys come out at their true positions
without ever being turned by us. Text then runs over the keys and values of everything before it, in transformers' own
cache and under its own causal (and sliding) mask, or one made of positions where these are not contiguous.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from lazyattention.engine.engine import Engine
from lazyattention.reuse import PromptLayout, Span

# Models run in float64, but transformers forms norms, rotation tables and eager softmax in float32 whatever the dtype.
# What is left is a few 1e-6 of the largest logit.
TOLERANCE = 2e-5

LayerKV = tuple[torch.Tensor, torch.Tensor]  # each [1, num_kv_heads, num_tokens, head_dim]


@dataclass(frozen=True)
class Mask:
    """What a prompt's logits depend on besides its tokens; ChunkOptions in the oracle's own words.

    Attributes:
        encoding: "isolated", "after_preamble", or "full": ordinary causal attention over everything.
        sink: Tokens that each document is computed behind, and nobody else sees.
        num_hidden: First tokens of each document that nobody else sees.
        is_parallel: Neighbouring documents start at the same position.
        temperature: What text's scores on documents are divided by.
        bias: What is added to them.
    """

    encoding: str = "after_preamble"
    sink: tuple[int, ...] = ()
    num_hidden: int = 0
    is_parallel: bool = False
    temperature: float = 1.0
    bias: float = 0.0

    def preamble_of(self, layout: PromptLayout) -> tuple[int, ...]:
        """What every document is computed behind."""
        first = layout.spans[0]
        has_documents = any(span.is_document for span in layout.spans)
        return first.token_ids if self.encoding == "after_preamble" and first.is_preamble and has_documents else ()

    def placed(self, layout: PromptLayout) -> Iterator[tuple[Span, int]]:
        """Each span and its first position."""
        first = behind = end = 0  # of neighbouring documents; of the span before; of all so far
        for span in layout.spans:
            start = behind
            if not span.is_document:
                start = end
            elif self.is_parallel and span.token_ids and not span.chunk_index:
                start = first
            yield span, start
            behind = start + len(span.token_ids)
            end = max(end, behind)
            if not span.is_document:
                first = behind


@dataclass(frozen=True)
class Part:
    """Keys and values that later text sees, and where they stand."""

    layers: list[LayerKV]
    positions: range
    bias: float = 0.0


class ChunkOracle:
    """Logits of prompts under the chunk mask, or under full causal attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` must run transformers' eager attention; it is only called."""
        assert model.config._attn_implementation == "eager"
        self._model = model

    @torch.inference_mode()
    def logits(
        self,
        layout: PromptLayout,
        output_token_ids: Sequence[int] = (),
        *,
        encoding: str = "after_preamble",
        mask: Mask | None = None,
        chosen_blocks: Sequence[Sequence[int]] | None = None,
        block_size: int = 0,
    ) -> torch.Tensor:
        """Logits `[1 + num_output_tokens, vocab_size]` of the prompt's last token and of each output token.

        `encoding` is short for a mask with nothing else. Of each span, `chosen_blocks` of `block_size` visible tokens are
        computed over everything before them; what is stored stays as it is.
        """
        parts, start = self._context(layout, mask or Mask(encoding), chosen_blocks, block_size)
        last = layout.spans[-1].token_ids
        logits, _ = self._run((*last, *output_token_ids), start, parts)
        return logits[len(last) - 1 :]

    @torch.inference_mode()
    def question_attention(self, layout: PromptLayout, *, mask: Mask) -> torch.Tensor:
        """Probabilities `[num_positions_before_the_question]` that the last span gives each token, summed over all else."""
        parts, start = self._context(layout, mask)
        output = self._call(layout.spans[-1].token_ids, start, parts, output_attentions=True)[0]
        keys = torch.tensor([position for part in parts for position in part.positions])
        # Layers with a sliding window keep, and so return, the newest keys only.
        columns = [torch.nn.functional.pad(a[0], (len(keys) + a.shape[2] - a.shape[3], 0)) for a in output.attentions]
        mass = sum(a.sum(dim=(0, 1))[: len(keys)] for a in columns)
        return torch.zeros(start, dtype=mass.dtype).index_add_(0, keys, mass)

    @torch.inference_mode()
    def kv_deviation(self, layout: PromptLayout, *, encoding: str, layer_idx: int = 1) -> torch.Tensor:
        """Distance `[num_tokens_before_the_question]` of each token's keys and values to those of full attention."""
        stored, full = (self._context(layout, Mask(name))[0] for name in (encoding, "full"))
        squares = 0
        for which in (0, 1):
            difference = torch.cat([part.layers[layer_idx][which] for part in stored], dim=2)
            difference = difference - torch.cat([part.layers[layer_idx][which] for part in full], dim=2)
            squares = squares + difference[0].square().sum(dim=(0, 2))
        return squares.sqrt()

    def _context(
        self,
        layout: PromptLayout,
        mask: Mask,
        chosen_blocks: Sequence[Sequence[int]] | None = None,
        block_size: int = 0,
    ) -> tuple[list[Part], int]:
        """Keys and values of everything before the last span, and the position of that."""
        preamble = mask.preamble_of(layout)
        parts: list[Part] = []
        *placed, (_, behind) = mask.placed(layout)
        for index, (span, start) in enumerate(placed):
            token_ids = span.token_ids
            if not token_ids:
                continue
            if not span.is_document or mask.encoding == "full":
                _, layers = self._run(token_ids, start, parts)
                parts.append(Part(layers, range(start, start + len(token_ids))))
                continue
            before = (*preamble, *mask.sink)
            _, layers = self._run((*before, *token_ids), start - len(before), [])
            hidden = min(mask.num_hidden, len(token_ids) - 1)
            chosen = chosen_blocks[index] if chosen_blocks else ()
            size = block_size if chosen else len(token_ids)
            for block, begin in enumerate(range(hidden, len(token_ids), size)):
                here = range(begin, min(begin + size, len(token_ids)))
                seen = slice(len(before) + begin, len(before) + here.stop)
                # Keys that are smaller by a factor make scores smaller by it.
                own = [(k[:, :, seen] / mask.temperature, v[:, :, seen]) for k, v in layers]
                bias = mask.bias
                if block in chosen:
                    _, own = self._run(token_ids[begin : here.stop], start + begin, parts)
                    bias = 0.0
                parts.append(Part(own, range(start + begin, start + here.stop), bias))
        return parts, behind

    def _run(self, token_ids: Sequence[int], start: int, parts: Sequence[Part]) -> tuple[torch.Tensor, list[LayerKV]]:
        """One causal pass at positions `start ...` over earlier parts; return its logits, its own keys and values."""
        output, cache = self._call(token_ids, start, parts)
        num_new = len(token_ids)
        return output.logits[0], [
            (layer.keys[:, :, -num_new:], layer.values[:, :, -num_new:]) for layer in cache.layers
        ]

    def _call(self, token_ids, start, parts, **more):
        cache = DynamicCache()
        for layer_idx, layer in enumerate(zip(*(part.layers for part in parts), strict=True)):
            k, v = (torch.cat(tensors, dim=2) for tensors in zip(*layer, strict=True))
            cache.update(k, v, layer_idx)
        positions = torch.arange(start, start + len(token_ids))
        keys = [position for part in parts for position in part.positions]
        # Transformers' own mask counts keys, which is as good as positions only where none is missing.
        biases = [part.bias for part in parts for _ in part.positions]
        if keys and (any(biases) or keys != list(range(start - len(keys), start))):
            more["attention_mask"] = self._mask(positions, torch.tensor(keys), torch.tensor(biases))
        output = self._model(
            input_ids=torch.tensor([list(token_ids)]),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            **more,
        )
        return output, cache

    def _mask(
        self, positions: torch.Tensor, earlier: torch.Tensor, biases: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks `[1, 1, num_tokens, num_keys]` by where everything stands, as the model's layers want them."""
        distance = positions[:, None] - torch.cat((earlier, positions))[None]
        window = getattr(self._model.config, "sliding_window", None)
        full = distance >= 0
        kinds = {"full_attention": full, "sliding_attention": full if window is None else full & (distance < window)}
        added = torch.cat((biases.to(self._model.dtype), torch.zeros(len(positions), dtype=self._model.dtype)))
        lowest = torch.finfo(self._model.dtype).min
        masks = {name: added.expand(seen.shape).masked_fill(~seen, lowest)[None, None] for name, seen in kinds.items()}
        layer_types = set(getattr(self._model.config, "layer_types", None) or ())
        if len(layer_types) > 1:
            return masks
        return masks[layer_types.pop() if layer_types else "sliding_attention"]


class LogitsRecorder:
    """Keeps the logits of every row the engine samples: they are what is compared, text hides too much."""

    def __init__(self, engine: Engine) -> None:
        """Watch `engine` from now on."""
        self.rows: dict[tuple[str, int], list[torch.Tensor]] = {}
        run = engine.model_runner.run

        def run_and_record(batch):
            logits = run(batch)
            for sequence, row in zip(batch.sampled, logits, strict=True):
                self.rows.setdefault((sequence.group.request_id, sequence.index), []).append(row.clone())
            return logits

        engine.model_runner.run = run_and_record

    def of(self, request_id: str, index: int = 0) -> torch.Tensor:
        """Logits `[num_output_tokens, vocab_size]` of one completion."""
        return torch.stack(self.rows[request_id, index])


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference as a share of the largest logit; infinite when shapes or finiteness differ."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return ((got.double() - want.double()).abs().max() / want.abs().max()).item()
