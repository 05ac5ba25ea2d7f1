# SPDX-License-Identifier: Apache-2.0
"""Each kernel against its floor and the best stock kernel, on one GPU. Run by benchmarks/gpu_all.py.

Every time is the median of graph replays timed by events after warm-up. KV is random normal; a decode problem's KV is
many times the L2 cache.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lazyattention.ops import AttentionMetadata, LayerRotary
from lazyattention.ops._layout import LayoutSpec, PlanArrays
from lazyattention.ops._tiles import TileShape, num_multiprocessors, tiles_for
from lazyattention.ops.attend import AttendOptions
from lazyattention.ops.attention import run_kernels
from lazyattention.ops.chunk_prefill import chunk_prefill, has_unmasked_prefill
from lazyattention.ops.device_plan import DevicePlan, build_device_plan, lay_out, pack, send
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.merge_states import merge_parts
from lazyattention.ops.plan import plan_of_arrays
from lazyattention.ops.plan_builder import PlanBuilder, RequestRows
from lazyattention.ops.rotate import copy_turned
from lazyattention.ops.shared_decode import shared_decodes
from lazyattention.ops.store_kv import store_kv

BLOCK_SIZE = 16
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def graph_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of one call in ms, replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def stream_ms(function: Callable[[], object], repeats: int = 10) -> float:
    """Return the median time of one call in ms, launched as it is: a copy in a graph takes another, slower path."""
    function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_ms(functions: dict[str, Callable[[], object]], repeats: int = 50) -> dict[str, float]:
    """Return the median host time of one call of each in ms, all by turns, and beside it the lowest tenth."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {f"{name}, ms": statistics.median(x) for name, x in times.items()} | {
        f"{name}, lowest tenth, ms": sorted(x)[len(x) // 10] for name, x in times.items()
    }


def rotary(head_dim: int = 128) -> LayerRotary:
    """Return Llama 3's frequencies."""
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, head_dim, 2, device=DEVICE).float() / head_dim)
    return LayerRotary(inv_freq, head_dim)


@dataclass
class Problem:
    """One layer's step: what to attend to, and the memory it lies in."""

    arrays: PlanArrays
    positions: np.ndarray
    q: torch.Tensor
    kv: LayerKV
    rotary: LayerRotary
    unique_bytes: int
    flops: float

    def spec(self, **changes: object) -> LayoutSpec:
        """Return the layout a layer of this shape gets, with changes."""
        num_kv_heads, head_dim = self.kv.k_cache.shape[2:]
        tiles = tiles_for(DEVICE, head_dim, self.q.dtype)
        group = self.q.shape[1] // num_kv_heads
        spec = LayoutSpec(
            num_kv_heads=num_kv_heads,
            group=group,
            block_size=BLOCK_SIZE,
            sliding_window=None,
            decode_few=tiles.decode_few,
            decode_many=tiles.decode_many,
            decode_unturned=tiles.decode_unturned,
            prefill=tiles.prefill,
            prefill_unturned=tiles.prefill_unturned,
            num_programs=num_multiprocessors(DEVICE),
            prefill_min_tokens=max(2, tiles.prefill_min_rows // group),
            has_unmasked_prefill=has_unmasked_prefill(self.q, self.kv, self.rotary, AttendOptions(1.0)),
        )
        return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]

    def launches(self, spec: LayoutSpec, used: LayerRotary | None = None) -> tuple[DevicePlan, dict[str, Callable]]:
        """Return the device plan and the launches it takes: attention kernels, merge, all."""
        plan = build_device_plan(self.arrays, self.positions, spec, DEVICE)
        used = used or self.rotary
        positions = torch.from_numpy(self.positions).to(DEVICE)
        options = AttendOptions(self.kv.k_cache.shape[3] ** -0.5)
        out = torch.empty((*self.q.shape[:2], self.kv.v_cache.shape[3]), dtype=self.q.dtype, device=DEVICE)
        states = PartialStates(
            torch.empty((plan.num_parts, self.q.shape[1], out.shape[2]), dtype=self.q.dtype, device=DEVICE),
            torch.empty((plan.num_parts, self.q.shape[1]), dtype=torch.float32, device=DEVICE),
        )

        def attend() -> None:
            for tasks in plan.prefill:
                chunk_prefill(self.q, self.kv, tasks, positions, out, states, used, options)
            shared_decodes(self.q, self.kv, plan.decode, positions, states, used, options)

        def merge() -> None:
            merge_parts(states, out, plan.num_merges, plan.merge_tokens, plan.merge_starts)

        def both() -> torch.Tensor:
            attend()
            merge()
            return out

        return plan, {"attend": attend, "merge": merge, "all": both}


