# SPDX-License-Identifier: Apache-2.0
"""Choose what decode takes from `ops/_tiles.py` for head_dim 128 on this GPU: check all candidates, time them, print the best.

    PYTHONPATH=src python3 benchmarks/tune_ops.py --out tune.json [--parts decode,prefill] [--seconds 85]

Candidates are compiled by all cores at once. Each is held to attention in float64 over fresh random numbers, on poisoned
outputs; one that is wrong is not timed. Times are medians of CUDA graph replays, all candidates and the stock kernel by
turns. A graph holds several layers with a KV cache each, as a model's does: what one layer leaves in the L2 cache is of no
use to the next. docs/kernels.md says what bounds which case.
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bench_ops
import gpu_all
import numpy as np
import torch
from bench_ops import DEVICE, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lazyattention.ops import LayerRotary
from lazyattention.ops._tiles import MERGE_WARPS, SIDE_PRIORITY, TileShape, tiles_for
from lazyattention.ops.attend import AttendOptions
from lazyattention.ops.device_plan import DevicePlan, build_device_plan
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import turn, turn_table
from lazyattention.ops.shared_decode import shared_decode, shared_decodes

NUM_LAYERS = 4
NO_TURN = LayerRotary(None, 0)
# A worse error than rounding of bfloat16 explains.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class DecodeSetting:
    """Everything about a decode step that can be chosen without changing what it computes."""

    few: TileShape
    many: TileShape
    merge_warps: int = MERGE_WARPS
    priority: int = SIDE_PRIORITY

    def name(self) -> str:
        few, many = shape_name(self.few), shape_name(self.many)
        return f"few {few}, many {many}, merge warps {self.merge_warps}, priority {self.priority}"


def shape_name(shape: TileShape | int) -> str:
    """Return the fields of a shape, short."""
    return "(" + ",".join(map(str, dataclasses.astuple(shape))) + ")" if isinstance(shape, TileShape) else str(shape)


TILES = (
    tiles_for(torch.device("cuda"), 128, torch.bfloat16)
    if torch.cuda.is_available()
    else tiles_for(DEVICE, 128, torch.bfloat16)
)
# Programs that fit a multiprocessor are limited by registers (65,536), then by shared memory (227 KB).
FEW = [
    TILES.decode_few,
    TileShape(16, 64, 4, 2),  # 4 programs
    TileShape(16, 32, 2, 2),  # 6
    TileShape(16, 32, 2, 2, max_registers=112),  # 9
]
MANY = [
    TILES.decode_many,
    TileShape(64, 64, 4, 2, 1),
    TileShape(64, 64, 4, 2, 2, max_registers=168),  # 2, and 2 beside them over few rows
    TileShape(64, 128, 4, 2, 1),
    TileShape(64, 32, 4, 2, 2, max_registers=168),  # 2, and 3 beside them
    TileShape(64, 32, 4, 2, 2, max_registers=144),  # 2, and 4
    TileShape(64, 32, 4, 2, 2, max_registers=128),  # 2, and 4, with more registers in memory
    TileShape(64, 32, 4, 2, 3, max_registers=144),  # 3, and 1
    TileShape(64, 32, 4, 2, 3, max_registers=128),  # 3, and 2
]
MERGE_WARPS_TRIED = [MERGE_WARPS, 1, 2]


# One layer's launches.


def make_states(problem: Problem, plan: DevicePlan) -> tuple[torch.Tensor, PartialStates]:
    """Return poisoned memory for outputs and partial states."""
    num_heads, head_dim = problem.q.shape[1:]
    out = torch.full_like(problem.q, float("nan"))
    outputs = torch.full((plan.num_parts, num_heads, head_dim), float("nan"), dtype=out.dtype, device=DEVICE)
    return out, PartialStates(outputs, torch.full((plan.num_parts, num_heads), float("nan"), device=DEVICE))


def launch_of(shape: TileShape) -> str:
    """Return which of a step's launches has this shape."""
    return "many" if shape.programs_per_multiprocessor else "few"


