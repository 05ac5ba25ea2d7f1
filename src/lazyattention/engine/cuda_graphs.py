# SPDX-License-Identifier: Apache-2.0
"""Small steps as CUDA graphs: captured once per number of tokens, replayed for whatever step was loaded last.

A small step is any step of few tokens: decodes, short questions over stored documents, or both together. Its tokens are
padded to the next size, and its plan stands still in memory. Steps in which no request has many tokens have graphs of
their own, without launches of chunk_prefill.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from lazyattention.ops._layout import LayoutSpec, PlanArrays
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.plan_builder import HostStep
from lazyattention.ops.static_plan import StaticCapacity, StaticPlan
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

# One token is padded to two: compiled layers treat a single one apart.
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MIN_LARGEST_SIZE = 256
# Steps up to here profit: longer ones keep the GPU busy for longer than their launches take.
PREFILL_SIZES = (16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# To begin with; a step with more makes its graph grow.
_RANGES_PER_TOKEN = 12
_DECODES_BESIDE_PREFILL = 32
_MANY_TASKS_BESIDE_PREFILL = 64
_MAX_TILES = 1024
_MAX_GROWTHS = 8

Forward = Callable[[torch.Tensor, AttentionPlan, torch.Tensor], torch.Tensor]
"""(input ids `[num_tokens]`, plan, rows whose logits are wanted) -> logits."""
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""Records what a function launches; returns its result, whose memory every replay writes anew, and the replay."""


