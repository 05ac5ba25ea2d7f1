# SPDX-License-Identifier: Apache-2.0
"""The oracle of the engine: what a prompt's logits must be, by the model's own eager attention and nothing of ours.

Every span is computed at its true positions. A document's span is an ordinary causal pass over the document alone, or
over the preamble and the document, the preamble moved up so that it ends where the document begins: all positions of
such a pass shift together, which changes no score in it, and so the document's keys come out at their true positions
without ever being turned by us. Text then runs over the keys and values of everything before it, in transformers' own
cache and under its own causal (and sliding) mask, which is right because positions are contiguous.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from lazyattention.engine.engine import Engine
from lazyattention.reuse import PromptLayout

# Models run in float64, but transformers forms norms, rotation tables and eager softmax in float32 whatever the dtype.
# What is left is a few 1e-6 of the largest logit.
TOLERANCE = 2e-5

LayerKV = tuple[torch.Tensor, torch.Tensor]  # each [1, num_kv_heads, num_tokens, head_dim]


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
        encoding: str,
        chosen_pages: Sequence[Sequence[int]] | None = None,
        page_size: int = 0,
    ) -> torch.Tensor:
        """Logits `[1 + num_output_tokens, vocab_size]` of the prompt's last token and of each output token.

        `encoding` is "isolated", "after_preamble", or "full": ordinary causal attention over everything. Of each span,
        `chosen_pages` of `page_size` tokens are computed over everything before them; what is stored stays as it is.
        """
        parts, start = self._context(layout, encoding, chosen_pages, page_size)
        last = layout.spans[-1].token_ids
        logits, _ = self._run((*last, *output_token_ids), start, parts)
        return logits[len(last) - 1 :]

    @torch.inference_mode()
    def question_attention(self, layout: PromptLayout, *, encoding: str) -> torch.Tensor:
        """Probabilities `[num_tokens_before_the_question]` that the last span gives each token, summed over all else."""
        parts, start = self._context(layout, encoding, None, 0)
        output = self._call(layout.spans[-1].token_ids, start, parts, output_attentions=True)[0]
        # Layers with a sliding window keep, and so return, the newest keys only.
        columns = [torch.nn.functional.pad(a[0], (start + a.shape[2] - a.shape[3], 0)) for a in output.attentions]
        return sum(a.sum(dim=(0, 1))[:start] for a in columns)

    @torch.inference_mode()
    def kv_deviation(self, layout: PromptLayout, *, encoding: str, layer_idx: int = 1) -> torch.Tensor:
        """Distance `[num_tokens_before_the_question]` of each token's keys and values to those of full attention."""
        stored, full = (self._context(layout, name, None, 0)[0] for name in (encoding, "full"))
        squares = 0
        for which in (0, 1):
            difference = torch.cat([part[layer_idx][which] for part in stored], dim=2)
            difference = difference - torch.cat([part[layer_idx][which] for part in full], dim=2)
            squares = squares + difference[0].square().sum(dim=(0, 2))
        return squares.sqrt()

    def _context(
        self,
        layout: PromptLayout,
        encoding: str,
        chosen_pages: Sequence[Sequence[int]] | None,
        page_size: int,
    ) -> tuple[list[list[LayerKV]], int]:
        """Keys and values of everything before the last span, and its number of tokens."""
        spans = list(layout.spans)
        preamble: tuple[int, ...] = ()
        if encoding == "after_preamble" and spans[0].is_preamble and any(span.is_document for span in spans):
            preamble = spans[0].token_ids
        parts: list[list[LayerKV]] = []
        start = 0
        for index, span in enumerate(spans[:-1]):
            if not span.token_ids:
                continue
            if encoding == "full" or not span.is_document:
                _, new = self._run(span.token_ids, start, parts)
            else:
                _, new = self._run((*preamble, *span.token_ids), start - len(preamble), [])
                new = [(k[:, :, len(preamble) :], v[:, :, len(preamble) :]) for k, v in new]
                chosen = chosen_pages[index] if chosen_pages else ()
                for page in range(-(-len(span.token_ids) // page_size) if chosen else 0):
                    here = slice(page * page_size, (page + 1) * page_size)
                    own = [(k[:, :, here], v[:, :, here]) for k, v in new]
                    if page in chosen:
                        _, own = self._run(span.token_ids[here], start + here.start, parts)
                    parts.append(own)
                if chosen:
                    start += len(span.token_ids)
                    continue
            parts.append(new)
            start += len(span.token_ids)
        return parts, start

    def _run(
        self, token_ids: Sequence[int], start: int, parts: Sequence[list[LayerKV]]
    ) -> tuple[torch.Tensor, list[LayerKV]]:
        """One causal pass at positions `start ...` over earlier parts; return its logits, its own keys and values."""
        output, cache = self._call(token_ids, start, parts)
        num_new = len(token_ids)
        return output.logits[0], [
            (layer.keys[:, :, -num_new:], layer.values[:, :, -num_new:]) for layer in cache.layers
        ]

    def _call(self, token_ids, start, parts, **more):
        cache = DynamicCache()
        for layer_idx, layer in enumerate(zip(*parts, strict=True)):
            k, v = (torch.cat(tensors, dim=2) for tensors in zip(*layer, strict=True))
            cache.update(k, v, layer_idx)
        positions = torch.arange(start, start + len(token_ids))
        output = self._model(
            input_ids=torch.tensor([list(token_ids)]),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            **more,
        )
        return output, cache


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
