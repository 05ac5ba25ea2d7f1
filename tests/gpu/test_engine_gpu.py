# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU (kernels, compiled layers, CUDA graphs) against the engine on the CPU in float64."""

import functools

import pytest
import torch

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, drain, prompt
from fixtures.tiny_models import tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.models.loaded_model import wrap_model
from oracle import LogitsRecorder, error_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

METHODS = (*CHUNK_METHODS, *FULL_METHODS)
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
WORDS = ("p11 d9 d16-b t7", "p11 d16-b d5 d90 t5", "t12", "p11 d9 d9 d0 d20 d150 t40", "d9 t3", "p11 d150 t280")
PROMPTS = [prompt(words) for words in WORDS]
FAMILIES = [
    ("llama", "llama3"),
    ("qwen3", "default"),
    ("gemma3_text", "a table per layer type"),
    ("glm", "partial rotary"),
]


def engine_on(device, model_type, variant, dtype, **options):
    model = tiny_model(model_type, variant, hidden_size=128, head_dim=64).to(dtype).to(device)
    loaded = wrap_model(model, tiny_tokenizer(), name="tiny", weights_id="tiny")
    return Engine(loaded, EngineConfig.of(num_blocks=600, block_size=16, **options))


def run_all(engine, method, prompts=PROMPTS, params=PARAMS, **more):
    recorder = LogitsRecorder(engine)
    for index, layout in enumerate(prompts):
        engine.add_request(f"r{index}", layout, params, reuse_method=method, **more)
    outputs = drain(engine)
    assert [o.error for o in outputs.values() if o.error] == []
    del engine.model_runner.run
    logits = {request_id: recorder.of(request_id).cpu() for request_id in outputs}
    return logits, {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


@functools.cache
def wanted(model_type, variant, method):
    return run_all(engine_on("cpu", model_type, variant, torch.float64), method)


@functools.cache
def gpu_engine(model_type, variant, dtype):
    torch._dynamo.reset()
    return engine_on("cuda", model_type, variant, dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_float32_gives_the_tokens_and_logits_of_float64_on_the_cpu(model_type, variant, method):
    logits, tokens = wanted(model_type, variant, method)
    engine = gpu_engine(model_type, variant, torch.float32)
    for _ in ("cold", "warm"):
        got, got_tokens = run_all(engine, method)
        assert max(error_of(got[key], logits[key]) for key in logits) < 2e-4
        assert got_tokens == tokens
    assert engine.model_runner.compiled is not None
    assert engine.model_runner.graphs.num_replays > 0
    engine.check_idle()


@pytest.mark.parametrize("recompute", ["first:16", "deviation:0.3", "attention:0.3"])
@pytest.mark.parametrize("method", ["rotate_query", "rotate_key"])
@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_recomputed_blocks_are_those_of_the_cpu_and_so_are_the_logits(model_type, variant, method, recompute):
    cpu = engine_on("cpu", model_type, variant, torch.float64)
    gpu = gpu_engine(model_type, variant, torch.float32)
    logits, tokens = {}, {}
    scores = {}
    for name, engine in (("cpu", cpu), ("gpu", gpu), ("warm gpu", gpu)):
        choose = type(engine._admission).choose
        found = scores[name] = {}

        def remember(group, given=None, *, engine=engine, choose=choose, found=found):
            choose(engine._admission, group, given)
            found[group.request_id] = (group.chosen_blocks, sum(given or [], []))

        engine._admission.choose = remember
        logits[name], tokens[name] = run_all(engine, method, recompute=recompute)
        del engine._admission.choose
        engine.check_idle()
        assert found
        num_compared = 0
        for request_id, (blocks, numbers) in scores["cpu"].items():
            assert found[request_id][1] == pytest.approx(numbers, rel=2e-3, abs=1e-3)
            if (
                found[request_id][0] != blocks
            ):  # a first document deviates by rounding only, so its blocks are all alike
                assert min(sum(numbers), *numbers) < 1e-3
                continue
            num_compared += 1
            assert error_of(logits[name][request_id], logits["cpu"][request_id]) < 2e-4
            assert tokens[name][request_id] == tokens["cpu"][request_id]
        assert num_compared > 2


CHUNK_OPTIONS = [
    ChunkOptions(positions="parallel"),
    ChunkOptions(encoding="isolated", num_hidden=5, sink="bos"),
    ChunkOptions(num_hidden=3, positions="parallel", chunk_temperature=0.8, chunk_bias=-1.0),
]


@pytest.mark.parametrize("options", CHUNK_OPTIONS)
@pytest.mark.parametrize("method", CHUNK_METHODS)
@pytest.mark.parametrize(("model_type", "variant"), FAMILIES[1:3])
def test_chunk_options_give_the_logits_of_the_cpu(model_type, variant, method, options):
    """Those with a temperature leave the kernels, and plain requests after them come back."""
    cpu = engine_on("cpu", model_type, variant, torch.float64)
    gpu = gpu_engine(model_type, variant, torch.float32)
    logits, tokens = run_all(cpu, method, chunk_options=options)
    for _ in ("cold", "warm"):
        got, got_tokens = run_all(gpu, method, chunk_options=options)
        assert max(error_of(got[key], logits[key]) for key in logits) < 2e-4
        assert got_tokens == tokens
    plain, _ = run_all(gpu, method)
    want, _ = wanted(model_type, variant, method)
    assert max(error_of(plain[key], want[key]) for key in want) < 2e-4
    gpu.check_idle()


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_as_near_to_float64_as_on_the_cpu(method):
    logits, _ = wanted("llama", "llama3", method)
    on_cpu, _ = run_all(engine_on("cpu", "llama", "llama3", torch.bfloat16), method)
    on_gpu, _ = run_all(gpu_engine("llama", "llama3", torch.bfloat16), method)

    def error(got):  # of the first token: after it, rounding may have picked another one
        pairs = [(got[key][0].double(), logits[key][0].double()) for key in logits]
        return sum(float((g - w).norm() / w.norm()) for g, w in pairs) / len(pairs)

    assert error(on_gpu) < 1.5 * error(on_cpu) + 0.01


@pytest.mark.parametrize(
    "options", [{"cuda_graphs": False}, {"compile": False}, {"compile": False, "cuda_graphs": False}]
)
def test_every_part_can_be_left_out(options):
    _, tokens = wanted("llama", "llama3", "rotate_query")
    torch._dynamo.reset()
    engine = engine_on("cuda", "llama", "llama3", torch.float32, **options)
    assert (engine.model_runner.compiled is None) == ("compile" in options)
    assert (engine.model_runner.graphs is None) == ("cuda_graphs" in options)
    assert run_all(engine, "rotate_query")[1] == tokens


def test_a_tight_pool_changes_no_token():
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [prompt(f"p11 d{9 + i} d16-b d{30 + i % 3} t{3 + i}") for i in range(20)]
    cpu = engine_on("cpu", "llama", "llama3", torch.float64)
    _, tokens = run_all(cpu, "rotate_query", prompts, params)
    torch._dynamo.reset()
    model = tiny_model("llama", "llama3", hidden_size=128, head_dim=64).to("cuda")
    loaded = wrap_model(model, tiny_tokenizer(), name="tiny", weights_id="tiny")
    config = EngineConfig.of(num_blocks=40, block_size=16, max_num_batched_tokens=50, compile=False)
    engine = Engine(loaded, config)
    assert run_all(engine, "rotate_query", prompts, params)[1] == tokens
    assert engine.scheduler.num_preemptions > 0
    engine.check_idle()


@pytest.mark.parametrize("words", ["p11 d9 d16-b t7", "p11 d150 t280"])
def test_a_step_does_not_wait_for_the_device(words):
    engine = gpu_engine("llama", "llama3", torch.float32)
    run_all(engine, "rotate_query", [prompt(words)])  # compiles and loads what is needed
    run = engine.model_runner.run
    steps = []

    def watched(batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = run(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        steps.append(batch.num_tokens)
        return logits

    engine.model_runner.run = watched
    try:
        engine.add_request("watched", prompt(words), PARAMS, reuse_method="rotate_query")
        drain(engine)
    finally:
        del engine.model_runner.run
    assert len(steps) >= PARAMS.max_tokens