def merge(plan: DevicePlan, states: PartialStates, out: torch.Tensor, num_warps: int = MERGE_WARPS) -> None:
    """Merge the parts of a step."""
    from lazyattention.ops.merge_states.kernel import merge_parts_triton

    merge_parts_triton(
        states.outputs,
        states.lses,
        out,
        plan.num_merges,
        plan.merge_tokens,
        plan.merge_starts,
        num_warps=num_warps,
    )


def decode_layer(
    problem: Problem, setting: DecodeSetting, rotary: LayerRotary, parts: str = "all"
) -> tuple[torch.Tensor, Callable[[LayerKV], None]]:
    """Return the output and one layer's launches; `parts`: "all", "attend" without the merge, "few" or "many" rows."""
    spec = problem.spec(decode_few=setting.few, decode_many=setting.many)
    plan = build_device_plan(problem.arrays, problem.positions, spec, DEVICE)
    decode = [tasks for tasks in plan.decode if parts in ("all", "attend", launch_of(tasks.shape))]
    out, states = make_states(problem, plan)
    positions = torch.from_numpy(problem.positions).to(DEVICE)
    options = AttendOptions(128**-0.5)

    def launch(kv: LayerKV) -> None:
        shared_decodes(problem.q, kv, decode, positions, states, rotary, options, side_priority=setting.priority)
        if parts == "all":
            merge(plan, states, out, setting.merge_warps)

    return out, launch


def prefill_layer(problem: Problem, rotary: LayerRotary) -> tuple[torch.Tensor, Callable[[LayerKV], None]]:
    """Return the output and one layer's launches over chunks only: the kernel for tiles without a mask, and the merge."""
    plan = build_device_plan(problem.arrays, problem.positions, problem.spec(), DEVICE)
    (tasks,) = plan.prefill
    assert len(tasks.apart)
    assert not len(tasks.tasks)
    assert not plan.decode
    out, states = make_states(problem, plan)
    options = AttendOptions(128**-0.5)

    def launch(kv: LayerKV) -> None:
        from lazyattention.ops.chunk_prefill.hopper.kernel import unmasked_prefill_hopper

        unmasked_prefill_hopper(problem.q, kv, tasks, out, states, rotary, options)
        merge(plan, states, out)

    return out, launch


# Checks.


