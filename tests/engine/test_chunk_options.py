# SPDX-License-Identifier: Apache-2.0
"""Every chunk option, alone and with others, gives the oracle's logits, by every chunk method; nothing leaks."""

import functools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.kernel_engine import kernel_engine
from fixtures.tiny_engine import (
    CHUNK_METHODS,
    FULL_METHODS,
    GREEDY,
    answer,
    drain,
    loaded_tiny,
    make_engine,
    mask_of,
    prompt,
)
from fixtures.tiny_models import tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.config import ChunkOptions
from lazyattention.engine.llm import LLM
from lazyattention.engine.request import RequestStatus
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import ConfigError, RequestError
from lazyattention.reuse import PromptLayout, Span
from oracle import TOLERANCE, ChunkOracle, LogitsRecorder, Mask, error_of

# Its new name does not exist in the oldest transformers supported.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

PROMPTS = ("p11 d9 d16 d33 t5", "p11 t6 d9 t7 d33 d16 t8 d1 t5", "d16 d0 d2 d9 t5", "p11 d9 d9 t4 d9 t5", "t9")
TEXT = "the log\n"
ALONE = [
    ChunkOptions(positions="parallel"),
    ChunkOptions(num_hidden=4),
    ChunkOptions(sink="bos"),
    ChunkOptions(sink=TEXT),
    ChunkOptions(chunk_temperature=0.7),
    ChunkOptions(chunk_bias=-1.5),
]
TOGETHER = [
    ChunkOptions(encoding="isolated", sink=TEXT),
    ChunkOptions(encoding="isolated", num_hidden=3, positions="parallel"),
    ChunkOptions(positions="parallel", num_hidden=9, sink="bos"),
    ChunkOptions(positions="parallel", num_hidden=2, sink="bos", chunk_temperature=1.3, chunk_bias=0.8),
]
# Partial, interleaved and no RoPE; windows; soft caps; sinks of the model's own; two tables.
FAMILIES = [
    ("mistral", "default"),
    ("gemma2", "default"),
    ("gemma3_text", "a table per layer type"),
    ("glm4", "partial rotary"),
    ("cohere2", "full layers without RoPE"),
    ("smollm3", "some layers without RoPE"),
    ("gpt_oss", "yarn"),
]


@functools.cache
def oracle_of(model_type="llama", variant="default", **overrides):
    return ChunkOracle(tiny_model(model_type, variant, **overrides).double())


def errors_of(engine, oracle, prompts, many_options, *, methods=CHUNK_METHODS, waves=2):
    """Ask every prompt with every options by every method, all in one engine at once; cold first, then warm."""
    recorder = LogitsRecorder(engine)
    errors = {}
    for wave in range(waves):
        requests = {
            f"{wave}/{method}/{number}/{words}": (prompt(words), options, method)
            for number, options in enumerate(many_options)
            for words in prompts
            for method in methods
        }
        for request_id, (layout, options, method) in requests.items():
            engine.add_request(request_id, layout, GREEDY, reuse_method=method, chunk_options=options)
        outputs = drain(engine)
        engine.check_idle()
        for request_id, (layout, options, _) in requests.items():
            output = outputs[request_id]
            assert output.error is None
            token_ids = tuple(output.outputs[0].token_ids)
            want = oracle.logits(layout, token_ids[:-1], mask=mask_of(options))
            errors[request_id] = error_of(recorder.of(request_id), want)
    return errors


def assert_small(errors):
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("options", "max_num_batched_tokens"),
    [*((options, 2048) for options in (*ALONE, *TOGETHER)), *((options, 13) for options in TOGETHER)],
)
def test_each_method_gives_the_oracles_logits(options, max_num_batched_tokens):
    engine = make_engine(num_blocks=2000, max_num_batched_tokens=max_num_batched_tokens)
    some = PROMPTS[1:] if max_num_batched_tokens == 2048 else PROMPTS[:1]
    assert_small(errors_of(engine, oracle_of(num_hidden_layers=2), some, [options]))
    assert engine._checksums.num_checks > 0


