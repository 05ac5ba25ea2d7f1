# SPDX-License-Identifier: Apache-2.0
"""The engine: schedule, run, sample, update, for any number of requests at once. Not thread-safe; see async_engine.py."""

import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from lazyattention import envs
from lazyattention.cache.kv_pool import kv_bytes_per_token
from lazyattention.cache.manager import CacheManager
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.admission import Admission, CacheIdentity
from lazyattention.engine.batch import Batch
from lazyattention.engine.block_chooser import BlockChooser, check_positions, check_recompute, default_recompute
from lazyattention.engine.calibration import resolve
from lazyattention.engine.checksums import ChecksumGuard
from lazyattention.engine.detokenizer import Detokenizer
from lazyattention.engine.documents import DocumentManager
from lazyattention.engine.gate import Gate
from lazyattention.engine.measured import prompt_options
from lazyattention.engine.model_runner import ModelRunner
from lazyattention.engine.outputs import CompletionOutput, RequestOutput, Timings
from lazyattention.engine.prompt import PromptBuilder
from lazyattention.engine.request import RequestGroup, Sequence
from lazyattention.engine.sampler import SampledToken, Sampler, SamplingRow, seed_key
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.engine.scheduler import Scheduler, Step
from lazyattention.engine.stats import EngineStats
from lazyattention.errors import CapacityError, LazyAttentionError, RequestError
from lazyattention.reuse import REUSE_METHODS, PromptLayout, ReuseMethod, SpanUse
from lazyattention.reuse.recompute import Evidence, Recompute
from lazyattention.utils.logging import get_logger

if TYPE_CHECKING:
    import torch

    from lazyattention.models.loaded_model import LoadedModel

logger = get_logger(__name__)
# Expired chunks and passed deadlines are looked for this often.
_HOUSEKEEPING_S = 1.0
REUSE_CHOICES = ("auto", "always", "never")


