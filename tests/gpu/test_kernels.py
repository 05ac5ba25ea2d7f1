"""The compiled kernels on a GPU: ragged random steps against float64, poisoned outputs, no host synchronisation."""

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
import torch

from lazyattention.ops import AttentionMetadata, KVRange, LayerRotary, RowGroup, make_plan, run
from lazyattention.ops.attend import AttendOptions
from lazyattention.ops.attention import layout_spec
from lazyattention.ops.layer_kv import LayerKV
from lazyattention.ops.merge_states import merge_states
from lazyattention.ops.merge_states.reference import merge_states_reference
from lazyattention.ops.rotary import turn, turn_table
from lazyattention.ops.rotate import copy_turned
from lazyattention.ops.static_plan import StaticCapacity, StaticPlan
from lazyattention.ops.store_kv import store_kv
from tests.ops.decoding import Decoding
from tests.ops.layouts import rotary_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclasses.dataclass
class Case:
    """A random step on the GPU with everything needed to recompute it densely."""

    plan: object
    q: torch.Tensor
    new_k: torch.Tensor
    new_v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    groups: list  # (slots of all keys, stored positions, is_turned, token_start, num_tokens, delta)
    positions: torch.Tensor


def random_case(
    seed, *, chunk_lens, queries, num_q_heads, num_kv_heads, head_dim, dtype, block_size=16, keys_turned=True,
    contiguous=False, far=0,
):  # fmt: skip
    """As tests.ops.layouts.random_step, on the GPU, with the own text's new keys stored by the step itself."""
    rng = np.random.default_rng(seed)
    num_blocks = (
        64 + sum(-(-n // block_size) + 1 for n in chunk_lens) + sum(-(-(a + b) // block_size) + 1 for a, b in queries)
    )
    free = list(range(num_blocks)) if contiguous else rng.permutation(num_blocks).tolist()

    def take(num_tokens):
        count = -(-num_tokens // block_size)
        taken, free[:count] = free[:count], []
        return taken

    def slots_of(blocks, count):
        index = np.arange(count)
        return (
            np.asarray(blocks, dtype=np.int64)[index // block_size] * block_size + index % block_size
            if count
            else index
        )

    base = 3
    chunks = [KVRange(("chunk", i), take(n), n, base, keys_turned) for i, n in enumerate(chunk_lens)]
    ranges, groups, dense, positions, slots = list(chunks), [], [], [], []
    for request, (num_before, num_new) in enumerate(queries):
        token_start, start = len(positions), base + far
        for index in rng.permutation(len(chunks)):
            chunk, delta = chunks[index], start - base
            groups.append(RowGroup(int(index), token_start, num_new, delta))
            dense.append((slots_of(chunk.block_ids, chunk.num_tokens), base, keys_turned, token_start, num_new, delta))
            start += chunk.num_tokens
        text = KVRange(("text", request), take(num_before + num_new), num_before + num_new, start)
        text_slots = slots_of(text.block_ids, text.num_tokens)
        groups.append(RowGroup(len(ranges), token_start, num_new, 0))
        dense.append((text_slots, start, True, token_start, num_new, 0))
        ranges.append(text)
        positions += range(start + num_before, start + num_before + num_new)
        slots += text_slots[num_before:].tolist()
    plan = make_plan(np.array(positions), np.array(slots), ranges, groups, block_size=block_size, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    count = len(positions)
    return Case(
        plan, normal(count, num_q_heads, head_dim), normal(count, num_kv_heads, head_dim),
        normal(count, num_kv_heads, head_dim), normal(*shape), normal(*shape), dense,
        torch.tensor(positions, device="cuda"),
    )  # fmt: skip


def oracle(case, rotary, softmax_scale, window=None, softcap=None, sinks=None, kv_scales=None):
    """Dense attention in float64 on the GPU at true positions; keys are turned, queries are left alone."""
    k_cache, v_cache = (cache.flatten(0, 1).float().double() for cache in (case.k_cache, case.v_cache))
    if kv_scales is not None:
        k_cache, v_cache = k_cache * kv_scales[0][:, None], v_cache * kv_scales[1][:, None]
    group = case.q.shape[1] // k_cache.shape[1]
    out = torch.zeros(*case.q.shape[:2], v_cache.shape[2], dtype=torch.float64, device="cuda")
    by_run = {}
    for entry in case.groups:
        by_run.setdefault((entry[3], entry[4]), []).append(entry)
    for (token_start, num_tokens), entries in by_run.items():
        ks, vs, stands = [], [], []
        for slots, base, is_turned, _, _, delta in entries:
            slots = torch.as_tensor(slots, device="cuda")
            where = torch.arange(len(slots), device="cuda") + base + delta
            k = k_cache[slots]
            amount = torch.full_like(where, delta) if is_turned else where
            if rotary.inv_freq is not None:
                k = turn(k, *turn_table(rotary.inv_freq, amount, torch.float64), rotary)
            ks.append(k)
            vs.append(v_cache[slots])
            stands.append(where)
        k, v = (torch.cat(x).repeat_interleave(group, 1) for x in (ks, vs))
        rows = slice(token_start, token_start + num_tokens)
        scores = torch.einsum("thd,nhd->htn", case.q[rows].double(), k) * softmax_scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = case.positions[rows, None] - torch.cat(stands)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        scores.masked_fill_(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)), -1)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        out[rows] = torch.einsum("htn,nhd->thd", scores.softmax(-1), v)
    return out


@contextlib.contextmanager
def poisoned():
    """Inside the block new memory is full of NaN (also in replays of what is captured), and no less usable."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_case(case, rotary, softmax_scale, window=None, softcap=None, sinks=None, kv_scales=None):
    scales = None if kv_scales is None else [kv_scales]
    metadata = AttentionMetadata(case.plan, [(case.k_cache, case.v_cache)], [rotary], scales)
    with poisoned():
        return run(
            case.q, case.new_k, case.new_v, metadata, 0, softmax_scale=softmax_scale, sliding_window=window,
            logit_softcap=softcap, sinks=sinks,
        )  # fmt: skip


def test_new_memory_is_poisoned():
    with poisoned():
        assert torch.empty(1000, device="cuda").isnan().all()


def on_gpu(rotary):
    return dataclasses.replace(rotary, inv_freq=rotary.inv_freq.cuda())


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


QUERIES = ((0, 1), (7, 1), (300, 1), (0, 3), (20, 200), (0, 57), (500, 130))
CHUNKS = (1, 16, 100, 512, 700, 0, 1300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_ragged_steps(head_dim, dtype):
    group = {64: 1, 80: 3, 96: 16, 128: 4, 256: 7}[head_dim]
    case = random_case(
        head_dim, chunk_lens=CHUNKS, queries=QUERIES, num_q_heads=2 * group, num_kv_heads=2, head_dim=head_dim,
        dtype=dtype, far=150_000,
    )  # fmt: skip
    rotary = on_gpu(rotary_of(head_dim, theta=500000.0))
    got = run_case(case, rotary, head_dim**-0.5)
    assert relative_error(got, oracle(case, rotary, head_dim**-0.5)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("step", "rotary_options", "options"),
    [
        ({}, {"is_interleaved": True}, {}),
        ({}, {"rotary_dim": 32}, {}),
        ({}, {"rotary_dim": 64, "rotary_start": 64}, {}),
        ({}, {}, {"window": 300}),
        ({}, {}, {"window": 1}),
        ({}, {}, {"softcap": 5.0}),
        ({}, {}, {"sinks": True, "window": 128}),
        ({"keys_turned": False}, {}, {}),
        ({"keys_turned": False}, {"is_interleaved": True}, {"sinks": True}),
        ({"contiguous": True}, {}, {"sinks": True}),
        ({"block_size": 64}, {}, {}),
        ({"block_size": 1}, {}, {}),
        ({"chunk_lens": ()}, {}, {}),
        ({"chunk_lens": (512,) * 8, "contiguous": True, "queries": ((0, 64), (0, 2048))}, {}, {}),
    ],
)
def test_variants(step, rotary_options, options):
    arguments = {"chunk_lens": CHUNKS, "queries": QUERIES, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    case = random_case(7, dtype=torch.bfloat16, **{**arguments, **step})
    rotary = on_gpu(rotary_of(128, **rotary_options))
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 6, 8, device="cuda", dtype=torch.bfloat16)
    got = run_case(case, rotary, 0.2, **options)
    assert relative_error(got, oracle(case, rotary, 0.2, **options)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (80, torch.float16), (256, torch.bfloat16)])
@pytest.mark.parametrize(
    ("step", "rotary_options", "options"),
    [
        ({}, {}, {"window": 200, "softcap": 20.0}),
        ({"contiguous": True}, {"is_interleaved": True, "rotary_dim": 32}, {"sinks": True}),
        ({"keys_turned": False}, {}, {"window": 333}),
        ({"keys_turned": False}, {"is_interleaved": True}, {"softcap": 5.0}),
    ],
)
def test_variants_of_other_head_sizes(step, rotary_options, options, head_dim, dtype):
    case = random_case(
        17, chunk_lens=(1, 100, 700, 0, 300), queries=((0, 1), (300, 1), (0, 3), (20, 90), (500, 40)), num_q_heads=6,
        num_kv_heads=2, head_dim=head_dim, dtype=dtype, far=20_000, **step,
    )  # fmt: skip
    rotary = on_gpu(rotary_of(head_dim, **rotary_options))
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 6, 6, device="cuda", dtype=dtype)
    got = run_case(case, rotary, 0.2, **options)
    assert relative_error(got, oracle(case, rotary, 0.2, **options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 7), (128, 3), (128, 8)])
def test_long_contiguous_prefill(head_dim, group, dtype):
    """Most of the work is tiles without a mask: the kernel for them runs, where there is one."""
    case = random_case(
        11, chunk_lens=(512, 1024, 128, 700, 640), queries=((0, 100), (300, 700), (0, 1)), num_q_heads=2 * group,
        num_kv_heads=2, head_dim=head_dim, dtype=dtype, contiguous=True,
    )  # fmt: skip
    rotary = on_gpu(rotary_of(head_dim, theta=500000.0))
    sinks = torch.linspace(-2, 6, 2 * group, device="cuda", dtype=dtype)
    spec = layout_spec(case.q, LayerKV(case.k_cache, case.v_cache), 16, rotary, AttendOptions(0.2))
    assert (case.plan.device_plan(spec).prefill[0].apart.shape[0] > 0) == spec.has_unmasked_prefill
    for _ in range(5):
        got = run_case(case, rotary, 0.2, sinks=sinks)
        assert relative_error(got, oracle(case, rotary, 0.2, sinks=sinks)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("head_dim", "group", "dtype"), [(128, 4, torch.bfloat16), (64, 7, torch.float16)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("chunk_lens", [(), (100, 512)])
def test_cold_prompts_through_stock_kernels(chunk_lens, has_sinks, head_dim, group, dtype):
    """Texts of which nothing is stored: short ones side by side, long ones alone; what they see besides is merged in."""
    case = random_case(
        31, chunk_lens=chunk_lens, queries=((0, 130), (0, 700), (0, 1500), (0, 20), (0, 1024), (40, 200)),
        num_q_heads=2 * group, num_kv_heads=2, head_dim=head_dim, dtype=dtype, far=9_000,
    )  # fmt: skip
    rotary = on_gpu(rotary_of(head_dim, theta=500000.0))
    sinks = torch.linspace(-2, 6, 2 * group, device="cuda", dtype=dtype) if has_sinks else None
    got = run_case(case, rotary, 0.2, sinks=sinks)
    (spec,) = case.plan._device_plans
    lens = [batch.num_tokens for batch in case.plan.device_plan(spec).causal]
    assert lens == ([830, 1500, 1024] if spec.causal_min_tokens else [])
    assert relative_error(got, oracle(case, rotary, 0.2, sinks=sinks)) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("chunk_lens", "is_turned"),
    [
        ((512,) * 3 + (640,) * 3, True),  # a few tiles per segment
        ((128,) * 24, True),  # every tile is a segment: queries are turned as often as keys arrive
        ((4096,), True),  # one segment
        ((512, 128, 1024), False),  # a layer without RoPE
    ],
)
def test_warp_groups_of_long_prefill_never_race(head_dim, chunk_lens, is_turned):
    """Nothing but barriers orders the warp groups, so the same step must give the same bits, time and again."""
    case = random_case(
        21, chunk_lens=chunk_lens, queries=((0, 33), (64, 300)), num_q_heads=8, num_kv_heads=2, head_dim=head_dim,
        dtype=torch.bfloat16, contiguous=True,
    )  # fmt: skip
    rotary = on_gpu(rotary_of(head_dim, theta=500000.0)) if is_turned else LayerRotary(None, 0)
    spec = layout_spec(case.q, LayerKV(case.k_cache, case.v_cache), 16, rotary, AttendOptions(0.2))
    assert (case.plan.device_plan(spec).prefill[0].apart.shape[0] > 0) == spec.has_unmasked_prefill
    first = run_case(case, rotary, 0.2)
    assert relative_error(first, oracle(case, rotary, 0.2)) < TOLERANCE[torch.bfloat16]
    assert all(torch.equal(run_case(case, rotary, 0.2), first) for _ in range(30))


@pytest.mark.parametrize(
    ("head_dim", "options"), [(64, {}), (256, {"window": 200}), (80, {"softcap": 20.0}), (128, {"sinks": True})]
)
@pytest.mark.parametrize("keys_turned", [True, False])
def test_float8_kv_of_other_layers(keys_turned, head_dim, options):
    case = random_case(
        13, chunk_lens=(100, 512, 700), queries=((0, 1), (300, 1), (20, 90)), num_q_heads=6, num_kv_heads=2,
        head_dim=head_dim, dtype=torch.bfloat16, keys_turned=keys_turned,
    )  # fmt: skip
    scales = (torch.tensor([0.02, 0.5], device="cuda"), torch.tensor([0.03, 1.5], device="cuda"))
    case.k_cache, case.v_cache = (
        (cache.float() / scale[:, None]).to(torch.float8_e4m3fn)
        for cache, scale in zip((case.k_cache, case.v_cache), scales, strict=True)
    )
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 6, 6, device="cuda", dtype=torch.bfloat16)
    rotary = on_gpu(rotary_of(head_dim))
    got = run_case(case, rotary, 0.1, kv_scales=scales, **options)
    assert relative_error(got, oracle(case, rotary, 0.1, kv_scales=scales, **options)) < 1e-2


@pytest.mark.parametrize("keys_turned", [True, False])
def test_float8_kv(keys_turned):
    """Against the same quantised KV the kernels are as exact as ever; new keys are quantised by the step."""
    case = random_case(
        12, chunk_lens=CHUNKS, queries=QUERIES, num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16,
        keys_turned=keys_turned, contiguous=True,
    )  # fmt: skip
    exact = dataclasses.replace(case, k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    scales = (torch.tensor([0.02, 0.5], device="cuda"), torch.tensor([0.03, 1.5], device="cuda"))
    caches = [
        (cache.float() / scale[:, None]).to(torch.float8_e4m3fn)
        for cache, scale in zip((case.k_cache, case.v_cache), scales, strict=True)
    ]
    case = dataclasses.replace(case, k_cache=caches[0], v_cache=caches[1])
    rotary = on_gpu(rotary_of(128))
    got = run_case(case, rotary, 0.1, kv_scales=scales)
    assert relative_error(got, oracle(case, rotary, 0.1, kv_scales=scales)) < 1e-2
    run_case(exact, rotary, 0.1)
    assert 1e-2 < relative_error(got, oracle(exact, rotary, 0.1)) < 0.1


def test_layer_without_rope():
    case = random_case(
        8, chunk_lens=CHUNKS, queries=QUERIES, num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16
    )
    rotary = LayerRotary(None, 0)
    assert relative_error(run_case(case, rotary, 0.1), oracle(case, rotary, 0.1)) < 1e-2


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    case = random_case(
        100 + seed,
        chunk_lens=tuple(rng.integers(0, 900, rng.integers(0, 9)).tolist()),
        queries=tuple(
            (int(rng.integers(0, 400)), int(rng.choice([1, 1, 1, 2, 15, 16, 17, 100, 700]))) for _ in range(rng.integers(1, 12))
        ),
        num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, contiguous=bool(seed % 2),
    )  # fmt: skip
    rotary = on_gpu(rotary_of(128))
    assert relative_error(run_case(case, rotary, 0.125), oracle(case, rotary, 0.125)) < 1e-2


def test_no_host_synchronisation_and_same_result_again():
    case = random_case(
        9, chunk_lens=CHUNKS, queries=QUERIES, num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16
    )
    rotary = on_gpu(rotary_of(128))
    first = run_case(case, rotary, 0.1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [run_case(case, rotary, 0.1) for _ in range(3)]
        with pytest.raises(RuntimeError, match="synchronizing"):
            outputs[0].sum().item()  # the mode is really on
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, output) for output in outputs)


def test_captured_graph_replays_changed_plans():
    """One graph, many steps: requests arrive, grow and leave between replays."""
    block_size, num_blocks = 16, 3000
    decoding = Decoding(
        2, block_size=block_size, num_blocks=num_blocks, chunk_lens=(5, 512, 700, 64, 1000), device="cuda",
        table_entries=1 << 14,
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (num_blocks, block_size, 2, 128)
    k_cache, v_cache = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(2))
    bucket = 8
    q = torch.zeros(bucket, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(bucket, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rotary = on_gpu(rotary_of(128))
    spec = layout_spec(q, LayerKV(k_cache, v_cache), block_size, rotary, AttendOptions(0.1))
    capacity = StaticCapacity(num_tokens=bucket, max_rows=64, max_few_tasks=400, max_many_tasks=400, max_parts=1000)
    static = StaticPlan(capacity, [spec], block_size=block_size, blocks=decoding.builder.blocks)
    metadata = AttentionMetadata(static.plan, [(k_cache, v_cache)], [rotary])

    def attend():
        return run(q, k, v, metadata, 0, softmax_scale=0.1)

    # The same steps on the CPU, which stores the new keys and values as well.
    cpu_caches = [(k_cache.cpu().double(), v_cache.cpu().double())]
    keys = [decoding.add(3, 40, 500)]
    step, scratch = decoding.step()
    assert static.load(step, decoding.builder.blocks)
    on_cpu = AttentionMetadata(scratch, cpu_caches, [rotary_of(128)])
    run(*(x[:1].cpu().double() for x in (q, k, v)), on_cpu, 0, softmax_scale=0.1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for round_ in range(24):
        if round_ % 3 == 0 and len(keys) < bucket:
            keys.append(decoding.add(int(decoding.rng.integers(0, 6)), int(decoding.rng.integers(0, 300)), 600))
        if round_ in (9, 17):
            decoding.remove(keys.pop(0))
        step, scratch = decoding.step()
        count = len(keys)
        for x in (q, k, v):
            x.normal_(generator=generator)
        assert static.load(step, decoding.builder.blocks)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert not out[count:].any()
        cpu = AttentionMetadata(scratch, cpu_caches, [rotary_of(128)])
        want = run(*(x[:count].cpu().double() for x in (q, k, v)), cpu, 0, softmax_scale=0.1)
        assert relative_error(out[:count].cpu(), want) < 1e-2, round_


def test_replays_in_a_row_with_hot_chunks_on_the_side_stream():
    """Many rows share some chunks, so their work runs on a second stream; replays follow each other without a wait."""
    block_size, num_blocks, bucket = 16, 2000, 48
    decoding = Decoding(
        3, block_size=block_size, num_blocks=num_blocks, chunk_lens=(512, 700, 90), device="cuda",
        table_entries=1 << 14,
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (num_blocks, block_size, 2, 128)
    k_cache, v_cache = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(2))
    q = torch.zeros(bucket, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(bucket, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rotary = on_gpu(rotary_of(128))
    spec = layout_spec(q, LayerKV(k_cache, v_cache), block_size, rotary, AttendOptions(0.1))
    capacity = StaticCapacity(num_tokens=bucket, max_rows=256, max_few_tasks=400, max_many_tasks=99, max_parts=1000)
    static = StaticPlan(capacity, [spec], block_size=block_size, blocks=decoding.builder.blocks)
    metadata = AttentionMetadata(static.plan, [(k_cache, v_cache)], [rotary])
    cpu_caches = [(k_cache.cpu().double(), v_cache.cpu().double())]
    for _ in range(40):
        decoding.add(3, int(decoding.rng.integers(1, 60)), 200)
    step, scratch = decoding.step()
    assert static.load(step, decoding.builder.blocks)
    assert int(static.plan.device_plan(spec).decode[0].num_tasks) > 0  # some chunk is hot

    def attend():
        return run(q, k, v, metadata, 0, softmax_scale=0.1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with poisoned(), torch.cuda.graph(graph):
        out = attend()
    on_cpu = AttentionMetadata(scratch, cpu_caches, [rotary_of(128)])
    run(*(x[:40].cpu().double() for x in (q, k, v)), on_cpu, 0, softmax_scale=0.1)
    inputs, outputs, plans = [], [], []
    for _ in range(12):
        step, scratch = decoding.step()
        for x in (q, k, v):
            x.normal_(generator=generator)
        assert static.load(step, decoding.builder.blocks)
        graph.replay()
        inputs.append([x[:40].clone() for x in (q, k, v)])
        outputs.append(out[:40].clone())
        plans.append(copy.deepcopy(scratch))  # its ranges grow on
    for number, (tensors, got, scratch) in enumerate(zip(inputs, outputs, plans, strict=True)):
        on_cpu = AttentionMetadata(scratch, cpu_caches, [rotary_of(128)])
        want = run(*(x.cpu().double() for x in tensors), on_cpu, 0, softmax_scale=0.1)
        assert relative_error(got.cpu(), want) < 1e-2, number


@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_captured_graph_replays_prefill_beside_decode(head_dim):
    """One graph runs long questions, short ones and decodes, over chunks in order or scattered; idle tasks stay idle."""
    block_size, num_blocks, num_tokens = 16, 3000, 256
    decoding = Decoding(
        5, block_size=block_size, num_blocks=num_blocks, chunk_lens=(512, 700, 90, 1300), device="cuda",
        table_entries=1 << 14, contiguous=True,
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (num_blocks, block_size, 2, head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(2))
    q = torch.zeros(num_tokens, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(num_tokens, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rotary = on_gpu(rotary_of(head_dim))
    spec = layout_spec(q, LayerKV(k_cache, v_cache), block_size, rotary, AttendOptions(0.1))
    capacity = StaticCapacity(
        num_tokens=num_tokens, max_rows=256, max_few_tasks=400, max_many_tasks=99, max_parts=20000,
        max_prefill_tasks=200, max_apart_tasks=200, max_tiles=500, max_masked=500,
    )  # fmt: skip
    static = StaticPlan(capacity, [spec], block_size=block_size, blocks=decoding.builder.blocks)
    metadata = AttentionMetadata(static.plan, [(k_cache, v_cache)], [rotary])
    cpu_caches = [(k_cache.cpu().double(), v_cache.cpu().double())]

    def attend():
        return run(q, k, v, metadata, 0, softmax_scale=0.1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()  # every task is idle
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with poisoned(), torch.cuda.graph(graph):
        out = attend()
    num_apart = 0
    for query_lens in ([64], [1], [100, 1, 1], [3, 70, 1, 90, 20], [1, 1, 1, 1, 1], [1, 16, 1, 1, 200]):
        while len(decoding.requests) < len(query_lens):
            decoding.add(len(decoding.requests) % 5, 7, 600)
        if len(query_lens) == 5:
            decoding.rng.shuffle(decoding.free)
        step, scratch = decoding.step(query_lens)
        for x in (q, k, v):
            x.normal_(generator=generator)
        assert static.load(step, decoding.builder.blocks)
        num_apart += int((static.plan.device_plan(spec).prefill[0].apart[:, 1] > 0).sum())
        graph.replay()
        count = sum(query_lens)
        on_cpu = AttentionMetadata(scratch, cpu_caches, [rotary_of(head_dim)])
        want = run(*(x[:count].cpu().double() for x in (q, k, v)), on_cpu, 0, softmax_scale=0.1)
        assert relative_error(out[:count].cpu(), want) < 1e-2, query_lens
        assert not out[count:].any()
    assert (num_apart > 0) == spec.has_unmasked_prefill


@pytest.mark.parametrize("rotary_options", [{}, {"is_interleaved": True}, {"rotary_dim": 32}])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_copy_turned(head_dim, rotary_options):
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(200, 16, 3, head_dim, generator=generator, device="cuda").bfloat16() for _ in range(2))
    order = torch.randperm(3200, generator=generator, device="cuda")
    sources, targets = order[:999], order[1000:1999]
    deltas = torch.randint(-5000, 200_000, (999,), generator=generator, device="cuda")
    rotary = on_gpu(rotary_of(head_dim, **rotary_options))
    want_k, want_v = k.double().flatten(0, 1), v.clone().flatten(0, 1)
    want_k[targets] = turn(want_k[sources], *turn_table(rotary.inv_freq, deltas, torch.float64), rotary)
    want_v[targets] = want_v[sources]
    copy_turned(k, v, sources, targets, deltas, rotary)
    assert relative_error(k.flatten(0, 1), want_k) < 4e-3
    assert torch.equal(v.flatten(0, 1), want_v)


def test_store_kv_turned():
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(3, 500, 128, generator=generator, device="cuda").bfloat16().transpose(0, 1) for _ in range(2))
    k_cache, v_cache = (torch.zeros(100, 16, 3, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(1600, generator=generator, device="cuda")[:500]
    slots[::7] = -1
    turns = torch.randint(-100_000, 100, (500,), generator=generator, device="cuda")
    rotary = on_gpu(rotary_of(128))
    store_kv(k, v, k_cache, v_cache, slots, store_turns=turns, rotary=rotary)
    want = turn(k.double(), *turn_table(rotary.inv_freq, turns, torch.float64), rotary)
    stored = slots >= 0
    assert relative_error(k_cache.flatten(0, 1)[slots[stored]], want[stored]) < 4e-3
    assert torch.equal(v_cache.flatten(0, 1)[slots[stored]], v[stored])
    assert int((v_cache.flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == int(stored.sum())


def test_merge_states():
    generator = torch.Generator("cuda").manual_seed(0)
    outputs = torch.randn(5000, 8, 128, generator=generator, device="cuda")
    lses = torch.randn(5000, 8, generator=generator, device="cuda") * 20
    row_tokens = torch.randint(0, 300, (5000,), generator=generator, device="cuda")
    sinks = torch.randn(8, generator=generator, device="cuda") * 20
    got, got_lse = merge_states(outputs, lses, row_tokens, 301, sinks)
    want, want_lse = merge_states_reference(outputs.double(), lses.double(), row_tokens, 301, sinks)
    assert relative_error(got, want) < 1e-5
    torch.testing.assert_close(got_lse.double(), want_lse, rtol=1e-5, atol=1e-5)