def test_requests_with_different_options_share_a_batch_and_a_store():
    engine = make_engine(num_blocks=4000)
    methods = ("rotate_query", "copy_rotate")
    many = [ChunkOptions(), *ALONE, *TOGETHER]
    assert_small(errors_of(engine, oracle_of(num_hidden_layers=2), PROMPTS[:1], many, methods=methods))


@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_families_give_the_oracles_logits(model_type, variant):
    engine = make_engine(loaded_tiny(model_type, variant), num_blocks=1000, max_num_batched_tokens=50)
    errors = errors_of(engine, oracle_of(model_type, variant), PROMPTS[1:2], [TOGETHER[2], TOGETHER[3]], waves=1)
    assert_small(errors)


def test_a_tight_pool_gives_the_oracles_logits():
    """Heads are evicted alone, chunks without them; sequences are preempted; the logits stay and nothing leaks."""
    engine = make_engine(num_blocks=60, block_size=4, max_num_batched_tokens=16)
    some = ("p11 d9 d16 d33 t5", "p11 d33 d9 t5", "p11 d16 d16 t9")
    errors = errors_of(engine, oracle_of(num_hidden_layers=2), some, [TOGETHER[2], ChunkOptions(num_hidden=4)], waves=3)
    assert_small(errors)
    assert engine.cache.stats.num_evicted_chunks > 0


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    options=st.builds(
        ChunkOptions,
        encoding=st.sampled_from(["after_preamble", "isolated"]),
        positions=st.sampled_from(["contiguous", "parallel"]),
        num_hidden=st.sampled_from([0, 1, 5, 40]),
        sink=st.sampled_from(["", "bos", TEXT]),
        chunk_temperature=st.sampled_from([1.0, 0.6, 2.5]),
        chunk_bias=st.sampled_from([0.0, -2.0, 1.0]),
    ),
    words=st.sampled_from(PROMPTS),
    budget=st.integers(1, 40),
)
def test_any_composition_gives_the_oracles_logits(options, words, budget):
    engine = make_small(num_blocks=500, block_size=4, max_num_batched_tokens=budget)
    assert_small(errors_of(engine, oracle_of(num_hidden_layers=1), [words], [options], waves=1))


def make_small(**options):
    return make_engine(loaded_tiny(num_hidden_layers=1), **options)


def test_full_attention_is_what_it_is_without_options():
    options = ChunkOptions(positions="parallel", num_hidden=3, sink="bos")
    engine = make_small()
    for method in FULL_METHODS:
        recorder = LogitsRecorder(engine)
        output = answer(engine, prompt(PROMPTS[0]), request_id=method, reuse_method=method, chunk_options=options)
        want = oracle_of(num_hidden_layers=1).logits(
            prompt(PROMPTS[0]), output.outputs[0].token_ids[:-1], encoding="full"
        )
        assert error_of(recorder.of(method), want) < TOLERANCE


def test_a_sink_is_no_part_of_the_prompt():
    engine = make_small()
    layout = prompt("p11 d9 t5")
    with_sink = answer(engine, layout, chunk_options=ChunkOptions(sink=TEXT, num_hidden=4))
    assert with_sink.prompt_token_ids == layout.token_ids
    assert with_sink.documents[0].num_tokens == 9


def test_a_warm_chunk_needs_its_hidden_tokens_no_more():
    engine = make_small()
    options = ChunkOptions(num_hidden=4, sink="bos")
    layout = prompt("p11 d9 d16 t5")
    cold = answer(engine, layout, chunk_options=options)
    assert [entry.status for entry in cold.documents] == ["miss", "miss"]
    assert cold.num_reused_tokens == 0
    heads = [chunk for chunk in engine.cache.chunks if chunk.num_tokens == 4]
    assert len(heads) == 2
    for head in heads:
        engine.cache._evictable.discard(head)
        engine.cache._forget_chunk(head, "evicted")
    num_computed = engine.stats.num_computed_tokens
    warm = answer(engine, layout, chunk_options=options)
    assert [(entry.status, entry.num_reused_tokens) for entry in warm.documents] == [("hit", 9), ("hit", 16)]
    # The question's last block is computed anew, and what was generated.
    assert engine.stats.num_computed_tokens - num_computed <= 5 + GREEDY.max_tokens
    engine.check_idle()


