# SPDX-License-Identifier: Apache-2.0
"""The engine's GPU paths, run on the CPU: kept plans, recorded small steps and compiled layers change no answer."""

import contextlib
import gc
import random

import pytest
import torch

from fixtures.kernel_engine import RunAgain, kernel_engine
from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, answer, drain, loaded_tiny, make_engine, prompt
from lazyattention.cache.chunk import Chunk
from lazyattention.engine import cuda_graphs, model_runner
from lazyattention.engine.request import SpanState
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.engine.step_planner import StepPlanner
from lazyattention.errors import ConfigError, NotFoundError
from lazyattention.ops import attention, static_plan
from oracle import LogitsRecorder, error_of

METHODS = (*CHUNK_METHODS, *FULL_METHODS)
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPTS = [prompt(words) for words in ("p11 d9 d16-b t7", "p11 d16-b d5 d9 t5", "t12", "p11 d9 d9 d0 d20 t30", "d9 t3")]


def run_all(engine, method, prompts=PROMPTS, params=PARAMS):
    """Run all prompts together; return logits by request."""
    recorder = LogitsRecorder(engine)
    for index, layout in enumerate(prompts):
        engine.add_request(f"r{index}", layout, params, reuse_method=method)
    outputs = drain(engine)
    assert [o.error for o in outputs.values() if o.error] == []
    return {request_id: recorder.of(request_id) for request_id in outputs}


def assert_same_logits(got, want, tolerance=1e-5):
    """float64 throughout, but the kernels keep log-sum-exps in float32."""
    assert got.keys() == want.keys()
    assert max(error_of(got[key], want[key]) for key in want) < tolerance


@pytest.mark.parametrize("method", METHODS)
def test_small_steps_from_graphs_give_the_same_logits(method):
    want = run_all(make_engine(), method)
    with kernel_engine(cuda_graphs=True) as engine:
        assert_same_logits(run_all(engine, method), want)
        assert_same_logits(run_all(engine, method), want)  # warm
        assert engine.model_runner.graphs.num_replays >= 8
        engine.check_idle()


@pytest.mark.parametrize("method", METHODS)
def test_cold_prompts_through_stock_kernels_give_the_same_logits(method, monkeypatch):
    want = run_all(make_engine(), method)
    batches = []
    original = attention.causal_prefill

    def watched(q, k, v, batch, *args, **kwargs):
        batches.append(batch)
        original(q, k, v, batch, *args, **kwargs)

    with kernel_engine() as engine:
        monkeypatch.setattr(attention, "causal_prefill_min_tokens", lambda *_: 8)
        monkeypatch.setattr(attention, "causal_prefill", watched)
        assert_same_logits(run_all(engine, method), want)
        num_cold = len(batches)
        assert num_cold > 0
        if method in FULL_METHODS:
            # A prompt that has never been seen is one sequence, whatever its spans.
            assert max(batch.num_tokens for batch in batches) >= sum(p.num_tokens for p in PROMPTS) // 2
            assert all(batch.parts is None for batch in batches if batch.num_tokens > 100)
        assert_same_logits(run_all(engine, method), want)  # warm
        engine.check_idle()


def test_every_padded_length_is_prepared_at_start_up(monkeypatch):
    lens = []
    original = attention.causal_prefill

    def watched(q, k, v, batch, *args, **kwargs):
        lens.append(batch.num_tokens)
        original(q, k, v, batch, *args, **kwargs)

    monkeypatch.setattr(attention, "causal_prefill_min_tokens", lambda *_: 8)
    monkeypatch.setattr(attention, "causal_prefill", watched)
    monkeypatch.setattr(model_runner, "LONG", 64)
    with kernel_engine(num_blocks=20, block_size=16, max_num_batched_tokens=130) as engine:
        assert sorted(set(lens)) == [64, 128, 130]
        engine.check_idle()
    lens.clear()
    with kernel_engine(num_blocks=3, block_size=16):
        assert set(lens) == {48}


