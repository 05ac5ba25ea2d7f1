# SPDX-License-Identifier: Apache-2.0
"""The model used without `--model`: a real one, so these tests take a while."""

import pytest
import torch

from fixtures.chunk_oracle import oracle_logits, reuse_logits
from lazyattention.models.loader import load_model
from lazyattention.models.probe import tolerances

pytestmark = pytest.mark.slow
TEXTS = [
    "The lighthouse at Cape Varo was built in 1871. Its lamp is visible for nineteen miles.",
    "Mara Lindqvist kept the lighthouse from 1902 until 1931 and wrote a log of the weather every day.",
    "The harbour below the cape freezes in most winters, and the mail then comes over the ice.",
]


@pytest.fixture(scope="module")
def loaded():
    return load_model(None, dtype="float32", device="cpu", progress=False)


def test_facts(loaded):
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert loaded.kv_shapes == ((3, 64),) * 30
    assert (loaded.num_q_heads, loaded.vocab_size, loaded.max_model_len) == (9, 49152, 8192)
    assert loaded.eos_token_ids == {2}
    assert loaded.has_chat_template


def test_probe_has_room_to_spare_in_both_precisions(loaded):
    narrow = load_model(None, dtype="bfloat16", device="cpu", progress=False)
    for model in (loaded, narrow):
        turn_tolerance, logit_tolerance = tolerances(model.model)
        assert max(model.probe.turn_errors) < turn_tolerance / 4
        assert model.probe.logit_error < logit_tolerance / 4
    assert narrow.weights_id == loaded.weights_id


def test_reused_documents_equal_recomputed_ones(loaded):
    tokenizer = loaded.tokenizer
    chunks = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    question = tokenizer("\nQuestion: who kept the lighthouse?\nAnswer:", add_special_tokens=False).input_ids
    for order in ([0, 1, 2], [2, 1, 0], [1, 1]):
        ordered = [chunks[index] for index in order]
        want = oracle_logits(loaded.model, ordered, question)
        got = reuse_logits(loaded.model, loaded.rotaries, loaded.kv_shapes, ordered, question)
        assert (got - want).abs().max() < 2e-4  # of logits up to 30; measured 7e-5
        assert torch.equal(got.argmax(-1), want.argmax(-1))
