# SPDX-License-Identifier: Apache-2.0
"""Small steps as CUDA graphs: captured once per number of tokens, replayed for whatever step was loaded last.

A small step is any step of few tokens: decodes, short questions over stored documents, or both together. Its tokens are
padded to the next size; all its attention goes through shared_decode, whose plan can stand still in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lazyattention.ops._layout import LayoutSpec
from lazyattention.ops.device_plan import send
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.plan_builder import HostStep
from lazyattention.ops.static_plan import StaticCapacity, StaticPlan
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

# One token is padded to two: compiled layers treat a single one apart.
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Steps up to here profit: longer ones keep the GPU busy for longer than their launches take.
MIN_LARGEST_SIZE = 256
# Ranges a token looks at, to begin with; a step with more makes its graph grow.
_RANGES_PER_TOKEN = 12
_MAX_GROWTHS = 8
# More keys than any prompt has tokens: no group of rows goes to chunk_prefill.
_NEVER = 2**30

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


@dataclass(slots=True)
class _Graph:
    """One size's graph; `plan`, `inputs` and `logits` keep their memory."""

    capacity: StaticCapacity
    blocks: torch.Tensor
    plan: StaticPlan
    inputs: torch.Tensor  # [num_tokens + max_sampled]: token ids, then rows whose logits are wanted
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
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._num_growths: dict[tuple[int, bool], int] = {}
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
        for size in reversed(self.sizes):
            self._record((size, False), blocks, self._capacity_for(size, 0, has_unturned=False))

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
        if num_tokens > self.sizes[-1] or len(sample_rows) > self._max_num_seqs or step.store_turns is not None:
            return None
        size = next(s for s in self.sizes if s >= num_tokens)
        arrays = step.arrays
        has_unturned = not bool(arrays.range_turned[arrays.group_ranges].all())
        graph = self._loaded((size, has_unturned), step, int(arrays.group_sizes.sum()), blocks)
        if graph is None:
            return None
        inputs = np.zeros(len(graph.inputs), np.int64)
        inputs[:num_tokens] = token_ids
        inputs[size : size + len(sample_rows)] = sample_rows
        graph.inputs.copy_(send(inputs, graph.inputs.device), non_blocking=True)
        graph.replay()
        self.num_replays += 1
        return graph.logits[: len(sample_rows)]

    def _loaded(self, key: tuple[int, bool], step: HostStep, num_rows: int, blocks: torch.Tensor) -> _Graph | None:
        """Return the graph with the step in its plan; a graph that is too small is recorded anew, some times over."""
        graph = self._graphs.get(key)
        while True:
            if graph is not None and graph.plan.load(step, blocks):
                return graph
            if self._num_growths.get(key, 0) >= _MAX_GROWTHS:
                return None
            if graph is None:
                capacity = self._capacity_for(key[0], num_rows, has_unturned=key[1])
            elif graph.blocks is not blocks:
                capacity = graph.capacity
            else:
                self._num_growths[key] = self._num_growths.get(key, 0) + 1
                capacity = _grown(graph.capacity, num_rows)
            graph = self._record(key, blocks, capacity)

    def _capacity_for(self, size: int, num_rows: int, *, has_unturned: bool) -> StaticCapacity:
        max_rows = max(_RANGES_PER_TOKEN * size, num_rows, 64)
        # Tasks beyond one per row split long ranges, so that a small step fills the device.
        return StaticCapacity(
            num_tokens=size,
            max_rows=max_rows,
            max_tasks=max_rows + 64,
            max_parts=2 * max_rows + 256,
            has_unturned=has_unturned,
        )

    def _record(self, key: tuple[int, bool], blocks: torch.Tensor, capacity: StaticCapacity) -> _Graph:
        logger.debug("recording a CUDA graph: %s", capacity)
        self._graphs.pop(key, None)  # gives its memory back to the pool
        plan, size = self._static_plan(capacity, blocks), capacity.num_tokens
        inputs = torch.zeros(size + min(size, self._max_num_seqs), dtype=torch.int64, device=blocks.device)
        logits, replay = self._capture(lambda: self._forward(inputs[:size], plan.plan, inputs[size:]))
        graph = self._graphs[key] = _Graph(capacity, blocks, plan, inputs, logits, replay)
        return graph

    def _static_plan(self, capacity: StaticCapacity, blocks: torch.Tensor) -> StaticPlan:
        """Make a plan that is laid out for shared_decode alone, whatever the length of a group of rows."""
        laid_out = {spec: replace(spec, prefill_min_tokens=_NEVER) for spec in self._specs}
        static = StaticPlan(capacity, list(laid_out.values()), block_size=self._block_size, blocks=blocks)
        plans = static.plan._device_plans
        # Layers ask by their own spec.
        static.plan._device_plans = {spec: plans[used] for spec, used in laid_out.items()}
        return static


def _grown(capacity: StaticCapacity, num_rows: int) -> StaticCapacity:
    """Return twice the room: for rows if these are too many, else for tasks and parts."""
    if num_rows > capacity.max_rows:
        max_rows = max(2 * capacity.max_rows, num_rows)
        return replace(
            capacity,
            max_rows=max_rows,
            max_tasks=max(capacity.max_tasks, max_rows + 64),
            max_parts=max(capacity.max_parts, 2 * max_rows + 256),
        )
    return replace(capacity, max_tasks=2 * capacity.max_tasks, max_parts=2 * capacity.max_parts)