def test_only_a_documents_own_hidden_tokens_are_deleted_with_it():
    engine = make_small()
    answer(engine, prompt("p11 d9 d16 t5"), chunk_options=ChunkOptions(num_hidden=4, sink=TEXT))
    num_sink = len(tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"])
    engine.documents.delete("d9")
    left = sorted(chunk.num_tokens for chunk in engine.cache.chunks)
    assert left == sorted([11, num_sink, 4, 12])
    engine.check_idle()


def test_deleting_while_hidden_tokens_are_encoded():
    engine = make_small(max_num_batched_tokens=6)
    options = ChunkOptions(num_hidden=8, sink=TEXT)
    engine.add_request("a", prompt("p11 d33 t5"), GREEDY, chunk_options=options)
    for num_steps in range(4):
        engine.step()
        engine.documents.delete("d33")
        assert not engine.cache.chunks.of_document("default", "d33"), num_steps
    assert drain(engine)["a"].error is None
    engine.check_idle()


def joined(num_hidden):
    """An engine in which request b waits for a chunk that a, who holds its head too, is encoding."""
    engine = make_small(max_num_batched_tokens=8)
    for name in ("a", "b"):
        engine.add_request(name, prompt("p11 d33 t5"), GREEDY, chunk_options=ChunkOptions(num_hidden=num_hidden))
    engine.step()
    engine.step()
    second = engine._groups["b"].sequences[0]
    engine.scheduler.waiting.remove(second)
    assert engine._admission.admit(second)
    second.status = RequestStatus.RUNNING
    engine.scheduler.running.append(second)
    assert [span.chunk is None for span in second.spans] == [False, True, False, True]
    assert not any(chunk.is_ready for chunk in engine.cache.chunks if chunk.num_tokens != 11)
    return engine


def test_a_request_goes_on_with_a_chunk_whose_owner_left():
    engine = joined(num_hidden=20)
    engine.abort("a")
    assert drain(engine)["b"].error is None
    engine.check_idle()


def test_a_failing_head_ends_those_who_wait_for_it(monkeypatch):
    engine = joined(num_hidden=20)
    monkeypatch.setattr(engine.model_runner, "run", lambda batch: (_ for _ in ()).throw(RuntimeError("broken")))
    outputs = drain(engine, max_steps=2)
    assert [output.error is not None for output in outputs.values()] == [True, True]
    engine.check_idle()


def test_text_behind_documents_is_stored_per_placement_and_scaling():
    """The same chunks and the same text at other positions, or seen otherwise, are other KV."""
    engine = make_engine(block_size=4)
    words, oracle = "p11 d9 d16 t6 d9 t9", oracle_of(num_hidden_layers=2)
    for options in (ChunkOptions(), ChunkOptions(positions="parallel"), *ALONE[-2:]):
        assert_small(errors_of(engine, oracle, [words], [options], methods=("rotate_query",)))
    assert answer(engine, prompt(words), chunk_options=ChunkOptions(positions="parallel")).num_reused_tokens > 45


def test_text_behind_hidden_tokens_is_found_again():
    engine = make_small(block_size=4)
    layout, options = prompt("p11 d9 d16 t6 d9 t9"), ChunkOptions(num_hidden=3, sink=TEXT)
    answer(engine, layout, chunk_options=options)
    # All but the question's last block.
    assert answer(engine, layout, chunk_options=options).num_reused_tokens == layout.num_tokens - 1


def test_positions_count_against_max_model_len_not_tokens():
    engine = make_small(max_model_len=60)
    layout = prompt("p11 d33 d16 t5")
    with pytest.raises(RequestError, match="65 tokens"):
        engine.add_request("a", layout)
    output = answer(engine, layout, chunk_options=ChunkOptions(positions="parallel"))
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    with pytest.raises(RequestError, match=r"65 tokens .* at 61 positions"):
        engine.add_request("a", prompt("p11 d45 d4 t5"), chunk_options=ChunkOptions(positions="parallel"))
    long_sink = ChunkOptions(encoding="isolated", sink="x" * 40)
    with pytest.raises(RequestError, match="positions"):
        engine.add_request("a", prompt("d33 t5"), chunk_options=long_sink)
    assert not engine.has_work


def test_recomputed_blocks_go_with_hidden_tokens_and_sinks_and_not_with_parallel_positions():
    engine = make_small(block_size=4)
    options = ChunkOptions(num_hidden=3, sink=TEXT)
    layout = prompt("p11 d9 d16 d33 t5")
    for method in ("rotate_query", "rotate_key"):
        recorder = LogitsRecorder(engine)
        for request_id in ("cold", "warm"):
            engine.add_request(
                method + request_id, layout, GREEDY, reuse_method=method, chunk_options=options, recompute="first:6"
            )
            token_ids = drain(engine)[method + request_id].outputs[0].token_ids
            want = oracle_of(num_hidden_layers=1).logits(
                layout, token_ids[:-1], mask=mask_of(options), chosen_blocks=[(0, 1)] * 4, block_size=4
            )
            assert error_of(recorder.of(method + request_id), want) < TOLERANCE
            engine.check_idle()
    with pytest.raises(RequestError, match="positions is parallel"):
        engine.add_request("a", layout, chunk_options=ChunkOptions(positions="parallel"), recompute="first:6")
    with pytest.raises(ConfigError, match="positions is parallel"):
        make_small(positions="parallel", recompute="first:6")
    assert not engine.has_work


@pytest.mark.parametrize("method", CHUNK_METHODS)
def test_the_gpus_path_gives_the_oracles_logits(method):
    """Steps with temperature or bias leave the kernels' way and come back to it: ranges have grown meanwhile."""
    many = [ChunkOptions(), ChunkOptions(chunk_temperature=0.7, chunk_bias=-1.0), TOGETHER[2]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with kernel_engine(block_size=4, max_num_batched_tokens=64, cuda_graphs=True) as engine:
        recorder = LogitsRecorder(engine)
        for number, options in enumerate(many):
            layout = prompt("p11 d9 d16 t5")
            length = replace(params, max_tokens=(12, 5, 9)[number])
            engine.add_request(f"r{number}", layout, length, reuse_method=method, chunk_options=options)
        outputs = drain(engine)
        engine.check_idle()
        for number, options in enumerate(many):
            token_ids = outputs[f"r{number}"].outputs[0].token_ids
            want = oracle_of(num_hidden_layers=2).logits(layout, token_ids[:-1], mask=mask_of(options))
            assert error_of(recorder.of(f"r{number}"), want) < 1e-4


def test_the_question_is_watched_as_it_looks():
    options = ChunkOptions(chunk_temperature=0.6, chunk_bias=1.0)
    engine = make_small(block_size=8)
    seen = []
    block_scores = engine._chooser._block_scores
    engine._chooser._block_scores = lambda group, scores: seen.append(scores) or block_scores(group, scores)
    layout = prompt("p11 d33 d16 t5")
    answer(engine, layout, chunk_options=options, recompute="attention:0.3")
    want = oracle_of(num_hidden_layers=1).question_attention(layout, mask=mask_of(options))
    assert seen[0][: len(want)] == pytest.approx(want.tolist(), rel=1e-4)
    plain = oracle_of(num_hidden_layers=1).question_attention(layout, mask=Mask())
    assert seen[0][: len(want)] != pytest.approx(plain.tolist(), rel=1e-2)


def test_what_can_never_fit_counts_heads():
    engine = make_small(num_blocks=6, block_size=8)
    layout = prompt("d8 d8-b t3")
    assert answer(engine, layout, chunk_options=ChunkOptions(encoding="isolated")).error is None
    with pytest.raises(RequestError, match="can never fit"):
        make_small(num_blocks=4, block_size=8).add_request("a", layout, chunk_options=ChunkOptions(num_hidden=2))
    # What is visible of two documents may be the same text, and is still two chunks.
    spans = [Span((head, 9, 9, 9), document_id=str(head)) for head in (7, 8)]
    equal = PromptLayout((*spans, Span((5,))))
    with pytest.raises(RequestError, match="needs 5 KV blocks"):
        make_small(num_blocks=4, block_size=8).add_request("a", equal, GREEDY, chunk_options=ChunkOptions(num_hidden=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "spread"}, "positions must be one of contiguous, parallel"),
        ({"num_hidden": -1}, "num_hidden must be a whole number of at least 0"),
        ({"num_hidden": 1.5}, "num_hidden must be a whole number"),
        ({"sink": None}, "sink must be a text"),
        ({"encoding": "alone"}, "encoding must be one of"),
        ({"sink": "\ud800"}, "sink must be a text"),
        ({"chunk_temperature": 0}, "chunk_temperature must be a number from 0.001 to 1000, got 0"),
        ({"chunk_temperature": float("nan")}, "chunk_temperature must be a number from 0.001 to 1000, got nan"),
        ({"chunk_temperature": 1e-300}, "chunk_temperature must be a number from"),
        ({"chunk_temperature": 10**400}, "chunk_temperature must be a number from"),
        ({"chunk_bias": float("inf")}, "chunk_bias must be a number from -1000 to 1000, got inf"),
        ({"chunk_bias": True}, "chunk_bias must be a number from"),
        ({"chunk_bias": "1"}, "chunk_bias must be a number from"),
        ({"calibrated": "yes"}, "calibrated must be True or False, got 'yes'"),
        ({"calibrated": True, "chunk_bias": 0.5}, "calibrated brings its own"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        ChunkOptions(**options)


@pytest.mark.parametrize("wrong", [{"num_hidden": 3}, "isolated", ChunkOptions])
def test_options_of_another_type_are_named(wrong):
    engine = make_small()
    with pytest.raises(RequestError, match="chunk_options must be ChunkOptions"):
        engine.add_request("a", prompt("d9 t5"), chunk_options=wrong)
    assert not engine.has_work


def test_nothing_grows_with_the_options_that_requests_bring():
    engine = make_small()
    for number in range(3):
        answer(engine, prompt("d9 t5"), chunk_options=ChunkOptions(chunk_bias=number / 8))
    assert not engine._resolved


def test_a_tokenizer_without_bos_refuses_it_as_sink():
    engine = make_small()
    engine.prompts._tokenizer = tiny_tokenizer(with_bos=False)
    with pytest.raises(ConfigError, match="no beginning-of-sequence token"):
        engine.add_request("a", prompt("d9 t5"), chunk_options=ChunkOptions(sink="bos"))
    assert not engine.has_work


def test_the_facade_takes_options_per_engine_and_per_request():
    messages = [{"role": "user", "content": "who?"}]
    documents = ["the keeper wrote the log in spring"]
    llm = LLM(loaded_tiny(num_hidden_layers=1), num_blocks=200, num_hidden=3, sink="bos", progress=False)
    assert llm.engine.config.chunk == ChunkOptions(num_hidden=3, sink="bos")
    llm.chat(messages, GREEDY, documents=documents)
    hidden = {chunk.num_tokens for chunk in llm.engine.cache.chunks}
    assert {1, 3} <= hidden
    llm.documents.delete([info.document_id for info in llm.documents.list()])
    plain = ChunkOptions()
    llm.chat(messages, GREEDY, documents=documents, chunk_options=plain)
    list(llm.stream(messages, GREEDY, documents=documents, chunk_options=plain))
    outputs = llm.generate("who?", GREEDY, documents=documents, chunk_options=plain)
    assert outputs[0].error is None
    assert 3 not in {chunk.num_tokens for chunk in llm.engine.cache.chunks}
    assert isinstance(llm.engine.prompts.text("x"), PromptLayout)
    llm.close()