def exact_output(problem: Problem) -> torch.Tensor:
    """Attention in float64: every key turned to where it stands, every token sees those at or before its position."""
    arrays, q = problem.arrays, problem.q.double()
    num_kv_heads, head_dim = problem.kv.k_cache.shape[2:]
    group = q.shape[1] // num_kv_heads
    positions = torch.from_numpy(problem.positions).to(DEVICE)
    blocks = torch.from_numpy(arrays.blocks).to(DEVICE).long()
    seen: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    columns = (arrays.group_ranges, arrays.group_starts, arrays.group_sizes, arrays.group_deltas)
    for kv_range, start, size, delta in zip(*(column.tolist() for column in columns), strict=True):
        index = torch.arange(int(arrays.range_tokens[kv_range]), device=DEVICE)
        slots = blocks[int(arrays.range_tables[kv_range]) + index // bench_ops.BLOCK_SIZE] * bench_ops.BLOCK_SIZE
        slots += index % bench_ops.BLOCK_SIZE
        k, v = (
            cache.reshape(-1, num_kv_heads, head_dim)[slots].double()
            for cache in (problem.kv.k_cache, problem.kv.v_cache)
        )
        k = turn(k, *turn_table(problem.rotary.inv_freq, delta + 0 * index, torch.float64), problem.rotary)
        rows = slice(start, start + size)
        scores = torch.einsum("mhd,nhd->mhn", q[rows], k.repeat_interleave(group, 1)) * head_dim**-0.5
        stands = int(arrays.range_firsts[kv_range]) + delta + index
        hidden = stands[None, None, :] > positions[rows, None, None]
        seen.setdefault((start, size), []).append((scores.masked_fill(hidden, float("-inf")), v))
    out = torch.zeros_like(q)
    for (start, size), parts in seen.items():
        weights = torch.cat([scores for scores, _ in parts], dim=2).softmax(-1)
        values = torch.cat([v for _, v in parts]).repeat_interleave(group, 1)
        out[start : start + size] = torch.einsum("mhn,nhd->mhd", weights, values)
    return out


def error_of(
    problem: Problem, layer: Callable[..., tuple[torch.Tensor, Callable[[LayerKV], None]]], *setting: object
) -> float:
    """Return ‖out − exact‖ / ‖exact‖ over fresh random queries, keys and values."""
    for tensor in (problem.q, problem.kv.k_cache, problem.kv.v_cache):
        tensor.normal_()
    out, launch = layer(problem, *setting, problem.rotary)
    launch(problem.kv)
    want = exact_output(problem)
    return float((out.double() - want).norm() / want.norm())


def check_problem(num_requests: int = 44, chunk_len: int = 320) -> Problem:
    """Requests that share one chunk all, another half of them, and two of thirty each; texts end inside tiles."""
    rng = np.random.default_rng(1)
    requests = []
    for index in range(num_requests):
        shared = [0] + [1] * (index % 2)
        others = (2 + rng.choice(30, 2, replace=False)).tolist()
        requests.append((shared + others, int(rng.integers(0, 90)), 1))
    return bench_ops.make_problem(requests, 32, chunk_len)


# Compiling, in processes of their own.


def compile_one(kind: str, shape: TileShape | int, is_turned: bool) -> tuple[float, str]:
    """Launch one kernel on a small problem, so that its binary is in Triton's cache; return seconds, and what failed.

    `shape`: tiles; of a merge its warps; of "unmasked", which has one, 0.
    """
    start = time.perf_counter()
    try:
        if kind == "unmasked":
            problem = bench_ops.prefill_problem(64, 1024)
            prefill_layer(problem, problem.rotary if is_turned else NO_TURN)[1](problem.kv)
        elif kind == "merge":
            problem = bench_ops.make_problem([((0, 1), 3, 1)], 2, 64)
            plan = build_device_plan(problem.arrays, problem.positions, problem.spec(), DEVICE)
            out, states = make_states(problem, plan)
            merge(plan, states, out, shape)  # type: ignore[arg-type]
        else:
            problem = bench_ops.make_problem([((0, 1), 3, 1)] * 40, 2, 512)
            spec = problem.spec(**{kind: shape})
            plan = build_device_plan(problem.arrays, problem.positions, spec, DEVICE)
            _, states = make_states(problem, plan)
            positions = torch.from_numpy(problem.positions).to(DEVICE)
            rotary = problem.rotary if is_turned else NO_TURN
            for tasks in plan.decode[int(kind == "decode_few") :][:1]:
                shared_decode(problem.q, problem.kv, tasks, positions, states, rotary, AttendOptions(128**-0.5))
        torch.cuda.synchronize()
    except Exception as error:  # a shape that does not fit is a result, too
        return time.perf_counter() - start, repr(error)[:150]
    return time.perf_counter() - start, ""


# Timing.


class Timer:
    """Times launches by turns, so that whatever drifts drifts for all of them."""

    def __init__(self, kvs: list[LayerKV]) -> None:
        self.kvs = kvs

    def capture(self, launch: Callable[[LayerKV], None], num_layers: int) -> torch.cuda.CUDAGraph:
        """Return a graph of several layers; `torch.cuda.graph` would collect garbage each time, slower than all the rest."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launch(self.kvs[0])
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                for layer in range(num_layers):
                    launch(self.kvs[layer % len(self.kvs)])
            finally:
                graph.capture_end()
        return graph

    def samples(
        self, launches: dict[str, Callable[[LayerKV], None]], rounds: int, num_layers: int = NUM_LAYERS
    ) -> dict[str, list[float]]:
        """Return milliseconds a layer, one number a round; launches that fail are left out."""
        graphs, times = {}, {}
        for name, launch in launches.items():
            try:
                graphs[name] = self.capture(launch, num_layers)
            except Exception as error:  # a candidate that cannot be captured must not cost the others
                print(f"  {name}: {error!r}"[:200], flush=True)
        for graph in graphs.values():
            graph.replay()
        events = {
            name: [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(rounds)]
            for name in graphs
        }
        for index in range(rounds):
            for name, graph in graphs.items():
                start, end = events[name][index]
                start.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize()
        for name, pairs in events.items():
            times[name] = [start.elapsed_time(end) / num_layers for start, end in pairs]
        return times

    def medians(
        self, launches: dict[str, Callable[[LayerKV], None]], rounds: int, num_layers: int = NUM_LAYERS
    ) -> dict:
        """Return the median of each launch's samples."""
        return {name: statistics.median(x) for name, x in self.samples(launches, rounds, num_layers).items()}


class Tuning:
    """One run: its clock, its compilers, its results."""

    def __init__(self, out: Path, seconds: float, pool: object) -> None:
        self.out, self.start, self.seconds, self.pool = out, time.monotonic(), seconds, pool
        self.results: dict = {}
        self.pending: dict = {}
        self.table: list[str] = []

    def mark(self, what: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f} s] {what}", flush=True)
        self.out.write_text(json.dumps(self.results, indent=1))

    def has_time(self, needed_s: float, what: str) -> bool:
        """Return whether there is time for this; say so if not."""
        if time.monotonic() - self.start + needed_s < self.seconds:
            return True
        self.table.append(f"no time left for: {what}")
        return False

    def compile(self, kind: str, shape: TileShape | int, is_turned: bool = True) -> None:
        """Start compiling, once."""
        key = (kind, shape, is_turned)
        if key not in self.pending:
            self.pending[key] = self.pool.apply_async(compile_one, key)  # type: ignore[attr-defined]

    def works(self, kind: str, shape: TileShape | int, is_turned: bool = True) -> bool:
        """Wait until it is compiled; return whether it could be."""
        self.compile(kind, shape, is_turned)
        left = max(1.0, self.seconds - (time.monotonic() - self.start))
        try:
            seconds, trouble = self.pending[kind, shape, is_turned].get(left)
        except multiprocessing.TimeoutError:
            seconds, trouble = left, "not done in time"
        self.results.setdefault("compiled_s", {})[f"{kind} {shape_name(shape)} {is_turned}"] = trouble or round(
            seconds, 1
        )
        return not trouble


