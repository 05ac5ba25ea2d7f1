# SPDX-License-Identifier: Apache-2.0
"""A real model, real text, every chunk method: the same answers, token for token, and logits within 1e-4."""

import pytest

from fixtures.tiny_engine import CHUNK_METHODS, drain, make_engine
from lazyattention.documents.document import Document
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.models.loader import load_model
from oracle import ChunkOracle, LogitsRecorder, error_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]
DOCUMENTS = [
    Document("The lighthouse at Cape Varo was built in 1871. Its lamp is visible for nineteen miles.", title="Lamp"),
    Document("Mara Lindqvist kept the lighthouse from 1902 until 1931 and wrote a log of the weather every day."),
    Document("The harbour below the cape freezes in most winters, and the mail then comes over the ice."),
    Document("In 1944 the lamp was replaced by an electric one. The old one stands in the museum of Holm."),
]
SYSTEM = {"role": "system", "content": "Answer in one short sentence, from the documents only."}
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 1)]
QUESTIONS = ["Who kept the lighthouse?", "When was the lamp replaced?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def loaded():
    return load_model(None, dtype="float32", device="cpu", progress=False)


@pytest.mark.parametrize("encoding", ["after_preamble", "isolated"])
def test_reused_and_recomputed_answers_are_equal(loaded, encoding):
    engine = make_engine(loaded, num_blocks=800, block_size=16, encoding=encoding)
    recorder = LogitsRecorder(engine)
    layouts = {
        (order, question): engine.prompts.chat(
            [SYSTEM, {"role": "user", "content": question}], [DOCUMENTS[index] for index in order]
        )
        for order in ORDERS
        for question in QUESTIONS
    }
    answers = {}
    for method in ("chunk_recompute", *CHUNK_METHODS[:3]):
        for name, layout in layouts.items():
            engine.add_request(f"{method} {name}", layout, GREEDY, reuse_method=method)
        for request_id, output in drain(engine).items():
            assert output.error is None
            answers[request_id] = output
        engine.check_idle()
    for name in layouts:
        want = answers[f"chunk_recompute {name}"]
        for method in CHUNK_METHODS[:3]:
            got = answers[f"{method} {name}"]
            assert got.outputs[0].token_ids == want.outputs[0].token_ids, (method, name, got.text, want.text)
            difference = recorder.of(f"{method} {name}") - recorder.of(f"chunk_recompute {name}")
            assert difference.abs().max() < 1e-4, (method, name)
    if encoding == "after_preamble":  # without the shared sink a model of this size says little
        assert any("Cape Varo" in output.text for output in answers.values())
    warm = answers[f"rotate_query {(ORDERS[1], QUESTIONS[0])}"]
    assert warm.num_reused_tokens > warm.num_computed_tokens
    _compare_with_oracle(loaded, layouts, answers, recorder, encoding)


def _compare_with_oracle(loaded, layouts, answers, recorder, encoding):
    attention = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    try:
        oracle = ChunkOracle(loaded.model)
        for order in ORDERS[1:3]:
            name = (order, QUESTIONS[0])
            output_ids = answers[f"rotate_query {name}"].outputs[0].token_ids
            want = oracle.logits(layouts[name], output_ids[:-1], encoding=encoding)
            for method in CHUNK_METHODS:
                assert error_of(recorder.of(f"{method} {name}"), want) < 1e-5, (method, name)
    finally:
        loaded.model.set_attn_implementation(attention)


def test_full_methods_equal_the_models_own_answers(loaded):
    engine = make_engine(loaded, num_blocks=800, block_size=16)
    recorder = LogitsRecorder(engine)
    layout = engine.prompts.chat([SYSTEM, {"role": "user", "content": QUESTIONS[0]}], DOCUMENTS)
    for request_id, method in (("full", "full_recompute"), ("prefix", "prefix"), ("prefix again", "prefix")):
        engine.add_request(request_id, layout, GREEDY, reuse_method=method)
        outputs = drain(engine)
    assert outputs["prefix again"].num_reused_tokens > 0
    output_ids = outputs["prefix again"].outputs[0].token_ids
    loaded.model.set_attn_implementation("eager")
    try:
        want = ChunkOracle(loaded.model).logits(layout, output_ids[:-1], encoding="full")
    finally:
        loaded.model.set_attn_implementation("lazyattention")
    for request_id in ("full", "prefix", "prefix again"):
        assert error_of(recorder.of(request_id), want) < 1e-5