def test_a_stock_kernel_that_fails_at_start_up_is_done_without(monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no such engine")

    want = run_all(make_engine(), "rotate_query")
    monkeypatch.setattr(attention, "causal_prefill_min_tokens", lambda *_: 8)
    monkeypatch.setattr(attention, "causal_prefill", broken)
    with kernel_engine(cuda_graphs=True) as engine:
        assert_same_logits(run_all(engine, "rotate_query"), want)
        engine.check_idle()
    assert caplog.text.count("no such engine") == 1


@pytest.mark.parametrize("kernel_for_unmasked_tiles", [False, True])
def test_questions_over_stored_documents_are_replayed_beside_decodes(monkeypatch, kernel_for_unmasked_tiles):
    """Steps with a long question are prefill in their own graphs; short ones and decodes go along."""
    monkeypatch.setattr(attention, "has_unmasked_prefill", lambda *_: kernel_for_unmasked_tiles)
    cold = [prompt(f"p11 d{90 + i} d150 d9-b t{5 + 9 * i}") for i in range(6)]
    warm = [prompt(f"p11 d150 d9-b d{90 + i} t{5 + 9 * i}") for i in range(6)]
    on_cpu, replayed = make_engine(), []
    with kernel_engine(cuda_graphs=True, max_num_batched_tokens=60) as engine:
        graphs = engine.model_runner.graphs
        loaded = graphs._loaded
        monkeypatch.setattr(graphs, "_loaded", lambda kind, *rest: replayed.append(kind) or loaded(kind, *rest))
        for prompts in (cold, warm):
            replayed.clear()
            num_replays = graphs.num_replays
            want = run_all(on_cpu, "rotate_query", prompts)
            assert_same_logits(run_all(engine, "rotate_query", prompts), want)
            assert graphs.num_replays - num_replays == len(replayed)
        assert {kind.has_prefill for kind in replayed} == {False, True}
        engine.check_idle()


@pytest.mark.parametrize(
    ("model_type", "variant", "compiles"),
    [
        ("gemma3_text", "a table per layer type", True),
        ("glm", "partial rotary", True),
        ("gpt_oss", "yarn", False),  # which experts run is decided by values
    ],
)
def test_layers_of_several_kinds_each_find_their_plan(model_type, variant, compiles):
    loaded = loaded_tiny(model_type, variant)
    want = run_all(make_engine(loaded), "rotate_query")
    with kernel_engine(loaded, cuda_graphs=True, compile=True) as engine:
        assert_same_logits(run_all(engine, "rotate_query"), want, 1e-4)  # sinks and tables in float32
        assert (engine.model_runner.compiled is not None) == compiles
        assert engine.model_runner.graphs.num_replays > 0


@pytest.mark.parametrize("seed", range(3))
def test_preemption_eviction_and_slices_change_no_token(seed):
    """A tight pool and a small budget: ranges come, grow, go and their ids are used again."""
    rng = random.Random(seed)
    names = [f"d{rng.randrange(1, 40)}-{i}" for i in range(12)]
    prompts = [
        prompt(" ".join(["p11", *rng.sample(names, rng.randrange(0, 5)), f"t{rng.randrange(1, 30)}"]))
        for _ in range(14)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(10, 25), ignore_eos=True)
    method = METHODS[seed % 3]
    want = run_all(make_engine(num_blocks=2000), method, prompts, params)
    options = {"num_blocks": 45, "max_num_batched_tokens": 23, "max_num_seqs": 9}
    with kernel_engine(cuda_graphs=seed % 2 == 0, **options) as engine:
        engine.model_runner._planner._num_after_sweep = -500  # so that few ranges are already many
        got = run_all(engine, method, prompts, params)
        assert {key: rows.argmax(1).tolist() for key, rows in got.items()} == {
            key: rows.argmax(1).tolist() for key, rows in want.items()
        }
        assert engine.scheduler.num_preemptions > 0
        engine.check_idle()


def test_decoding_lays_nothing_out_anew(monkeypatch):
    num_layouts = 0
    original = static_plan.lay_out

    def counted(*args):
        nonlocal num_layouts
        num_layouts += 1
        return original(*args)

    with kernel_engine(cuda_graphs=True) as engine:
        run_all(engine, "rotate_query", PROMPTS[:2], SamplingParams(max_tokens=1, ignore_eos=True))
        monkeypatch.setattr(static_plan, "lay_out", counted)
        for index, layout in enumerate(PROMPTS[:2]):
            engine.add_request(
                f"again-{index}", layout, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
            )
        drain(engine)
        # The prompts, the first decode, and one more whenever a block was added where a task did not expect it.
        assert num_layouts <= 4


def test_the_next_step_is_laid_out_while_the_device_computes(monkeypatch):
    """After prompts and after ends by length all that is left to do before the next launch is to send tokens."""
    launches = []  # tokens, and layouts made on the way to each launch
    run, original = cuda_graphs.GraphRunner.run, static_plan.lay_out
    num_layouts = 0

    def counted(*args):
        nonlocal num_layouts
        num_layouts += 1
        return original(*args)

    def run_and_note(runner, step, token_ids, *args):
        before = num_layouts
        logits = run(runner, step, token_ids, *args)
        launches.append((len(token_ids), num_layouts - before))
        return logits

    with kernel_engine(cuda_graphs=True) as engine:
        run_all(engine, "rotate_query", PROMPTS[:2], SamplingParams(max_tokens=1, ignore_eos=True))
        monkeypatch.setattr(static_plan, "lay_out", counted)
        monkeypatch.setattr(cuda_graphs.GraphRunner, "run", run_and_note)
        for index, layout in enumerate(PROMPTS[:2]):
            params = SamplingParams(max_tokens=6 + 3 * index, ignore_eos=True, temperature=0.0)
            engine.add_request(f"again-{index}", layout, params)
        drain(engine)
    assert launches[0][1] == 1  # the prompts themselves
    assert launches[1:] == [(2, 0)] * 5 + [(1, 0)] * 3


def test_nothing_is_planned_ahead_while_a_prompt_is_being_read(monkeypatch):
    planned = []
    original = StepPlanner.plan_ahead

    def noted(planner, batch, running):
        step = original(planner, batch, running)
        planned.append((len(batch.sampled), None if step is None else len(step.positions)))
        return step

    monkeypatch.setattr(StepPlanner, "plan_ahead", noted)
    with kernel_engine(cuda_graphs=True, max_num_batched_tokens=16) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
        engine.add_request("first", prompt("t5"), params)
        engine.step()
        engine.add_request("second", prompt("t40"), params)
        drain(engine)
    assert planned[:5] == [(1, 1), (1, None), (1, None), (2, 2), (2, None)]


def test_start_up_records_every_size_and_running_none():
    capture = RunAgain()
    with kernel_engine(cuda_graphs=True, capture=capture) as engine:
        graphs = engine.model_runner.graphs
        num_graphs = len(graphs.sizes) + len(graphs.prefill_sizes)
        assert capture.num_captures == graphs.num_graphs == num_graphs
        run_all(engine, "rotate_query", [prompt("p20 d40 d30 t30"), prompt("p20 d30 d40 t20")])
        assert graphs.num_replays >= PARAMS.max_tokens
        assert capture.num_captures == num_graphs


@pytest.mark.parametrize(
    ("method", "is_running"),
    [
        ("rotate_query", False),
        ("rotate_query", True),
        ("copy_rotate", False),
        ("prefix", True),
        ("full_recompute", False),
    ],
)
def test_nothing_of_a_deleted_document_stays(method, is_running):
    """Chunks and spans, tokens and all, stayed in the step planner until many others had come, and in graphs' inputs."""
    other = prompt("p11 d90 t20")
    want = run_all(make_engine(), method, [other])["r0"]
    document = prompt("p11 d30 t30").spans[1].token_ids

    def holders():
        gc.collect()
        kept = (x for x in gc.get_objects() if type(x) in (Chunk, SpanState))
        return [x for x in kept if tuple(x.token_ids) == document]

    with kernel_engine(cuda_graphs=True) as engine:
        recorder = LogitsRecorder(engine)
        reader_params = SamplingParams(max_tokens=9 if is_running else 2, ignore_eos=True)
        engine.add_request("reader", prompt("p11 d30 t30"), reader_params, reuse_method=method)
        engine.add_request("others", other, PARAMS, reuse_method=method)
        for _ in range(3):
            engine.step()
        assert holders()
        # Where nothing is stored, nothing is found to delete, but forgotten all the same.
        with contextlib.suppress(NotFoundError):
            engine.documents.delete("d30")
        if not is_running:
            assert holders() == []
            assert not any(graph.plan.inputs.any() for graph in engine.model_runner.graphs._graphs.values())
        drain(engine)
        assert holders() == []
        assert error_of(recorder.of("others"), want) < 1e-5
        engine.check_idle()


def test_a_graph_grows_for_a_request_with_many_documents():
    many = prompt(" ".join(["p3", *(f"d2-{i}" for i in range(90)), "t3"]))
    want = run_all(make_engine(), "rotate_query", [many])
    capture = RunAgain()
    with kernel_engine(cuda_graphs=True, capture=capture) as engine:
        num_captures = capture.num_captures
        assert_same_logits(run_all(engine, "rotate_query", [many]), want)
        assert capture.num_captures > num_captures
        num_replays = engine.model_runner.graphs.num_replays
        run_all(engine, "rotate_query", [many])
        assert engine.model_runner.graphs.num_replays == num_replays + PARAMS.max_tokens


def test_block_tables_that_move_make_graphs_stale():
    want = run_all(make_engine(), "rotate_query")
    capture = RunAgain()
    with kernel_engine(cuda_graphs=True, capture=capture) as engine:
        num_captures = capture.num_captures
        engine.model_runner._planner._plans._enlarge()
        assert_same_logits(run_all(engine, "rotate_query"), want)
        assert capture.num_captures > num_captures


def test_long_prompts_and_steps_that_store_turned_keys_run_without_graphs(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "PREFILL_SIZES", (32, 256))
    with kernel_engine(cuda_graphs=True) as engine:
        answer(engine, prompt("t300"), SamplingParams(max_tokens=1))
        assert engine.model_runner.graphs.num_replays == 0
        answer(engine, prompt("p5 d9 t4"), SamplingParams(max_tokens=1), reuse_method="rotate_key")
        assert engine.model_runner.graphs.num_replays == 0
        answer(engine, prompt("p5 d9 t6"), SamplingParams(max_tokens=1), reuse_method="rotate_key")
        assert engine.model_runner.graphs.num_replays == 1
        assert not engine.model_runner.graphs._num_growths  # none was recorded anew in vain


def test_many_sequences_get_a_size_of_their_own():
    with kernel_engine(cuda_graphs=True, max_num_seqs=300) as engine:
        assert engine.model_runner.graphs.sizes[-2:] == [256, 300]
    with kernel_engine(cuda_graphs=True, max_num_seqs=5) as engine:
        assert engine.model_runner.graphs.sizes[-1] == 256
        assert engine.model_runner.graphs._graphs[256, False, False].logits.shape[0] == 5


def test_all_layers_share_one_graph_whatever_the_number_of_tokens():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    loaded = loaded_tiny()
    assert loaded.num_layers == 4
    with kernel_engine(loaded, compile=True, compile_backend=backend) as engine:
        for method in METHODS:
            run_all(engine, method)
        assert len(graphs) == 1
        assert "attention_by_ticket" in graphs[0].print_readable(print_output=False)


def test_compiled_layers_give_the_same_logits_without_kernels():
    want = run_all(make_engine(), "rotate_query")
    engine = make_engine(compile=False)
    engine.model_runner._compile(engine.loaded, "eager")
    try:
        assert_same_logits(run_all(engine, "rotate_query"), want, 1e-12)
        assert engine.model_runner.compiled is not None
    finally:
        engine.model_runner.close()
        torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_compiles_the_layers():
    loaded = loaded_tiny(num_hidden_layers=2, dtype="float32")
    want = run_all(make_engine(loaded), "rotate_query")
    with kernel_engine(loaded, compile=True, compile_backend="inductor") as engine:
        assert_same_logits(run_all(engine, "rotate_query"), want, 1e-4)
        assert engine.model_runner.compiled is not None


def test_one_token_is_not_worth_a_graph_of_its_own():
    sizes = []

    def backend(graph, inputs):
        def run(*args):
            sizes.append(next(a for a in args if torch.is_tensor(a) and a.dim() == 3).shape[1])
            return graph.forward(*args)

        return run

    with kernel_engine(compile=True, compile_backend=backend) as engine:
        sizes.clear()
        answer(engine, prompt("t9"), PARAMS)
        assert sizes == [9, 9]  # two layers, the prompt only


def test_a_layer_that_does_not_compile_is_run_as_it_is(caplog):
    def backend(graph, inputs):
        raise NotImplementedError("no such instruction")

    want = run_all(make_engine(), "rotate_query")
    with kernel_engine(compile=True, compile_backend=backend) as engine:
        assert engine.model_runner.compiled is None
        assert_same_logits(run_all(engine, "rotate_query"), want)
    assert [r.message for r in caplog.records if "costs speed only" in r.message and "no such instruction" in r.message]


def test_a_later_failure_to_compile_costs_no_request(caplog):
    """One layer's graph does not fit another any more, and the compiler gives up in the middle of a step."""
    num_graphs = 0

    def backend(graph, inputs):
        nonlocal num_graphs
        num_graphs += 1
        if num_graphs > 1:
            raise NotImplementedError("one graph is enough")
        return graph.forward

    class AnotherSiLU(torch.nn.Module):
        def forward(self, x):
            return x * x.sigmoid()

    want = run_all(make_engine(), "rotate_query")
    mlp = loaded_tiny(num_hidden_layers=2).model.model.layers[1].mlp
    act_fn = mlp.act_fn
    with kernel_engine(compile=True, compile_backend=backend) as engine:
        assert engine.model_runner.compiled is not None
        try:
            mlp.act_fn = AnotherSiLU()
            assert_same_logits(run_all(engine, "rotate_query"), want)
        finally:
            mlp.act_fn = act_fn
        assert engine.model_runner.compiled is None
        assert engine.stats.num_failed == 0
    assert caplog.text.count("one graph is enough") == 1


def test_a_model_with_hooked_layers_is_run_as_it_is(caplog):
    layer = loaded_tiny(num_hidden_layers=2).model.model.layers[1]
    layer.forward = layer.forward
    try:
        with kernel_engine(compile=True) as engine:
            assert engine.model_runner.compiled is None
    finally:
        del layer.forward
    assert "carry hooks" in caplog.text


def test_two_engines_do_not_compile_the_same_layers(caplog):
    with kernel_engine(compile=True) as first, kernel_engine(compile=True) as second:
        assert first.model_runner.compiled is not None
        assert second.model_runner.compiled is None
        assert_same_logits(run_all(second, "rotate_query"), run_all(first, "rotate_query"))
    assert "another engine" in caplog.text
    assert "forward" not in first.loaded.model.model.layers[0].__dict__


@pytest.mark.parametrize("fails_after", [0, 3, 10])
def test_graphs_that_cannot_be_recorded_are_done_without(caplog, fails_after):
    class Broken(RunAgain):
        def __call__(self, function):
            if self.num_captures == fails_after:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return super().__call__(function)

    want = run_all(make_engine(), "rotate_key")  # reads unturned keys: a graph that start-up does not record
    with kernel_engine(cuda_graphs=True, capture=Broken()) as engine:
        assert_same_logits(run_all(engine, "rotate_key"), want)
        assert engine.model_runner.graphs is None
    lines = [r.message for r in caplog.records if "CUDA graphs" in r.message]
    assert len(lines) == 1
    assert lines[0].endswith("RuntimeError: operation not permitted when stream is capturing and more")


def test_graphs_need_a_cuda_device():
    with pytest.raises(ConfigError, match="cuda_graphs is on, but the model is on cpu"):
        make_engine(cuda_graphs=True)


def test_the_cpu_engine_neither_compiles_nor_records_by_default():
    runner = make_engine().model_runner
    assert runner.compiled is None
    assert runner.graphs is None
    assert loaded_tiny(num_hidden_layers=2).model.config._attn_implementation == "lazyattention"