def decode_problems() -> dict[str, Problem]:
    """Return the steps decode is tuned for, and two uniform ones, which must not get slower."""
    problems = {}
    for num_requests, alpha in ((64, 1.0), (256, 1.0), (256, 1.2), (64, 0.0), (256, 0.0)):
        requests = bench_ops.zipf_requests(num_requests, 10, 1000, alpha)
        problems[f"{num_requests} a={alpha}"] = bench_ops.make_problem(requests, 1000, 512)
    # All steps use the same memory: the largest one's.
    largest = max(problems.values(), key=lambda problem: len(problem.kv.k_cache))
    return {name: replace(problem, kv=largest.kv) for name, problem in problems.items()}


def tune_decode(run: Tuning, *, as_is: bool = False) -> None:
    """Choose tiles, then, with the best, one thing after the other; `as_is`: nothing, only time what the table has."""
    small = check_problem()
    problems = decode_problems()
    zipf = [name for name in problems if not name.endswith("a=0.0")]
    kv = problems[zipf[0]].kv
    kvs = [kv] + [LayerKV(torch.randn_like(kv.k_cache), torch.randn_like(kv.v_cache)) for _ in range(NUM_LAYERS - 1)]
    timer = Timer(kvs)
    floors = {
        name: problem.unique_bytes / run.results["ceilings"]["read_tb_s"] / 1e9 for name, problem in problems.items()
    }
    baseline = DecodeSetting(TILES.decode_few, TILES.decode_many)
    verdicts: dict[tuple[str, object], bool] = {}
    run.results["decode"] = {"floor_ms": floors, "errors": {}, "stages": {}}

    def is_right(setting: DecodeSetting) -> bool:
        kernels = (("decode_few", setting.few), ("decode_many", setting.many), ("merge", setting.merge_warps))
        if not all(run.works(*kernel) for kernel in kernels):
            return False
        # Settings come so that one thing is new at a time: it is what the verdict is about.
        things = [(field.name, getattr(setting, field.name)) for field in dataclasses.fields(setting)]
        new = [thing for thing in things if thing not in verdicts]
        if new:
            error = run.results["decode"]["errors"][setting.name()] = error_of(small, decode_layer, setting)
            verdicts.update(dict.fromkeys(new, error < TOLERANCE))
            if not error < TOLERANCE:
                run.table.append(f"WRONG, not timed: {setting.name()}, error {error:.3g}")
        return all(verdicts[thing] for thing in things)

    def compare(stage: str, settings: list[DecodeSetting], names: list[str], rounds: int) -> DecodeSetting:
        """Time settings over the steps; return the best, or the first where none is clearly better."""
        settings = [setting for setting in dict.fromkeys(settings) if is_right(setting)]
        by_name = {setting.name(): setting for setting in settings}
        times: dict[str, dict[str, float]] = {}
        for name in names:
            launches = {key: decode_layer(problems[name], s, problems[name].rotary)[1] for key, s in by_name.items()}
            times[name] = timer.medians(launches, rounds)
            gc.collect()
        run.results["decode"]["stages"][stage] = times
        complete = [key for key in by_name if all(key in row for row in times.values())]
        scores = {key: statistics.mean(times[name][key] / floors[name] for name in names) for key in complete}
        ranked = sorted(scores, key=scores.__getitem__)
        for key in ranked[:4]:
            share = "  ".join(f"{floors[name] / times[name][key]:.1%}" for name in names)
            print(f"  {share}  {key}", flush=True)
        first = settings[0].name()
        best = ranked[0] if scores[ranked[0]] < scores.get(first, float("inf")) * 0.995 else first
        run.mark(f"decode, {stage}: {len(complete)} settings; best {best}")
        return by_name[best]

    best = baseline
    if as_is and not is_right(baseline):
        run.table.append("decode: what the table has is wrong or does not compile: not timed")
        return
    if not as_is:
        fews = [shape for shape in FEW if run.works("decode_few", shape)]
        manys = [shape for shape in MANY if run.works("decode_many", shape)]
        settings = [replace(baseline, few=few, many=many) for few in fews for many in manys]
        best = compare("tiles", settings, zipf, 7)
        stages: list[tuple[str, Callable[[DecodeSetting], list[DecodeSetting]]]] = [
            ("priority", lambda s: [replace(s, priority=-1 - s.priority)]),
            ("merge", lambda s: [replace(s, merge_warps=num_warps) for num_warps in MERGE_WARPS_TRIED]),
            ("tiles again", lambda s: [replace(s, few=few) for few in fews] + [replace(s, many=many) for many in manys]),
        ]  # fmt: skip
        for stage, candidates in stages:
            if run.has_time(12, f"decode, {stage}"):
                best = compare(stage, [best, *candidates(best)], [*zipf, "64 a=0.0"], 15)
    run.results["decode"]["best"] = dataclasses.asdict(best)
    run.table.append(f"decode, best: {best.name()}")
    for setting in (baseline, best):
        run.compile("decode_few", setting.few, is_turned=False)
        run.compile("decode_many", setting.many, is_turned=False)
    rows = run.results["decode"]["final"] = {}
    for name, problem in problems.items():
        launches, unturned = {}, {}
        for key, setting in (("before", baseline), ("best", best)):
            launches[key] = decode_layer(problem, setting, problem.rotary)[1]
            for parts in ("attend", "few", "many") if name in zipf else ("attend",):
                launches[f"{key}, {parts}"] = decode_layer(problem, setting, problem.rotary, parts)[1]
            if all(
                run.works(kind, shape, False)
                for kind, shape in (("decode_few", setting.few), ("decode_many", setting.many))
            ):
                unturned[key] = decode_layer(problem, setting, NO_TURN)[1]
        row = timer.medians(launches, 20)
        row["best, single layer"] = timer.medians({"best": launches["best"]}, 20, 1).get("best", float("nan"))
        for key, launch in unturned.items():
            row[f"{key}, turn"] = turn_cost(timer, launches[key], launch)
        rows[name] = row
        cells = [f"floor {floors[name]:.4f} ms"]
        for key in ("before", "best"):
            ms, attend = row[key], row[f"{key}, attend"]
            alone = "".join(f", {part} alone {row[f'{key}, {part}']:.4f}" for part in ("few", "many") if name in zipf)
            turn_share = row.get(f"{key}, turn", float("nan"))
            cells.append(
                f"{key} {ms:.4f} ({floors[name] / ms:.1%}; merge {ms - attend:.4f}{alone}, turn {turn_share:.2%})"
            )
        cells.append(f"best as a graph of its own {row['best, single layer']:.4f}")
        run.table.append(f"decode {name:>9}: {'; '.join(cells)}")
    run.mark("decode, before and after")


