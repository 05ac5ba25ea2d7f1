# SPDX-License-Identifier: Apache-2.0
"""Calls the transformers model on one batch and owns the KV tensors.

On the CPU each batch is laid out anew and the model runs as it is. On CUDA devices plans are kept between steps, layers are
compiled and small steps replayed as CUDA graphs; whatever of this a model does not allow is left out, and said once.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from lazyattention import envs
from lazyattention.cache.kv_pool import KVPool, choose_num_blocks
from lazyattention.config import EngineConfig
from lazyattention.engine.batch import Batch, build_batch
from lazyattention.engine.compiled import COMPILE_ERRORS, MIN_TOKENS, CompiledLayers
from lazyattention.engine.cuda_graphs import Capture, GraphCapture, GraphRunner
from lazyattention.engine.request import Sequence
from lazyattention.engine.scheduler import Step
from lazyattention.engine.step_planner import PlannedBatch, StepPlanner
from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.models.attention import ATTENTION_NAME, MASKLESS_ATTENTION_NAME
from lazyattention.ops import AttentionMetadata, AttentionPlan, Observer, make_plan
from lazyattention.ops.causal_prefill import LONG
from lazyattention.ops.device_plan import send
from lazyattention.utils.logging import get_logger

if TYPE_CHECKING:
    from lazyattention.models.loaded_model import LoadedModel

logger = get_logger(__name__)
# Enough for every kernel and graph that a step may need to be compiled with dynamic sizes.
_WARM_UP_TOKENS = 32


class ModelRunner:
    """One model, one KV pool, one device."""

    def __init__(
        self,
        loaded: "LoadedModel",
        config: EngineConfig,
        *,
        use_kernels: bool | None = None,
        capture: Capture | None = None,
        compile_backend: str = "inductor",
    ) -> None:
        """Reserve the KV pool; on a GPU compile and record what will be needed.

        Args:
            loaded: The model.
            config: Options.
            use_kernels: Plan for the kernels; None = on CUDA devices. Elsewhere their references run, for tests.
            capture: Records graphs; None = as CUDA graphs.
            compile_backend: Of torch.compile; others than the default are for tests.

        Raises:
            ConfigError: kv_dtype is not a float dtype, no block fits into kv_memory_bytes, or cuda_graphs is asked for
                on a device that has none.
        """
        self.model = loaded.model
        self.device = loaded.device
        self.rotaries = loaded.rotaries
        self.kv_dtype = _kv_dtype(config.cache.kv_dtype, loaded.dtype)
        num_blocks = config.cache.num_blocks or choose_num_blocks(
            loaded.kv_shapes,
            block_size=config.cache.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            kv_memory_bytes=config.cache.kv_memory_bytes,
        )
        self.kv_pool = KVPool(
            loaded.kv_shapes,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            dtype=self.kv_dtype,
            device=self.device,
        )
        self.compiled: CompiledLayers | None = None
        self.graphs: GraphRunner | None = None
        self._planner: StepPlanner | None = None
        self._said_scaled = False
        is_cuda = self.device.type == "cuda"
        if is_cuda if use_kernels is None else use_kernels:
            self._planner = StepPlanner(
                num_blocks=num_blocks,
                block_size=config.cache.block_size,
                device=self.device,
                track_reads=envs.DEBUG_CHECKSUMS,
            )
            self.model.set_attn_implementation(MASKLESS_ATTENTION_NAME)
        if is_cuda if config.compile is None else config.compile:
            self._compile(loaded, compile_backend)
        if self._planner is not None:
            self._prepare_cold_prompts(config.scheduler.max_num_batched_tokens)
        if config.cuda_graphs and self._planner is None:
            raise ConfigError(
                f"cuda_graphs is on, but the model is on {self.device}; leave it out, or load the model on a CUDA device"
            )
        if is_cuda if config.cuda_graphs is None else config.cuda_graphs:
            self._record_graphs(capture, config)

    def build_batch(self, step: Step) -> Batch:
        """Lay out a step that has at least one piece."""
        if self._planner is None:
            return build_batch(step, self.kv_pool.block_size)
        if _is_scaled(step):
            if not self._said_scaled:
                logger.warning(
                    "chunk_temperature and chunk_bias are unknown to the kernels: steps with them run in plain PyTorch, "
                    "which costs speed only"
                )
            self._said_scaled = True
            return build_batch(step, self.kv_pool.block_size)
        return self._planner.build(step)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch; its KV is in the pool afterwards.

        Returns:
            Logits `[num_sampled, vocab_size]` of the batch's sampled rows, in the model's dtype; valid until the next
            run.
        """
        if len(batch.copy_sources):
            self.kv_pool.copy_turned(batch.copy_sources, batch.copy_targets, batch.copy_deltas, self.rotaries)
        if (
            self.graphs is not None
            and self._planner is not None
            and isinstance(batch, PlannedBatch)
            and batch.observer is None
        ):
            assert batch.host_step is not None
            try:
                logits = self.graphs.run(batch.host_step, batch.token_ids, batch.sample_rows, self._planner.blocks)
            except RuntimeError as error:
                self.graphs = None
                logger.warning("CUDA graphs are off from now on, which costs speed only: %s", _reason(error))
            else:
                if logits is not None:
                    return logits
        sample_rows = torch.tensor(batch.sample_rows, dtype=torch.int64)
        return self._forward(
            send(batch.token_ids, self.device),
            self._plan(batch),
            send(sample_rows.numpy(), self.device),
            batch.observer,
        )

    @torch.inference_mode()
    def plan_ahead(self, batch: Batch, running: Iterable[Sequence]) -> None:
        """After `run`: plan the step that follows if all that run go on with one token each, unless it is planned like this one.

        The next step then finds its plan there; if it is another after all, it makes its own.
        """
        if self._planner is None or not isinstance(batch, PlannedBatch):
            return
        host_step = self._planner.plan_ahead(batch, running)
        if host_step is not None and self.graphs is not None:
            self.graphs.load_ahead(host_step)

    @torch.inference_mode()
    def call_layers(self, token_ids: list[int], metadata: AttentionMetadata) -> None:
        """Run the model, uncompiled, over KV memory of the caller's, whose observer may end it early by raising."""
        input_ids = torch.tensor(token_ids, device=self.device)
        self._call_model(input_ids, metadata, input_ids.new_zeros(1), None)

    @torch.inference_mode()
    def forget(self) -> None:
        """Between steps: keep no tokens but those of running sequences."""
        if self._planner is not None:
            self._planner.forget()
        if self.graphs is not None:
            self.graphs.clear_inputs()

    def close(self) -> None:
        """Let go of graphs and KV memory, and leave the model as it was."""
        self.graphs = None
        self._stop_compiling()
        if self._planner is not None:
            self.model.set_attn_implementation(ATTENTION_NAME)
        self.kv_pool.layers.clear()

    def _plan(self, batch: Batch) -> AttentionPlan:
        if self._planner is not None and isinstance(batch, PlannedBatch):
            assert batch.host_step is not None
            return self._planner.plan(batch.host_step)
        return make_plan(
            batch.positions,
            batch.slot_mapping,
            batch.ranges,
            batch.row_groups,
            block_size=self.kv_pool.block_size,
            store_turns=batch.store_turns,
            device=self.device,
            for_kernels=False,
        )

    def _forward(
        self,
        input_ids: torch.Tensor,
        plan: AttentionPlan,
        sample_rows: torch.Tensor,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """Run the model, compiled if it is. A failure to compile costs one repetition: all writes are the same again."""
        metadata = AttentionMetadata(plan, self.kv_pool.layers, self.rotaries, observer=observer)
        if self.compiled is not None and len(input_ids) >= MIN_TOKENS:
            try:
                return self._call_model(input_ids, metadata, sample_rows, self.compiled)
            except COMPILE_ERRORS as error:
                self._stop_compiling()
                logger.warning("compiled layers are off from now on, which costs speed only: %s", _reason(error))
        return self._call_model(input_ids, metadata, sample_rows, None)

    def _call_model(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor,
        compiled: CompiledLayers | None,
    ) -> torch.Tensor:
        with nullcontext(metadata) if compiled is None else compiled.metadata(metadata) as attention_metadata:
            output = self.model(
                input_ids=input_ids[None],
                position_ids=metadata.plan.positions[None],
                use_cache=False,
                attention_metadata=attention_metadata,
                logits_to_keep=sample_rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    # Start-up --------------------------------------------------------------------------------------------------------

    def _compile(self, loaded: "LoadedModel", backend: str) -> None:
        try:
            self.compiled = CompiledLayers(self.model, loaded.num_layers, backend=backend)
        except UnsupportedError as error:
            logger.warning("layers run as they are, not compiled, which costs speed only: %s", error)
            return
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> AttentionPlan:
        """Run some tokens that see and store nothing; return their plan."""
        input_ids = torch.zeros(_WARM_UP_TOKENS, dtype=torch.int64, device=self.device)
        if self._planner is not None:
            plan = self._planner.plan(self._planner.empty_step(_WARM_UP_TOKENS))
        else:
            index = torch.arange(_WARM_UP_TOKENS).numpy()
            plan = make_plan(index, index * 0 - 1, [], [], block_size=self.kv_pool.block_size, device=self.device)
        self._forward(input_ids, plan, torch.zeros(1, dtype=torch.int64, device=self.device))
        return plan

    @torch.inference_mode()
    def _prepare_cold_prompts(self, max_num_tokens: int) -> None:
        """Run a text of each padded length, for which stock kernels prepare a while. Its KV goes to free blocks."""
        assert self._planner is not None
        if not any(spec.causal_min_tokens for spec in self._warm_up()._device_plans):
            return
        largest = min(max_num_tokens, self.kv_pool.num_blocks * self.kv_pool.block_size)
        for length in range(LONG, largest + LONG, LONG):
            step = self._planner.cold_step(min(length, largest))
            input_ids = torch.zeros(len(step.positions), dtype=torch.int64, device=self.device)
            try:
                self._forward(input_ids, self._planner.plan(step), input_ids[:1])
            except RuntimeError as error:
                self._planner.leave_out_causal()
                logger.warning("cold prompts do without torch's kernels, which costs speed only: %s", _reason(error))
                return

    @torch.inference_mode()
    def _record_graphs(self, capture: Capture | None, config: EngineConfig) -> None:
        assert self._planner is not None
        try:
            graphs = GraphRunner(
                self._forward,
                capture or GraphCapture(self.device),
                list(self._warm_up()._device_plans),
                block_size=self.kv_pool.block_size,
                max_num_seqs=config.scheduler.max_num_seqs,
            )
            graphs.warm_up(self._planner.blocks)
        except (RuntimeError, UnsupportedError) as error:
            logger.warning("small steps run without CUDA graphs, which costs speed only: %s", _reason(error))
            return
        self.graphs = graphs

    def _stop_compiling(self) -> None:
        if self.compiled is not None:
            self.compiled.close()
        self.compiled = None


def _is_scaled(step: Step) -> bool:
    """True if attention scores in it have a temperature or a bias, which the kernels do not know: it runs without them."""
    return any(piece.sequence is not None and piece.sequence.group.plan.options.scales_scores for piece in step.pieces)


def _reason(error: Exception) -> str:
    """One line; compilers' messages are long, and the second line often is the one that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def _kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return model_dtype
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"kv_dtype must be auto, float64, float32, bfloat16 or float16, got {name!r}")
    return dtype
