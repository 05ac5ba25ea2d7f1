# SPDX-License-Identifier: Apache-2.0
"""Scored answers are what the engine would compute for a user, and equal the oracle under each mask."""

import functools
from dataclasses import replace

import pytest
import torch

from fixtures.tiny_engine import loaded_tiny, make_engine, prompt
from fixtures.tiny_models import tiny_model
from lazyattention.config import ChunkOptions
from lazyattention.engine.scoring import generate, score
from lazyattention.errors import ConfigError, RequestError
from oracle import ChunkOracle

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
LAYOUTS = [prompt("p11 d9 d16 d33 t5"), prompt("p11 d33 d9 t7"), prompt("d16 t3"), prompt("t20")]
ANSWERS = [(7, 90, 3, 200), (5,), (3, 3, 8), (300, 12)]  # 3 is the end-of-sequence token, also inside an answer
WAYS = [("full_recompute", "isolated"), ("rotate_query", "after_preamble"), ("rotate_query", "isolated")]


@functools.cache
def oracle():
    return ChunkOracle(tiny_model(num_hidden_layers=2).double())


@pytest.fixture
def engine():
    engine = make_engine(loaded_tiny(num_hidden_layers=2))
    yield engine
    engine.check_idle()


@pytest.mark.parametrize(("reuse_method", "encoding"), WAYS)
def test_scores_equal_the_oracle_in_one_engine_for_every_way(engine, reuse_method, encoding):
    for _ in range(2):  # cold, then over what is stored
        for method, other in WAYS:  # chunks of the other encoding lie beside
            score(engine, LAYOUTS[:1], ANSWERS[:1], reuse_method=method, chunk_options=ChunkOptions(encoding=other))
        scored = score(
            engine, LAYOUTS, ANSWERS, reuse_method=reuse_method, chunk_options=ChunkOptions(encoding=encoding)
        )
        for layout, answer, got in zip(LAYOUTS, ANSWERS, scored, strict=True):
            mask = "full" if reuse_method == "full_recompute" else encoding
            want = oracle().logits(layout, answer[:-1], encoding=mask).log_softmax(dim=1)
            assert got.token_ids == answer
            # Logits reach the sampler in float32.
            torch.testing.assert_close(got.logprobs.double(), want, rtol=0, atol=1e-4)
            assert got.nll == pytest.approx(-want.gather(1, torch.tensor(answer)[:, None]).mean().item(), abs=1e-4)


def test_the_masks_differ_so_that_equality_means_something(engine):
    nlls = {
        way: score(engine, LAYOUTS[:1], ANSWERS[:1], reuse_method=way[0], chunk_options=ChunkOptions(encoding=way[1]))
        for way in WAYS
    }
    nlls = {way: scored[0].nll for way, scored in nlls.items()}
    assert len({round(nll, 3) for nll in nlls.values()}) == 3


def test_what_is_generated_scores_the_same_and_is_greedy(engine):
    generated = generate(engine, LAYOUTS, max_tokens=5)
    scored = score(engine, LAYOUTS, [g.token_ids for g in generated])
    for one, again in zip(generated, scored, strict=True):
        assert one.is_greedy
        assert again.is_greedy
        torch.testing.assert_close(one.logprobs, again.logprobs, rtol=0, atol=1e-4)
    other = score(engine, LAYOUTS[:1], [tuple((t + 1) % 384 for t in generated[0].token_ids)])[0]
    assert not other.is_greedy


def test_what_is_generated_ends_where_the_model_ends_it(engine):
    whole = generate(engine, LAYOUTS[:1], max_tokens=5)[0].token_ids
    end = whole[2]
    loaded = replace(engine.loaded, eos_token_ids=frozenset({end}))
    got = generate(make_engine(loaded), LAYOUTS[:1], max_tokens=5)[0]
    assert got.token_ids == whole[: whole.index(end) + 1]
    assert len(got.token_ids) == len(got.logprobs) < 5


def test_a_preempted_answer_scores_the_same():
    roomy = make_engine(loaded_tiny(num_hidden_layers=2))
    tight = make_engine(loaded_tiny(num_hidden_layers=2), num_blocks=16)
    layouts, answers = [prompt("p11 d9 t7"), prompt("p11 d16 t9")] * 2, [tuple(range(40, 70))] * 4
    want, got = score(roomy, layouts, answers), score(tight, layouts, answers)
    assert tight.scheduler.num_preemptions > 0
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
    tight.check_idle()


def test_wrong_arguments_are_named(engine):
    with pytest.raises(RequestError, match="2 answers for 1 prompts"):
        score(engine, LAYOUTS[:1], ANSWERS[:2])
    with pytest.raises(RequestError, match=r"answers\[0\]"):
        score(engine, LAYOUTS[:1], [()])
    with pytest.raises(RequestError, match=r"answers\[0\]"):
        score(engine, LAYOUTS[:1], [(384,)])
    with pytest.raises(ConfigError, match="unknown reuse method"):
        score(engine, LAYOUTS[:1], ANSWERS[:1], reuse_method="alone")
    assert not engine.has_work