def turn_cost(
    timer: Timer, turned: Callable[[LayerKV], None], unturned: Callable[[LayerKV], None], rounds: int = 30
) -> float:
    """Return the median, over pairs of neighbours in time, of what turning adds, as a share."""
    samples = timer.samples({"turned": turned, "unturned": unturned}, rounds)
    return statistics.median(a / b - 1 for a, b in zip(samples["turned"], samples["unturned"], strict=True))


def time_prefill(run: Tuning) -> None:
    """Time the kernel for tiles without a mask against torch's on contiguous KV, and what turning costs it."""
    small = bench_ops.prefill_problem(200, 4096)
    if not run.works("unmasked", 0):
        run.table.append("prefill does not compile: not timed")
        return
    error = error_of(small, prefill_layer)
    run.results["prefill"] = {"error": error, "times": {}, "turn": {}}
    if not error < TOLERANCE:
        run.table.append(f"prefill is WRONG, not timed: error {error:.3g}")
        return
    shapes = ((512, 8192), (512, 32768), (2048, 8192), (2048, 32768), (2048, 65536))
    for rows, num_keys in shapes:
        problem = bench_ops.prefill_problem(rows, num_keys)
        q = problem.q.transpose(0, 1)[None].contiguous()
        k, v = (torch.randn(1, 8, num_keys, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

        def stock(_: LayerKV, q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                scaled_dot_product_attention(q, k, v, enable_gqa=True)

        launches = {"cuDNN": stock, "ours": prefill_layer(problem, problem.rotary)[1]}
        times = Timer([problem.kv]).medians(launches, 9 if num_keys > 8192 else 15)
        run.results["prefill"]["times"][f"{rows} x {num_keys}"] = times
        if len(times) == len(launches):
            share = times["cuDNN"] / times["ours"]
            run.table.append(f"prefill {rows} x {num_keys}: cuDNN {times['cuDNN']:.4f} ms; of it {share:.1%}")
            run.mark(run.table[-1])
    if run.has_time(4, "cost of the turn in prefill") and run.works("unmasked", 0, False):
        for rows, num_keys in shapes[1:4]:
            problem = bench_ops.prefill_problem(rows, num_keys)
            turned, unturned = (prefill_layer(problem, rotary)[1] for rotary in (problem.rotary, NO_TURN))
            cost = turn_cost(Timer([problem.kv]), turned, unturned, 15)
            run.results["prefill"]["turn"][f"{rows} x {num_keys}"] = cost
            run.table.append(f"prefill {rows} x {num_keys}: turn {cost:.2%}")
    run.mark("prefill")


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="prefill,decode")
    parser.add_argument("--seconds", type=float, default=85.0, help="later steps are left out rather than exceed this")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--as-is", action="store_true", help="time what the table has, try nothing else")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        run = Tuning(arguments.out, arguments.seconds, pool)
        if "prefill" in parts:
            run.compile("unmasked", 0)
            run.compile("merge", MERGE_WARPS)
        if "decode" in parts:
            for kind, shapes in (("decode_many", MANY), ("decode_few", FEW), ("merge", MERGE_WARPS_TRIED)):
                for shape in shapes[:1] if arguments.as_is else shapes:  # type: ignore[index]
                    run.compile(kind, shape)
        # Nothing is timed while other processes use the GPU.
        for key in list(run.pending):
            run.works(*key)
        run.mark(f"compiled {len(run.pending)} kernels")
        run.results["provenance"] = gpu_all.provenance()
        run.results["ceilings"] = bench_ops.ceilings()
        run.mark(f"{run.results['provenance']['gpu']}, {run.results['ceilings']}")
        if "prefill" in parts:
            time_prefill(run)
        if "decode" in parts:
            torch.cuda.empty_cache()
            tune_decode(run, as_is=arguments.as_is)
        pool.terminate()
    print("\n".join(run.table))
    run.mark("done")


if __name__ == "__main__":
    main()