def make_problem(
    requests: Sequence[tuple[Sequence[int], int, int]],
    num_chunks: int,
    chunk_len: int,
    *,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    keys_turned: bool = True,
    shuffle_blocks: bool = False,
    stack: bool = True,
) -> Problem:
    """Lay requests out over chunks of one length.

    Args:
        requests: Per request the chunks it looks at, its stored text tokens, and its new tokens (stored as well).
        num_chunks: Chunks in the pool.
        chunk_len: Tokens of each; a multiple of BLOCK_SIZE.
        num_q_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Head size.
        dtype: Of queries and KV.
        keys_turned: Chunks are stored turned.
        shuffle_blocks: Chunk blocks are scattered over the pool instead of consecutive.
        stack: Rows of several requests share a read; False = every request reads its chunks for itself.
    """
    blocks_per_chunk = chunk_len // BLOCK_SIZE
    text_lens = [before + new for _, before, new in requests]
    text_blocks = [-(-n // BLOCK_SIZE) for n in text_lens]
    num_blocks = num_chunks * blocks_per_chunk + sum(text_blocks)
    blocks = np.arange(num_blocks)
    if shuffle_blocks:
        blocks = np.random.default_rng(0).permutation(num_blocks)
    firsts, tokens, tables, turned = [], [], [], []
    for chunk in range(num_chunks):
        firsts.append(0)
        tokens.append(chunk_len)
        tables.append(chunk * blocks_per_chunk)
        turned.append(keys_turned)
    groups, positions = [], []
    text_table = num_chunks * blocks_per_chunk
    for (chunks, before, new), num_text_blocks in zip(requests, text_blocks, strict=True):
        token_start, start = len(positions), 0
        for chunk in chunks:
            range_id = chunk
            if not stack:
                range_id = len(tokens)
                firsts.append(0)
                tokens.append(chunk_len)
                tables.append(chunk * blocks_per_chunk)
                turned.append(keys_turned)
            groups.append((range_id, token_start, new, start))
            start += chunk_len
        if before + new:
            groups.append((len(tokens), token_start, new, 0))
            firsts.append(start)
            tokens.append(before + new)
            tables.append(text_table)
            turned.append(True)
        text_table += num_text_blocks
        positions += range(start + before, start + before + new)
    columns = np.array(groups, dtype=np.int64)
    arrays = PlanArrays(
        *(columns[:, i].copy() for i in range(4)),
        range_tokens=np.array(tokens),
        range_firsts=np.array(firsts),
        range_turned=np.array(turned),
        range_tables=np.array(tables),
        range_slots=np.full(len(tables), -1) if shuffle_blocks else blocks[np.array(tables)] * BLOCK_SIZE,
        blocks=blocks.astype(np.int32),
    )
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    q = torch.randn((len(positions), num_q_heads, head_dim), device=DEVICE, dtype=dtype)
    used = {chunk for chunks, _, _ in requests for chunk in chunks}
    unique_tokens = len(used) * chunk_len + sum(text_lens)
    pairs = sum(new * (len(chunks) * chunk_len + before + (new + 1) / 2) for chunks, before, new in requests)
    return Problem(
        arrays, np.array(positions), q, LayerKV(k_cache, v_cache), rotary(head_dim),
        unique_tokens * 2 * num_kv_heads * head_dim * dtype.itemsize, 4 * num_q_heads * head_dim * pairs,
    )  # fmt: skip


def prefill_problem(rows: int, num_keys: int, chunk_len: int = 512, **options: object) -> Problem:
    """One request's `rows` new tokens over chunks of `num_keys` tokens in all, without their own text."""
    problem = make_problem([(range(num_keys // chunk_len), 0, rows)], num_keys // chunk_len, chunk_len, **options)  # type: ignore[arg-type]
    arrays = problem.arrays
    keep = arrays.group_ranges < num_keys // chunk_len
    columns = {
        name: getattr(arrays, name)[keep] for name in ("group_ranges", "group_starts", "group_sizes", "group_deltas")
    }
    flops = 4.0 * problem.q.shape[1] * problem.q.shape[2] * rows * num_keys
    return dataclasses.replace(problem, arrays=dataclasses.replace(arrays, **columns), flops=flops)


def zipf_requests(
    num_requests: int, docs_per_request: int, num_docs: int, alpha: float, text: tuple[int, int] = (63, 1)
) -> list[tuple[list[int], int, int]]:
    """Draw each request's documents without replacement, popularity `1 / rank ** alpha`."""
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, num_docs + 1) ** alpha
    weights /= weights.sum()
    return [
        (rng.choice(num_docs, docs_per_request, replace=False, p=weights).tolist(), *text) for _ in range(num_requests)
    ]


def ceilings() -> dict[str, float]:
    """Measure what the device can do at most: bandwidth and matrix products."""
    x = torch.randn(2**30, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy_ms = stream_ms(lambda: y.copy_(x))
    read_ms = graph_ms(lambda: x.view(torch.int32).view(1 << 13, -1).amax(1), 10)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = graph_ms(lambda: a @ b, 10)
    return {
        "copy_tb_s": 2 * x.nbytes / copy_ms / 1e9,
        "read_tb_s": x.nbytes / read_ms / 1e9,
        "matmul_tflop_s": 2 * 8192**3 / matmul_ms / 1e9,
    }


def stock_ms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> dict[str, float]:
    """Time torch's attention kernels on contiguous, head-major KV."""
    times = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times[backend.name] = graph_ms(
                    lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                )
        except RuntimeError as error:
            times[backend.name + "_error"] = str(error)[:80]  # type: ignore[assignment]
    return times


def bench_decode(read_tb_s: float) -> list[dict]:
    """Shared decode with its merge, against unique bytes at read bandwidth and stock decode on copied KV."""
    results = []
    for num_requests, alpha in ((64, 0.0), (64, 1.0), (256, 0.0), (256, 1.0), (256, 1.2), (8, 1.0), (1, 1.0)):
        requests = zipf_requests(num_requests, 10, 1000, alpha)
        problem = make_problem(requests, 1000, 512)
        floor_ms = problem.unique_bytes / read_tb_s / 1e9
        plan, launches = problem.launches(problem.spec())
        row: dict = {"requests": num_requests, "alpha": alpha, "unique_gb": problem.unique_bytes / 1e9}
        row |= {key: graph_ms(launch) for key, launch in launches.items()}
        row |= {"tasks": [tasks.tasks.shape[0] for tasks in plan.decode], "parts": plan.num_parts}
        row["floor_ms"] = floor_ms
        row["of_read_bandwidth"] = floor_ms / row["all"]
        _, launches = problem.launches(problem.spec(), LayerRotary(None, 0))
        row["attend_without_turn"] = graph_ms(launches["attend"])
        del problem, launches
        if num_requests >= 64 and alpha in (0.0, 1.0):
            alone = make_problem(requests, 1000, 512, stack=False)
            _, launches = alone.launches(alone.spec())
            row["one_read_per_request_ms"] = graph_ms(launches["all"])
            del alone, launches
        if alpha == 0.0:
            q = torch.randn(num_requests, 32, 1, 128, device=DEVICE, dtype=torch.bfloat16)
            k, v = (torch.randn(num_requests, 8, 5184, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            row["stock_on_copies_ms"] = stock_ms(q, k, v, causal=False)
            del k, v
        torch.cuda.empty_cache()
        results.append(row)
    return results


def bench_prefill(shapes: Sequence[tuple[int, int]]) -> list[dict]:
    """Rows over chunks against stock attention on contiguous KV of the same size, with and without the turn."""
    results = []
    for rows, num_keys in shapes:
        problem = prefill_problem(rows, num_keys)
        q = problem.q.transpose(0, 1)[None].contiguous()
        k, v = (torch.randn(1, 8, num_keys, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        row: dict = {"rows": rows, "keys": num_keys, "stock_ms": stock_ms(q, k, v, causal=False)}
        plan, launches = problem.launches(problem.spec())
        row["tasks"] = [plan.prefill[0].apart.shape[0], plan.prefill[0].tasks.shape[0]]
        row["ms"] = graph_ms(launches["all"])
        row["tflop_s"] = problem.flops / row["ms"] / 1e9
        _, launches = problem.launches(problem.spec(), LayerRotary(None, 0))
        row["without_turn_ms"] = graph_ms(launches["all"])
        best = min(t for t in row["stock_ms"].values() if isinstance(t, float))
        row["of_stock"] = best / row["ms"]
        _, launches = problem.launches(problem.spec(has_unmasked_prefill=False))
        row["triton_ms"] = graph_ms(launches["all"])
        results.append(row)
    return results


def bench_prefill_variants() -> dict[str, float]:
    """Time one size under conditions that cost: scattered blocks, longer chunks, unturned keys, own text, short documents."""
    times = {}
    for name, problem in (
        ("512 x 32K, chunks of 512", prefill_problem(512, 32768)),
        ("512 x 32K, scattered blocks", prefill_problem(512, 32768, shuffle_blocks=True)),
        ("512 x 32K, chunks of 2048", prefill_problem(512, 32768, 2048)),
        ("512 x 32K, keys stored unturned", prefill_problem(512, 32768, keys_turned=False)),
        ("64-token question over 10 x 512", make_problem([(range(10), 0, 64)], 10, 512)),
        ("64-token question over 128 x 512", make_problem([(range(128), 0, 64)], 128, 512)),
        ("64-token question over 50 x 96", make_problem([(range(50), 0, 64)], 50, 96)),
        ("8 questions of 64 over 10 x 512 each", make_problem(zipf_requests(8, 10, 100, 1.0, (0, 64)), 100, 512)),
        ("cold: 16 chunks of 512, causal", make_problem([((), 0, 512)] * 16, 0, 512)),
        ("cold: one text of 8192, causal", make_problem([((), 0, 8192)], 0, 512)),
    ):
        _, launches = problem.launches(problem.spec())
        times[name] = graph_ms(launches["all"])
    for name, batch, length in (
        ("cold: 16 chunks of 512, causal", 16, 512),
        ("cold: one text of 8192, causal", 1, 8192),
        ("cold: one text of 5000, causal", 1, 5000),
    ):
        layer = cold_layer(batch, length)
        times[f"{name}, a layer as the engine runs it"] = stream_ms(layer)
        # The same without what the host takes to launch it, which is more than short texts take on the device.
        try:
            times[f"{name}, a layer in a graph"] = graph_ms(layer)
        except RuntimeError as error:  # what cannot be recorded is a result, too
            times[f"{name}, a layer in a graph, error"] = str(error)[:80]  # type: ignore[assignment]
        q = torch.randn(batch, 32, length, 128, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 8, length, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        for backend, value in stock_ms(q, k, v, causal=True).items():
            times[f"{name}, {backend}"] = value
    return times


def cold_layer(num_texts: int, length: int) -> Callable[[], object]:
    """Return one layer over texts of which nothing is stored: store, attend by whichever kernel, merge."""
    problem = make_problem([((), 0, length)] * num_texts, 0, length)
    slots = np.arange(num_texts * length) if length % BLOCK_SIZE == 0 else np.arange(length)
    plan = plan_of_arrays(
        problem.arrays, problem.positions, slots, block_size=BLOCK_SIZE, store_turns=None, device=DEVICE
    )
    kv = problem.kv
    metadata = AttentionMetadata(plan, [(kv.k_cache, kv.v_cache)], [problem.rotary])
    k, v = (torch.randn(len(slots), 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    options = AttendOptions(128**-0.5)
    return lambda: run_kernels(problem.q, k, v, metadata, 0, options, None)


def bench_float8() -> dict[str, float]:
    """Time decode over float8 KV against bfloat16."""
    requests = zipf_requests(64, 10, 1000, 0.0)
    problem = make_problem(requests, 1000, 512)
    scale = torch.ones(8, device=DEVICE)
    kv = LayerKV(*(x.to(torch.float8_e4m3fn) for x in (problem.kv.k_cache, problem.kv.v_cache)), scale, scale)
    times = {"bf16, ms": graph_ms(problem.launches(problem.spec())[1]["all"])}
    problem = dataclasses.replace(problem, kv=kv)
    times["float8, ms"] = graph_ms(problem.launches(problem.spec())[1]["all"])
    return times


def bench_copies(copy_tb_s: float) -> dict[str, float]:
    """store_kv and copy_turned against copy bandwidth; unturned decode against turned."""
    results = {}
    num_slots, count = 1 << 18, 1 << 17
    k, v = (torch.randn(num_slots // 16, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    index = torch.arange(count, device=DEVICE)
    deltas = torch.randint(0, 32768, (256,), device=DEVICE).repeat_interleave(count // 256)
    num_bytes = 2 * count * 8 * 128 * 2 * 2
    turns = rotary()
    order = torch.randperm(count // 16, device=DEVICE)
    scattered = (order[:, None] * 16 + torch.arange(16, device=DEVICE)).view(-1)
    for name, sources in (("contiguous", index), ("scattered blocks", scattered)):
        ms = graph_ms(lambda sources=sources: copy_turned(k, v, sources, index + count, deltas, turns), 10)
        results[f"copy_turned, {name}, of copy bandwidth"] = num_bytes / ms / 1e9 / copy_tb_s
    new_k, new_v = (torch.randn(count, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ms = graph_ms(lambda: store_kv(new_k, new_v, k, v, index), 10)
    results["store_kv, of copy bandwidth"] = num_bytes / ms / 1e9 / copy_tb_s
    few_k, few_v = new_k[:64], new_v[:64]
    results["store_kv, 64 tokens, ms"] = graph_ms(lambda: store_kv(few_k, few_v, k, v, index[:64]))
    requests = zipf_requests(64, 10, 1000, 0.0)
    unturned = make_problem(requests, 1000, 512, keys_turned=False)
    _, launches = unturned.launches(unturned.spec())
    results["decode over unturned keys, 64 requests, uniform, ms"] = graph_ms(launches["all"])
    return results


@torch.inference_mode()  # as the engine plans
def bench_plan() -> dict[str, float]:
    """Host time of planning 256 requests x 20 documents, decoding one token each."""
    rng = np.random.default_rng(0)
    builder = PlanBuilder(block_size=BLOCK_SIZE, device=DEVICE)
    chunks = np.array([builder.add_range(range(i * 32, i * 32 + 32), 512, 0) for i in range(1000)])
    requests, positions, slots = [], [], []
    for request in range(256):
        chosen = rng.choice(1000, 20, replace=False)
        first = 40000 + request * 16
        text = builder.add_range(range(first, first + 5), 70, 20 * 512, max_tokens=256)
        requests.append(RequestRows(np.append(chunks[chosen], text), np.append(np.arange(20) * 512, 0)))
        positions.append(20 * 512 + 69)
        slots.append((first + 4) * BLOCK_SIZE + 5)
    lens, positions_, slots_ = np.ones(256, np.int64), np.array(positions), np.array(slots)
    tiles = tiles_for(DEVICE, 128, torch.bfloat16)
    spec = LayoutSpec(
        8, 4, BLOCK_SIZE, None, tiles.decode_few, tiles.decode_many, tiles.decode_unturned, tiles.prefill,
        tiles.prefill_unturned, 132, 16,
    )  # fmt: skip

    def step() -> None:
        builder.plan(builder.step(requests, lens, positions_, slots_)).device_plan(spec)

    def change() -> None:
        """One request leaves, one comes."""
        requests.append(requests.pop(int(rng.integers(256))))
        builder._structure_changed = True

    def step_anew() -> None:
        change()
        step()

    def collect() -> None:
        change()
        builder.step(requests, lens, positions_, slots_)

    step_anew()
    arrays = builder.step(requests, lens, positions_, slots_).arrays
    layout = lay_out(arrays, positions_, spec)
    packed = pack(layout, None)
    flat = send(packed.flat, DEVICE)
    pieces: dict[str, Callable[[], object]] = {
        "another batch": step_anew,
        "same batch, one token on": step,
        "of it: layout": lambda: lay_out(arrays, positions_, spec),
        "of it: packing": lambda: pack(layout, None),
        "of it: collecting rows": collect,
        "of it: sending": lambda: send(packed.flat, DEVICE),
        "of it: views": lambda: packed.plan(flat, builder.blocks, spec),
    }
    return host_ms(pieces, 200) | {"tasks": len(layout.decode[0].few) + len(layout.decode[0].many)}


def bench_run() -> dict[str, float]:
    """Host and device time of one layer's whole `run` for a decode step: store, attend, merge."""
    problem = make_problem(zipf_requests(64, 10, 1000, 1.0), 1000, 512)
    plan = plan_of_arrays(
        problem.arrays, problem.positions, np.arange(64), block_size=BLOCK_SIZE, store_turns=None, device=DEVICE
    )
    kv = problem.kv
    metadata = AttentionMetadata(plan, [(kv.k_cache, kv.v_cache)], [problem.rotary])
    k = torch.randn(64, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    options = AttendOptions(128**-0.5)

    def layer() -> torch.Tensor:
        return run_kernels(problem.q, k, k, metadata, 0, options, None)

    layer()
    torch.cuda.synchronize()
    host = host_ms({"run: host": layer})
    torch.cuda.synchronize()
    return host | {"run: device, ms": graph_ms(layer)}


def sweep_decode(head_dim: int, kind: str, shapes: Sequence[TileShape], deadline: float) -> list[dict]:
    """Time shared_decode under tile shapes for ranges with few rows (kind "decode_few") or with many."""
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": head_dim}
    problems = {"256 requests, zipf 1.0": make_problem(zipf_requests(256, 10, 1000, 1.0), 1000, 512, **heads)}
    if kind == "decode_few":
        problems["64 requests, uniform"] = make_problem(zipf_requests(64, 10, 1000, 0.0), 1000, 512, **heads)
    results = []
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        row: dict = dataclasses.asdict(shape)
        for name, problem in problems.items():
            try:
                _, launches = problem.launches(problem.spec(**{kind: shape}))
                row[name] = graph_ms(launches["attend"], 10)
            except Exception as error:  # a shape that does not fit is a result, too
                row[name] = repr(error)[:60]
        results.append(row)
    return results


def sweep_prefill(head_dim: int, shapes: Sequence[TileShape], deadline: float) -> list[dict]:
    """Time chunk_prefill under tile shapes."""
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": head_dim}
    problems = {
        "512x16K": prefill_problem(512, 16384, **heads),  # type: ignore[arg-type]
        "2048x16K": prefill_problem(2048, 16384, **heads),  # type: ignore[arg-type]
    }
    results = []
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        row: dict = dataclasses.asdict(shape)
        for name, problem in problems.items():
            try:
                _, launches = problem.launches(problem.spec(prefill=shape, has_unmasked_prefill=False))
                row[name] = problem.flops / graph_ms(launches["all"], 10) / 1e9
            except Exception as error:  # a shape that does not fit is a result, too
                row[name] = repr(error)[:60]
        results.append(row)
    return results


def decode_shapes(head_dim: int, kind: str) -> list[TileShape]:
    """Return tile shapes worth trying for shared_decode."""
    if kind == "decode_few":
        keys = {64: (64, 128), 128: (32, 64, 128), 256: (32, 64)}[head_dim]
        return [TileShape(16, n, warps, stages) for n in keys for warps in (2, 4) for stages in (2, 3)]
    keys = {64: (64, 128), 128: (32, 64), 256: (32,)}[head_dim]
    return [
        TileShape(m, n, 4, stages, programs)
        for m in (32, 64)
        for n in keys
        for stages in (2, 3)
        for programs in (0, 1, 2)
        if (m + n * 2 * stages) * head_dim * 2 * max(1, programs) <= 220 * 1024
    ]


def prefill_shapes(head_dim: int) -> list[TileShape]:
    """Return tile shapes worth trying for chunk_prefill."""
    return [
        TileShape(m, n, warps, stages)
        for m, warps in ((64, 4), (64, 8), (128, 8))
        for n in (32, 64, 128)
        for stages in (2, 3, 4)
        if (m + n * 2 * stages) * head_dim * 2 <= 220 * 1024
    ]


def host_name() -> str:
    """Return the processor's name, for plan costs."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'} x {os.cpu_count()}"