class Engine:
    """Continuous batching over documents whose KV is stored once.

    Protocol: `add_request` any time between steps; call `step` while `has_work`. Every request gets exactly one output
    with `finished` set: done, aborted or failed.
    """

    def __init__(self, loaded: "LoadedModel", config: EngineConfig | None = None) -> None:
        """Reserve memory for KV.

        Args:
            loaded: The model, from `models.loader.load_model`.
            config: Options; None = defaults.

        Raises:
            ConfigError: An option is not allowed.
        """
        config = config or EngineConfig()
        self.config = replace(config, chunk=resolve(loaded.weights_id, config, config.chunk))
        self._resolved: dict[ChunkOptions, ChunkOptions] = {}
        self.loaded = loaded
        if loaded.adapter_notes is not None:
            loaded.adapter_notes.warn_of_other_options(prompt_options(self.config))
        self.configured_method = REUSE_METHODS[self.config.reuse_method]
        self.default_recompute = default_recompute(self.config, loaded)
        self.gate = Gate(loaded.weights_id, self.config)
        self.model_runner = ModelRunner(loaded, self.config)
        kv_pool = self.model_runner.kv_pool
        self.cache = CacheManager(kv_pool.num_blocks, kv_pool.block_size, chunk_ttl_s=self.config.cache.chunk_ttl_s)
        identity = CacheIdentity(
            weights_id=loaded.weights_id,
            kv_dtype=str(self.model_runner.kv_dtype),
            bytes_per_token=kv_bytes_per_token(loaded.kv_shapes, self.model_runner.kv_dtype),
        )
        self.max_model_len = min(self.config.scheduler.max_model_len or loaded.max_model_len, loaded.max_model_len)
        self._admission = Admission(self.cache, identity)
        self.scheduler = Scheduler(self.cache, self._admission, self.config.scheduler)
        self._chooser = BlockChooser(self.model_runner, self._admission)
        self.sampler = Sampler(tuple(loaded.eos_token_ids))
        self._groups: dict[str, RequestGroup] = {}
        self.prompts = PromptBuilder(
            loaded.tokenizer,
            max_chunk_len=self.config.cache.max_chunk_len,
            documents_place=self.config.documents_place,
            chat_template=self.config.chat_template,
        )
        self.documents = DocumentManager(self.cache, identity, self._groups.values, self._forget_deleted)
        self.stats = EngineStats()
        self._checksums = ChecksumGuard(kv_pool) if envs.DEBUG_CHECKSUMS else None
        self._ended: list[RequestGroup] = []
        self._next_housekeeping_s = 0.0

    def resolve(self, options: ChunkOptions | None) -> ChunkOptions:
        """Return the chunk options of a request: the engine's if it brings none, and calibrated if they are to be.

        Raises:
            ConfigError: Nothing was calibrated for them.
            RequestError: They are something else.
        """
        if options is None:
            return self.config.chunk
        if not isinstance(options, ChunkOptions):
            raise RequestError(f"chunk_options must be ChunkOptions, got {options!r:.80}")
        if not options.calibrated:
            return options
        if options not in self._resolved:
            self._resolved[options] = resolve(self.loaded.weights_id, self.config, options)
        return self._resolved[options]

    @property
    def has_work(self) -> bool:
        """True while a step would do or report something."""
        return self.scheduler.has_work or bool(self._ended)

    @property
    def live_request_ids(self) -> list[str]:
        """Requests that wait or run."""
        return list(self._groups)

    def add_request(
        self,
        request_id: str,
        layout: PromptLayout,
        params: SamplingParams | None = None,
        *,
        scope: str = "default",
        reuse: str = "auto",
        reuse_method: str | None = None,
        chunk_options: ChunkOptions | None = None,
        recompute: Recompute | str | None = None,
        deadline_s: float | None = None,
        arrival_s: float | None = None,
    ) -> None:
        """Let a request wait for its turn.

        Args:
            request_id: Unique among live requests.
            layout: The prompt, from `prompts`.
            params: How to sample; None = defaults.
            scope: The tenant; KV is never shared between scopes.
            reuse: "auto" = as the gate decides for this request's options; "always" = by the engine's method whatever the
                gate says; "never" = recompute documents with full attention.
            reuse_method: Another method than the engine's, for this request; overrides the gate, so leave `reuse` out.
            chunk_options: Other chunk options than the engine's, for this request; chunks of both lie in one store.
            recompute: Which blocks of stored documents to compute anew for this request: "first:16", "deviation:0.15",
                "attention:0.15" or "none"; None = as the engine's option says, for methods that read chunks in place.
            deadline_s: Monotonic seconds after which it is ended with an error.
            arrival_s: When it came in, if not now.

        Raises:
            RequestError: The id is taken, the prompt is empty or too long, the request can never fit, or `recompute` is
                malformed or does not go with the reuse method or the chunk options.
            ConfigError: The reuse method is unknown, or the tokenizer lacks what a chunk option asks for.
        """
        options = self.resolve(chunk_options)
        wanted = self.default_recompute if recompute is None else Recompute.of(recompute)
        method = self._method_for(reuse, reuse_method, options, wanted)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if request_id in self._groups:
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        if not layout.spans or layout.spans[-1].is_document or not layout.spans[-1].token_ids:
            raise RequestError("the prompt must end with text; add a question or an instruction")
        plan = method.plan(layout, self.prompts.chunking(options))
        # Where nobody chose a method that reads no chunk in place but the engine or its gate, everything is recomputed anyway.
        is_gated = reuse == "auto" and reuse_method is None and method is not self.configured_method
        if (recompute is None or is_gated) and method.document_use is not SpanUse.SHARED:
            wanted = None
        if wanted is not None:
            check_recompute(wanted, method, self.loaded)
            check_positions(wanted, plan.options)
        if plan.num_positions >= self.max_model_len:
            num_document_tokens = sum(len(span.token_ids) for span in layout.spans if span.is_document)
            raise RequestError(
                f"the prompt has {layout.num_tokens} tokens ({num_document_tokens} of them in documents)"
                f"{'' if plan.num_positions == layout.num_tokens else f' at {plan.num_positions} positions'}, but "
                f"max_model_len is {self.max_model_len} and at least one token must be generated; shorten it or give "
                "fewer documents"
            )
        timings = Timings(arrival_s=time.monotonic() if arrival_s is None else arrival_s)
        group = RequestGroup(
            request_id, layout, layout.token_ids, params, method, plan, scope, timings, deadline_s=deadline_s
        )
        group.recompute = wanted
        self._chooser.choose_at_once(group)
        for index in range(params.n):
            group.sequences.append(self._new_sequence(group, index))
        try:
            for sequence in group.sequences:
                self.scheduler.add(sequence)
        except RequestError:
            for sequence in group.sequences:
                self.scheduler.finish(sequence)
            raise
        self._groups[request_id] = group

    def abort(self, request_id: str, reason: LazyAttentionError | None = None) -> bool:
        """End a request now and free what it holds; its last output says "abort", or "error" with the reason.

        Returns:
            False if no such request is live.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._fail(group, reason)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one forward pass; return what it produced (may be empty)."""
        started_s = time.perf_counter()
        self._do_housekeeping()
        step = self.scheduler.schedule()
        for sequence, error in step.failed:
            self._fail(sequence.group, error)
        changed: list[RequestGroup] = []
        if step.pieces:
            try:
                batch = self.model_runner.build_batch(step)
                batch.observer = self._chooser.watch(step)
                logits = self._run(batch)
            except Exception as error:  # whatever the model raises must not take other requests along
                self._fail_step(step, error)
            else:
                # While a GPU still computes.
                self.scheduler.advance(step)
                self.model_runner.plan_ahead(batch, self.scheduler.running)
                changed = self._sample(step, batch, logits)
                if self._checksums is not None:
                    self._checksums.after_step(step, batch)
        self._choose_blocks()
        self.stats.step_s += time.perf_counter() - started_s
        return self._collect(changed)

    def check_idle(self) -> None:
        """Assert that nothing is held while nothing runs: no block, reference or hold has leaked."""
        assert not self.scheduler.has_work, "requests are live"
        self.cache.check_idle()

    def describe(self) -> dict[str, Any]:
        """Return counters and gauges by name, for metrics and `LLM.stats`."""
        pool = self.cache.pool
        return {
            **asdict(self.stats),
            **asdict(self.cache.stats),
            "num_preemptions": self.scheduler.num_preemptions,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
            "num_chunks": len(self.cache.chunks),
            "num_text_blocks": len(self.cache.texts),
            "block_size": self.cache.block_size,
            "kv_bytes_per_token": self.documents.bytes_per_token,
            "max_model_len": self.max_model_len,
        }

    # Inside a step ---------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> "torch.Tensor":
        started_s = time.perf_counter()
        logits = self.model_runner.run(batch)
        self.stats.forward_s += time.perf_counter() - started_s
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += batch.num_tokens
        return logits

    def _sample(self, step: Step, batch: Batch, logits: "torch.Tensor") -> list[RequestGroup]:
        """Pick a token for each sampled sequence; return the requests that changed."""
        rows = [
            SamplingRow(s.group.params, s.group.prompt_token_ids, s.output_token_ids, s.seed_key) for s in batch.sampled
        ]
        try:
            tokens = self.sampler.sample(logits, rows)
        except Exception as error:  # here a GPU's results are waited for, and its errors come up
            self._fail_step(step, error)
            return []
        return self._update(batch, tokens)

    def _update(self, batch: Batch, tokens: Seq[SampledToken]) -> list[RequestGroup]:
        """Append each sampled token, end what is done; return the requests that changed."""
        now = time.monotonic()
        changed: dict[str, RequestGroup] = {}
        for sequence, token in zip(batch.sampled, tokens, strict=True):
            group = sequence.group
            if sequence.output.finish_reason is not None:
                continue  # a sibling's failure in this very step ended the whole request
            if token.error is not None:
                self._fail(group, token.error)
                continue
            self.stats.num_output_tokens += 1
            group.timings.num_output_tokens += 1
            if group.timings.first_token_s is None:
                group.timings.first_token_s = now
            changed[group.request_id] = group
            try:
                self._append(sequence, token)
            except Exception as error:  # a token that cannot be spelled is this request's failure alone
                logger.exception("request %s: token %d has no text", group.request_id, token.token_id)
                self._fail(group, LazyAttentionError(f"token {token.token_id} has no text: {error}"))
        return list(changed.values())

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        params, output = sequence.group.params, sequence.output
        sequence.output_token_ids.append(token.token_id)
        output.token_ids.append(token.token_id)
        output.delta_token_ids.append(token.token_id)
        if output.logprobs is not None and token.logprobs is not None:
            output.logprobs.append(token.logprobs)
        num_output = len(sequence.output_token_ids)
        is_eos = token.token_id in self.loaded.eos_token_ids and not params.ignore_eos
        if is_eos or (token.token_id in params.stop_token_ids and num_output >= params.min_tokens):
            self._end(sequence, "stop", None if is_eos else token.token_id)
            return
        output.delta_text += sequence.detokenizer.push([token.token_id])
        if sequence.detokenizer.stop_reason is not None:
            self._end(sequence, "stop", sequence.detokenizer.stop_reason)
        elif num_output >= sequence.max_tokens:
            self._end(sequence, "length", None)
        else:
            sequence.spans[-1].token_ids.append(token.token_id)

    def _end(self, sequence: Sequence, finish_reason: str, stop_reason: str | int | None) -> None:
        output = sequence.output
        output.delta_text += sequence.detokenizer.finish()
        output.finish_reason, output.stop_reason = finish_reason, stop_reason
        self.scheduler.finish(sequence)
        if sequence.group.is_finished:
            self._close(sequence.group)

    def _fail(self, group: RequestGroup, error: LazyAttentionError | None) -> None:
        """End all of a request's completions; without an error it counts as aborted."""
        if group.request_id not in self._groups:
            return
        group.error = error
        for sequence in group.sequences:
            if sequence.output.finish_reason is None:
                sequence.output.finish_reason = "abort" if error is None else "error"
            self.scheduler.finish(sequence)
        self.stats.num_failed += error is not None
        self._close(group)

    def _fail_step(self, step: Step, error: Exception) -> None:
        """A forward pass failed: end the requests that had work in it, those waiting for its chunks included."""
        logger.error("a forward pass over %d tokens failed", step.num_tokens, exc_info=error)
        text = f"the model failed on a batch this request was part of: {type(error).__name__}: {error}"
        failed = error if isinstance(error, LazyAttentionError) else CapacityError(text)
        groups = {id(p.sequence.group): p.sequence.group for p in step.pieces if p.sequence is not None}
        for sequence in list(self.scheduler.running):
            waits_for = [chunk for span in sequence.spans if span.chunk for chunk in (span.chunk, *span.chunk.context)]
            if any(chunk in step.chunk_tokens for chunk in waits_for):
                groups[id(sequence.group)] = sequence.group
        for group in groups.values():
            self._fail(group, failed)

    def _close(self, group: RequestGroup) -> None:
        group.timings.finished_s = time.monotonic()
        self.stats.num_finished += 1
        if group.timings.first_scheduled_s is not None:
            self.stats.num_prompt_tokens += len(group.prompt_token_ids)
            self.stats.num_recomputed_tokens += group.num_recomputed_tokens
        del self._groups[group.request_id]
        for scope, document_id in group.forget_at_end:
            self.cache.delete_document(scope, document_id)
        if group.forget_at_end:
            self._forget_deleted()
        self._ended.append(group)

    def _forget_deleted(self) -> None:
        """A document was deleted: let nobody keep its tokens for later."""
        self.prompts.forget_documents()
        self.model_runner.forget()

    def _collect(self, changed: list[RequestGroup]) -> list[RequestOutput]:
        ended, self._ended = self._ended, []
        live = [group for group in changed if group not in ended]
        outputs = []
        for group in live + ended:
            for sequence in group.sequences:
                sequence.output.text += sequence.output.delta_text
            outputs.append(_snapshot(group))
            for sequence in group.sequences:
                sequence.output.delta_text, sequence.output.delta_token_ids = "", []
        return outputs

    def _do_housekeeping(self) -> None:
        now = time.monotonic()
        if now < self._next_housekeeping_s:
            return
        self._next_housekeeping_s = now + _HOUSEKEEPING_S
        self.cache.expire()
        for group in list(self._groups.values()):
            if group.deadline_s is not None and group.deadline_s <= now:
                waited_s = now - group.timings.arrival_s
                self._fail(group, CapacityError(f"the request's deadline passed after {waited_s:.1f} s; retry later"))

    def _choose_blocks(self) -> None:
        """Let running requests whose evidence is there choose what to recompute, and start anew with that."""
        for sequence in list(self.scheduler.running):
            group = sequence.group
            evidence = group.missing_evidence
            if evidence is None:
                continue
            started_s = time.perf_counter()
            try:
                num_tokens = self._chooser.choose(sequence)
            except Exception as error:
                logger.exception("request %s: choosing blocks to recompute failed", group.request_id)
                text = f"choosing what to recompute failed: {type(error).__name__}: {error}; retry later, or without it"
                self._fail(group, CapacityError(text))
                continue
            if num_tokens is None:
                continue
            self.scheduler.restart(sequence)
            group.num_selection_tokens = num_tokens
            group.timings.selected_s = time.monotonic()
            self.stats.num_selections += 1
            self.stats.num_selection_tokens += num_tokens
            self.stats.selection_s += time.perf_counter() - started_s
            if evidence is Evidence.KV_DEVIATION:
                return  # it took a pass of its own; the next one waits for the next step, so that others go on

    def _method_for(
        self, reuse: str, reuse_method: str | None, options: ChunkOptions, recompute: Recompute | None
    ) -> ReuseMethod:
        if reuse not in REUSE_CHOICES:
            raise RequestError(f"reuse must be one of {', '.join(REUSE_CHOICES)}, got {reuse!r:.80}")
        if reuse_method is not None:
            if reuse != "auto":
                raise RequestError(f"reuse={reuse!r} and reuse_method={reuse_method!r} exclude each other; give one")
            return REUSE_METHODS[reuse_method]
        if reuse == "auto":
            return REUSE_METHODS[self.gate.method_for(options, recompute)]
        return self.configured_method if reuse == "always" else REUSE_METHODS["full_recompute"]

    def _new_sequence(self, group: RequestGroup, index: int) -> Sequence:
        params = group.params
        tokenizer: Any = self.loaded.tokenizer
        detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=group.prompt_token_ids,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        seed = params.seed if params.seed is not None else self.config.seed
        return Sequence(
            group=group,
            index=index,
            seed_key=seed_key(seed, index),
            detokenizer=detokenizer,
            max_tokens=min(params.max_tokens, self.max_model_len - group.plan.num_positions),
            output=CompletionOutput(index, logprobs=None if params.logprobs is None else []),
        )


def _snapshot(group: RequestGroup) -> RequestOutput:
    num_prompt_tokens = len(group.prompt_token_ids)
    was_admitted = group.timings.first_scheduled_s is not None
    return RequestOutput(
        request_id=group.request_id,
        prompt_token_ids=group.prompt_token_ids,
        outputs=[
            CompletionOutput(
                index=o.index,
                text=o.text,
                token_ids=list(o.token_ids),
                logprobs=None if o.logprobs is None else list(o.logprobs),
                delta_text=o.delta_text,
                delta_token_ids=list(o.delta_token_ids),
                finish_reason=o.finish_reason,
                stop_reason=o.stop_reason,
            )
            for o in (sequence.output for sequence in group.sequences)
        ],
        finished=group.is_finished,
        documents=list(group.documents),
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens - group.num_reused_tokens if was_admitted else 0,
        num_reused_tokens=group.num_reused_tokens,
        timings=group.timings,
        error=group.error,
        num_recomputed_tokens=group.num_recomputed_tokens,
        num_selection_tokens=group.num_selection_tokens,
    )