class GraphCapture:
    """Records CUDA graphs into one memory pool, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is recorded yet."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run `function` once to compile and load what it needs, then record it."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay


class _Kind(NamedTuple):
    """What a graph can run."""

    size: int
    has_unturned: bool = False
    has_prefill: bool = False


@dataclass(slots=True)
class _Graph:
    """One kind's graph; `plan` and `logits` keep their memory.

    The plan's inputs are `[num_tokens + max_sampled]`: token ids, then rows whose logits are wanted.
    """

    capacity: StaticCapacity
    blocks: torch.Tensor
    plan: StaticPlan
    logits: torch.Tensor  # [max_sampled, vocab_size]
    replay: Callable[[], None]


class GraphRunner:
    """Runs small steps; says when it cannot."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        specs: Sequence[LayoutSpec],
        *,
        block_size: int,
        max_num_seqs: int,
    ) -> None:
        """Record nothing yet.

        Args:
            forward: Runs the model; must launch the same for plans of the same shapes, without waiting for the device.
            capture: Records it.
            specs: One per kind of layer, as `layout_spec` makes them.
            block_size: Tokens per KV block.
            max_num_seqs: Sequences that decode together at most.
        """
        self._forward = forward
        self._capture = capture
        self._specs = tuple(specs)
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        largest = max(MIN_LARGEST_SIZE, max_num_seqs)
        self.sizes = [size for size in SIZES if size < largest] + [min(s for s in (*SIZES, largest) if s >= largest)]
        # A request with fewer tokens than this goes through shared_decode.
        self._prefill_min_tokens = min(spec.prefill_min_tokens for spec in self._specs)
        self.prefill_sizes = [size for size in PREFILL_SIZES if size >= self._prefill_min_tokens]
        self._graphs: dict[_Kind, _Graph] = {}
        self._num_growths: dict[_Kind, int] = {}
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        """Graphs there are now."""
        return len(self._graphs)

    def warm_up(self, blocks: torch.Tensor) -> None:
        """Record a graph of each size, largest first, so that smaller ones find room in its memory.

        Args:
            blocks: The plan builder's block tables.
        """
        kinds = [_Kind(size) for size in self.sizes] + [_Kind(size, has_prefill=True) for size in self.prefill_sizes]
        for kind in sorted(kinds, reverse=True):
            self._record(kind, blocks, self._capacity_for(kind, 0))

    def run(
        self, step: HostStep, token_ids: np.ndarray, sample_rows: Sequence[int], blocks: torch.Tensor
    ) -> torch.Tensor | None:
        """Run a step, recording its graph first if need be.

        Args:
            step: From the plan builder.
            token_ids: int64 `[num_tokens]`.
            sample_rows: Tokens whose logits are wanted.
            blocks: The builder's block tables now.

        Returns:
            Logits `[len(sample_rows), vocab_size]`, valid until the next run; None if the step is not small enough.
        """
        num_tokens = len(token_ids)
        if len(sample_rows) > self._max_num_seqs or step.store_turns is not None:
            return None
        kind = self._kind_of(step.arrays, num_tokens)
        if kind is None:
            return None
        inputs = np.zeros(kind.size + self._max_sampled(kind.size), np.int64)
        inputs[:num_tokens] = token_ids
        inputs[kind.size :][: len(sample_rows)] = sample_rows
        graph = self._loaded(kind, step, blocks, inputs)
        if graph is None:
            return None
        graph.replay()
        self.num_replays += 1
        return graph.logits[: len(sample_rows)]

    def load_ahead(self, step: HostStep) -> None:
        """Send a later step's layout, if its graph exists and it fits; the device takes it when it is done with this one."""
        kind = self._kind_of(step.arrays, len(step.positions))
        graph = None if kind is None else self._graphs.get(kind)
        if graph is not None:
            graph.plan.load_layout(step)

    def clear_inputs(self) -> None:
        """Overwrite the tokens of the last steps."""
        for graph in self._graphs.values():
            graph.plan.inputs.zero_()

    def _kind_of(self, arrays: PlanArrays, num_tokens: int) -> _Kind | None:
        has_unturned = not bool(arrays.range_turned[arrays.group_ranges].all())
        has_prefill = not has_unturned and int(arrays.group_sizes.max(initial=0)) >= self._prefill_min_tokens
        sizes = self.prefill_sizes if has_prefill else self.sizes
        size = next((size for size in sizes if size >= num_tokens), None)
        return None if size is None else _Kind(size, has_unturned, has_prefill)

    def _max_sampled(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def _loaded(self, kind: _Kind, step: HostStep, blocks: torch.Tensor, inputs: np.ndarray) -> _Graph | None:
        """Return the graph with the step in its plan; a graph that is too small is recorded anew, some times over."""
        graph = self._graphs.get(kind)
        while True:
            if graph is not None and graph.plan.load(step, blocks, inputs):
                return graph
            if self._num_growths.get(kind, 0) >= _MAX_GROWTHS:
                return None
            if graph is None:
                capacity = self._capacity_for(kind, int(step.arrays.group_sizes.sum()))
            elif graph.blocks is not blocks:
                capacity = graph.capacity
            else:
                self._num_growths[kind] = self._num_growths.get(kind, 0) + 1
                capacity = graph.plan.capacity_for(step)
            graph = self._record(kind, blocks, capacity)

    def _capacity_for(self, kind: _Kind, num_rows: int) -> StaticCapacity:
        num_decodes = min(kind.size, _DECODES_BESIDE_PREFILL) if kind.has_prefill else kind.size
        max_rows = max(_RANGES_PER_TOKEN * num_decodes, 64 if kind.has_prefill else num_rows, 64)
        # Few tokens are few rows, whatever they look at.
        fewest = min(spec.decode_few.tile_m // spec.group for spec in self._specs)
        # Tasks beyond one per row split long ranges, so that a small step fills the device.
        max_tasks = max_rows + 64
        capacity = StaticCapacity(
            num_tokens=kind.size,
            max_rows=max_rows,
            max_few_tasks=max_tasks,
            max_many_tasks=_MANY_TASKS_BESIDE_PREFILL if kind.has_prefill else max_tasks * (kind.size > fewest),
            max_parts=2 * max_rows + 256,
            has_unturned=kind.has_unturned,
        )
        if not kind.has_prefill:
            return capacity
        # One program for each multiprocessor, and one more for each query tile and head.
        max_tasks = max(
            -(-spec.num_programs // spec.num_kv_heads) - (-kind.size * spec.group // spec.prefill.tile_m)
            for spec in self._specs
        )
        return replace(
            capacity,
            max_parts=capacity.max_parts + 16 * kind.size,
            max_prefill_tasks=4 * max_tasks,
            max_apart_tasks=max_tasks,
            max_tiles=_MAX_TILES,
            max_masked=_MAX_TILES,
        )

    def _record(self, kind: _Kind, blocks: torch.Tensor, capacity: StaticCapacity) -> _Graph:
        logger.debug("recording a CUDA graph: %s", capacity)
        self._graphs.pop(kind, None)  # gives its memory back to the pool
        size = capacity.num_tokens
        num_inputs = size + self._max_sampled(size)
        plan = StaticPlan(capacity, self._specs, block_size=self._block_size, blocks=blocks, num_inputs=num_inputs)
        inputs = plan.inputs
        logits, replay = self._capture(lambda: self._forward(inputs[:size], plan.plan, inputs[size:]))
        graph = self._graphs[kind] = _Graph(capacity, blocks, plan, logits, replay)
        return graph
