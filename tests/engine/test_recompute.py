# SPDX-License-Identifier: Apache-2.0
"""Blocks computed anew: the logits equal the oracle's with the same blocks, evidence equals a computation without us."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.kernel_engine import kernel_engine
from fixtures.tiny_engine import GREEDY, answer, drain, loaded_tiny, make_engine, prompt
from fixtures.tiny_models import tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.config import ChunkOptions
from lazyattention.engine import block_chooser
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import ConfigError, RequestError
from lazyattention.reuse import PromptLayout, Span
from lazyattention.reuse.recompute import RECOMPUTE_POLICIES, Recompute
from oracle import TOLERANCE, ChunkOracle, LogitsRecorder, Mask, error_of

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

SHARED_METHODS = ("rotate_query", "rotate_key")
POLICIES = ("first:1", "first:9", "deviation:0.3", "attention:0.3")
EVERYTHING = ("first:10000", "deviation:1", "attention:1")
# Lengths around blocks of 4, 8 and 16; text between documents; a document twice; an empty one.
PROMPT = "p11 d9 d33 t6 d16 d9 d0 t5"


@functools.cache
def oracle_of(model_type="llama", variant="default", **overrides):
    return ChunkOracle(tiny_model(model_type, variant, **overrides).double())


def small_oracle():
    return oracle_of(num_hidden_layers=2)


class Choices:
    """Remembers the blocks and scores of every request that an engine serves."""

    def __init__(self, engine):
        self.blocks, self.scores, self.num_choices = {}, {}, 0
        choose = engine._admission.choose

        def choose_and_remember(group, scores=None):
            choose(group, scores)
            self.num_choices += 1
            self.blocks[group.request_id] = group.chosen_blocks
            self.plan = group.plan
            self.scores[group.request_id] = scores

        engine._admission.choose = choose_and_remember


def block_sums(token_scores, layout, block_size):
    """Sum an oracle's token scores by block."""
    rows, start = [], 0
    for span in layout.spans:
        own = token_scores[start : start + len(span.token_ids)]
        blocks = own.split(block_size) if span.is_document and span.token_ids else []
        rows.append([float(block.sum()) for block in blocks])
        start += len(span.token_ids)
    return rows


def errors_of(engine, oracle, requests, *, encoding="after_preamble"):
    """Run requests `(id, shorthand, recompute, method)` all at once; return the error of each one's logits."""
    recorder, choices = LogitsRecorder(engine), Choices(engine)
    for request_id, shorthand, recompute, method in requests:
        engine.add_request(request_id, prompt(shorthand), GREEDY, reuse_method=method, recompute=recompute)
    outputs = drain(engine)
    engine.check_idle()
    errors = {}
    for request_id, shorthand, _, _ in requests:
        output = outputs[request_id]
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == GREEDY.max_tokens, output.error
        blocks = choices.blocks.get(request_id)
        want = oracle.logits(
            prompt(shorthand),
            token_ids[:-1],
            encoding=encoding,
            chosen_blocks=blocks,
            block_size=engine.cache.block_size,
        )
        errors[request_id] = error_of(recorder.of(request_id), want)
    return errors, outputs, choices


def assert_small(errors, tolerance=TOLERANCE):
    wrong = {name: error for name, error in errors.items() if not error < tolerance}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("encoding", "max_num_batched_tokens", "block_size"),
    [("after_preamble", 2048, 8), ("isolated", 2048, 16), ("after_preamble", 7, 4), ("isolated", 3, 8)],
)
def test_every_policy_gives_the_oracles_logits(encoding, max_num_batched_tokens, block_size):
    engine = make_engine(encoding=encoding, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size)
    requests = [
        (f"{method}/{recompute}", PROMPT, recompute, method) for method in SHARED_METHODS for recompute in POLICIES
    ]
    for _ in range(2):  # cold, then warm
        errors, outputs, choices = errors_of(engine, small_oracle(), requests, encoding=encoding)
        assert_small(errors)
        for request_id, output in outputs.items():
            assert 0 < output.num_recomputed_tokens < 76, request_id
            assert any(map(len, choices.blocks[request_id]))
    assert engine._checksums.num_checks > 0


def test_a_block_recomputed_is_not_the_block_stored():
    """What must be told apart is far apart: with other blocks than the chosen ones the oracle disagrees."""
    engine = make_engine()
    recorder, choices = LogitsRecorder(engine), Choices(engine)
    token_ids = answer(engine, prompt(PROMPT), recompute="first:8").outputs[0].token_ids
    others = [
        tuple(block + 1 for block in blocks if len(s.token_ids) > 16)
        for blocks, s in zip(choices.blocks["only"], prompt(PROMPT).spans, strict=True)
    ]
    for blocks in (None, others):
        want = small_oracle().logits(
            prompt(PROMPT), token_ids[:-1], encoding="after_preamble", chosen_blocks=blocks, block_size=8
        )
        assert error_of(recorder.of("only"), want) > 100 * TOLERANCE


@pytest.mark.parametrize("recompute", EVERYTHING)
@pytest.mark.parametrize("method", SHARED_METHODS)
def test_recomputing_everything_is_full_attention(method, recompute):
    engine = make_engine()
    recorder = LogitsRecorder(engine)
    for wave in ("cold", "warm"):
        output = answer(engine, prompt(PROMPT), request_id=wave, reuse_method=method, recompute=recompute)
        assert output.num_recomputed_tokens == 67
        want = small_oracle().logits(prompt(PROMPT), output.outputs[0].token_ids[:-1], encoding="full")
        assert error_of(recorder.of(wave), want) < TOLERANCE
    engine.check_idle()


def test_first_chooses_whole_blocks_from_the_start_of_every_document():
    engine = make_engine(block_size=4)
    choices = Choices(engine)
    answer(engine, prompt("p11 d9 d33 t6 d3 d0 t5"), recompute="first:5")
    assert choices.blocks["only"] == ((), (0, 1), (0, 1), (), (0,), (), ())


@pytest.mark.parametrize("name", ["deviation", "attention"])
def test_shares_are_rounded_up_and_taken_from_the_highest_scores(name):
    policy = RECOMPUTE_POLICIES[name]
    scores = [[], [1.0, 9.0, 2.0], [8.0], [3.0, 3.0, 7.0]]
    assert policy.choose(0.3, [0, 3, 1, 3], 16, scores) == ((), (1,), (0,), (2,))
    assert policy.num_blocks(0.15, [20], 16) == 3
    assert policy.num_blocks(0.01, [20], 16) == 1
    assert policy.num_blocks(1e-12, [20], 16) == 1
    assert policy.num_blocks(1e-12, [0, 0], 16) == 0
    assert policy.choose(1.0, [0, 3, 1, 3], 16, scores) == ((), (0, 1, 2), (0,), (0, 1, 2))


FAMILIES = [
    ("llama", "default"),
    ("gemma2", "default"),
    ("gemma3_text", "a table per layer type"),
    ("mistral", "default"),
    ("gpt_oss", "yarn"),
    ("smollm3", "some layers without RoPE"),
    ("phi3", "partial rotary"),
]


@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_evidence_equals_the_models_own(model_type, variant):
    """Scores by block against transformers' eager attention; then the logits."""
    engine = make_engine(loaded_tiny(model_type, variant), encoding="after_preamble", max_num_batched_tokens=13)
    oracle = oracle_of(model_type, variant)
    requests = [
        (f"{method} {name}", PROMPT, f"{name}:0.4", method)
        for method in SHARED_METHODS
        for name in ("attention", "deviation")
    ]
    errors, _, choices = errors_of(engine, oracle, requests)
    layout = prompt(PROMPT)
    wanted = {
        "attention": oracle.question_attention(layout, mask=Mask()),
        "deviation": oracle.kv_deviation(layout, encoding="after_preamble"),
    }
    for request_id, _, _, _ in requests:
        want = block_sums(wanted[request_id.split()[1]], layout, 8)
        assert [len(row) for row in choices.scores[request_id]] == [len(row) for row in want]
        for got_row, want_row in zip(choices.scores[request_id], want, strict=True):
            torch.testing.assert_close(torch.tensor(got_row), torch.tensor(want_row), rtol=1e-4, atol=1e-4)
    assert_small(errors)


def test_only_the_end_of_a_long_question_is_watched(monkeypatch):
    monkeypatch.setattr("lazyattention.engine.question_attention.MAX_QUESTION_TOKENS", 3)
    watched, whole = "p5 d20 d30 t3", "p5 d20 d30 t6 t3"
    scores = []
    for shorthand, max_num_batched_tokens in ((whole, 2048), (whole, 5), (watched, 2048)):
        engine = make_engine(max_num_batched_tokens=max_num_batched_tokens)
        choices = Choices(engine)
        layout = prompt(shorthand)
        if shorthand == whole:  # the same tokens, but one text
            spans = layout.spans
            last = type(spans[-1])(spans[-2].token_ids + spans[-1].token_ids)
            layout = type(layout)((*spans[:-2], last))
        answer(engine, layout, recompute="attention:0.3")
        scores.append([number for row in choices.scores["only"] for number in row])
    assert scores[0] == pytest.approx(scores[1])
    assert scores[0] != pytest.approx(scores[2])
    want = block_sums(small_oracle().question_attention(prompt(whole), mask=Mask()), prompt(whole), 8)
    assert scores[0] == pytest.approx([number for row in want for number in row], rel=1e-4)


def prefer(engine, blocks_of_span):
    """Let `attention` and `deviation` choose these blocks first, whatever the evidence."""

    def scores(group, token_scores):
        counts = engine._admission.block_counts(group.plan)
        return [[float(block in blocks_of_span(span)) for block in range(count)] for span, count in enumerate(counts)]

    engine._chooser._block_scores = scores


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_gpus_path_gives_the_oracles_logits(compile):
    """Kept plans, kernels' references and graphs: runs are ranges of their own, watched steps run without a graph."""
    with kernel_engine(compile=compile, block_size=8, max_num_batched_tokens=64, cuda_graphs=True) as engine:
        requests = [(f"{m}/{r}", PROMPT, r, m) for m in SHARED_METHODS for r in (*POLICIES, "none")]
        for _ in range(2):
            errors, _, choices = errors_of(engine, small_oracle(), requests)
            assert_small(errors)
        for method in SHARED_METHODS:
            want = block_sums(small_oracle().question_attention(prompt(PROMPT), mask=Mask()), prompt(PROMPT), 8)
            got = choices.scores[f"{method}/attention:0.3"]
            assert [x for row in got for x in row] == pytest.approx([x for row in want for x in row], rel=1e-3)
        prefer(engine, lambda span: (1, 3))
        requests = [(method, "p11 d33 d40 t5", "attention:0.4", method) for method in SHARED_METHODS]
        errors, _, choices = errors_of(engine, small_oracle(), requests)
        assert_small(errors)
        assert set(choices.blocks.values()) == {((), (1, 3), (1, 3), ())}


def test_two_choices_over_one_chunk_in_one_batch():
    """Both read the same stored blocks, replace others, and leave the chunk as it was (checksums)."""
    engine = make_engine(block_size=8)
    answer(engine, prompt("p11 d33 d9 t5"), request_id="warm")
    requests = [
        ("a", "p11 d33 d9 t5", "first:8", "rotate_query"),
        ("b", "p11 d33 d9 t5", "first:16", "rotate_query"),
        ("c", "p11 d9 d33 t7", "attention:0.5", "rotate_query"),
        ("d", "p11 d9 d33 t7", "none", "rotate_query"),
        ("e", "p11 d9 d33 t7", "deviation:0.5", "rotate_query"),
    ]
    errors, outputs, _ = errors_of(engine, small_oracle(), requests)
    assert_small(errors)
    statuses = {name: [document.status for document in output.documents] for name, output in outputs.items()}
    # All of d9 is within the first 16 tokens.
    assert statuses == {**dict.fromkeys("acde", ["hit", "hit"]), "b": ["hit", "computed"]}
    assert engine._checksums.num_checks > 0
    shared = [chunk for chunk in engine.cache.chunks if "d33" in chunk.document_ids]
    assert len(shared) == 1


def test_stored_text_never_crosses_choices():
    """Text and private blocks are kept for the same choice only; here every later request follows the same tokens."""
    engine = make_engine(block_size=4)
    for number in range(2):
        requests = [
            (f"{number} {recompute}", "p11 d33 d9 t9", recompute, "rotate_query")
            for recompute in ("none", "first:4", "first:8", "first:33", "deviation:0.2", "attention:0.2", "first:4")[
                : 6 + number
            ]
        ]
        for request in requests:
            errors, _, _ = errors_of(engine, small_oracle(), [request])
            assert_small(errors)
    layout = prompt("p11 d33 d9 t9")
    fresh = make_engine(block_size=4)
    want, got = Choices(fresh), Choices(engine)
    for one in (engine, fresh):
        answer(one, layout, recompute="attention:0.2")
    assert sum(got.scores["only"], []) == pytest.approx(sum(want.scores["only"], [])), "all of the question is watched"
    output = answer(engine, layout, recompute="first:4")
    assert output.num_computed_tokens == 1, "private blocks and text of the same choice are found"
    assert output.num_recomputed_tokens == 8


def test_stored_text_knows_which_of_two_equal_blocks_was_recomputed():
    engine = make_engine(block_size=4)
    recorder = LogitsRecorder(engine)
    tokens = prompt("p11 t4 t9").spans
    layout = PromptLayout((tokens[0], Span(tokens[1].token_ids * 6, document_id="same"), tokens[2]))
    for block in (1, 2, 4):
        prefer(engine, lambda span, block=block: (block,))
        blocks = ((), (block,), ())
        token_ids = answer(engine, layout, request_id=f"{block}", recompute="attention:0.1").outputs[0].token_ids
        want = small_oracle().logits(
            layout, token_ids[:-1], encoding="after_preamble", chosen_blocks=blocks, block_size=4
        )
        assert error_of(recorder.of(f"{block}"), want) < TOLERANCE


def test_stored_text_knows_how_many_hidden_tokens_stand_before_it():
    """Of both documents only equal last tokens are visible, all recomputed: the same tokens at other positions."""
    engine = make_engine(block_size=4, encoding="isolated", num_hidden=40)
    mask = Mask("isolated", num_hidden=40)
    recorder = LogitsRecorder(engine)
    for words in ("p8 d16 t9", "p8 d9 t9"):
        preamble, document, text = prompt(words).spans
        layout = PromptLayout((preamble, replace(document, token_ids=(*document.token_ids[:-1], 7)), text))
        token_ids = answer(engine, layout, request_id=words, recompute="first:1").outputs[0].token_ids
        want = small_oracle().logits(layout, token_ids[:-1], mask=mask, chosen_blocks=[(), (0,), ()], block_size=4)
        assert error_of(recorder.of(words), want) < TOLERANCE


def test_what_is_reported():
    engine = make_engine(block_size=8)
    layout = prompt("p11 d33 d9 t5")
    cold = answer(engine, layout, recompute="first:8", request_id="cold")
    engine.cache.delete_tagged(next(c for c in engine.cache.chunks if "d33" in c.document_ids).key.digest)
    for node in list(engine.cache.texts):
        if not node.children:
            engine.cache._evictable.discard(node)
            engine.cache._forget_text(node)
    warm = answer(engine, layout, recompute="first:8", request_id="warm")
    first, second = cold.documents
    assert (first.status, first.reason, first.num_reused_tokens, first.num_recomputed_tokens) == ("miss", "new", 0, 8)
    assert (second.status, second.num_recomputed_tokens) == ("miss", 8)
    first, second = warm.documents
    assert (first.status, first.reason, first.num_recomputed_tokens) == ("hit", "reused", 8)
    assert (second.status, second.num_recomputed_tokens) == ("hit", 8)
    assert warm.num_recomputed_tokens == 16
    assert warm.num_prompt_tokens == warm.num_computed_tokens + warm.num_reused_tokens
    assert warm.timings.selection_s is None
    whole = answer(engine, prompt("p11 d9-b t5"), recompute="first:16", request_id="whole")
    assert [(d.status, d.reason) for d in whole.documents] == [("computed", "recomputed")]
    stats = engine.describe()
    assert stats["num_recomputed_tokens"] == 16 + 16 + 9
    assert stats["num_selections"] == 0


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("encoding", ["isolated", "after_preamble"])
def test_nobody_reuses_what_a_request_computes_to_choose(encoding, recompute):
    """Text in front of the documents is kept from the first pass to the second, and was counted as found."""
    engine = make_engine(block_size=4, encoding=encoding)
    layout = prompt("p13 d9 d16 t9")
    assert answer(engine, layout, recompute=recompute).num_reused_tokens == 0
    assert answer(engine, layout, recompute=recompute).num_reused_tokens >= 13


@pytest.mark.parametrize(("recompute", "num_selection_tokens"), [("attention:0.3", 5), ("deviation:0.3", 53)])
def test_selection_is_reported(recompute, num_selection_tokens):
    """Two layers of two: the deviation pass costs the whole prompt up to the last document."""
    engine = make_engine(block_size=8)
    answer(engine, prompt("p11 d33 d9 t7"), request_id="warm")
    output = answer(engine, prompt("p11 d33 d9 t5"), recompute=recompute)
    # 5 + 2 blocks, 30 % of them rounded up.
    assert sum(math.ceil(d.num_recomputed_tokens / 8) for d in output.documents) == 3
    assert output.num_recomputed_tokens == sum(d.num_recomputed_tokens for d in output.documents)
    assert [d.status for d in output.documents] == ["hit", "hit"]
    assert [d.num_reused_tokens for d in output.documents] == [
        d.num_tokens - d.num_recomputed_tokens for d in output.documents
    ]
    assert output.num_selection_tokens == num_selection_tokens
    assert 0 < output.timings.selection_s < output.timings.ttft_s
    stats = engine.describe()
    assert (stats["num_selections"], stats["num_selection_tokens"]) == (1, num_selection_tokens)
    assert stats["selection_s"] > 0


def test_the_engines_option_is_the_default_where_it_can_be():
    engine = make_engine(recompute="first:8")
    choices = Choices(engine)
    layout = prompt("p11 d9 t5")
    for request_id, more in {
        "default": {},
        "other": {"recompute": "first:16"},
        "none": {"recompute": "none"},
        "never": {"reuse": "never"},
        "copy": {"reuse_method": "copy_rotate"},
        "object": {"recompute": Recompute("first", 1)},
        "no documents": {"layout": prompt("t9")},
    }.items():
        answer(engine, more.pop("layout", layout), request_id=request_id, **more)
    assert choices.blocks == {"default": ((), (0,), ()), "other": ((), (0, 1), ()), "object": ((), (0,), ())}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shorthand", ["t9", "p11 d0 t5", "p11 t5"])
def test_nothing_to_recompute(policy, shorthand):
    engine = make_engine()
    errors, outputs, _ = errors_of(engine, small_oracle(), [("one", shorthand, policy, "rotate_query")])
    assert_small(errors)
    assert outputs["one"].num_recomputed_tokens == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("first", "recompute must be none or one of first:N"),
        ("first:0", "whole number of tokens"),
        ("first:2.5", "whole number of tokens"),
        ("first:nan", "whole number of tokens"),
        ("first:inf", "whole number of tokens"),
        ("deviation:0", "share above 0"),
        ("attention:1.1", "share above 0"),
        ("attention:nan", "share above 0"),
        ("", "recompute must be none or one of first:N"),
        (16, "recompute must be none or one of first:N"),
        (["first:16"], "recompute must be none or one of first:N"),
        ("frist:16", "did you mean 'first'"),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    engine = make_engine()
    with pytest.raises((RequestError, ConfigError), match=message):
        engine.add_request("one", prompt("p3 d9 t3"), recompute=wrong)
    with pytest.raises(ConfigError, match=message):
        make_engine(recompute=wrong)
    assert not engine.has_work


@pytest.mark.parametrize("method", ["copy_rotate", "chunk_recompute", "prefix", "full_recompute"])
def test_other_methods_are_refused_and_both_are_named(method):
    engine = make_engine()
    with pytest.raises(RequestError, match=rf"first:16 .*rotate_key, rotate_query.*{method}"):
        engine.add_request("one", prompt("p3 d9 t3"), reuse_method=method, recompute="first:16")
    with pytest.raises(ConfigError, match=method):
        make_engine(recompute="first:16", reuse_method=method)
    engine.add_request("one", prompt("p3 d9 t3"), GREEDY, reuse_method=method, recompute="none")
    assert drain(engine)["one"].error is None


def test_a_model_of_one_layer_has_no_second_one():
    engine = make_engine(loaded_tiny(num_hidden_layers=1))
    with pytest.raises(RequestError, match="second layer"):
        engine.add_request("one", prompt("p3 d9 t3"), recompute="deviation:0.5")


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("method", SHARED_METHODS)
def test_hidden_tokens_and_sinks_are_never_chosen(method, recompute):
    """Blocks are counted from the first visible token, by evidence too."""
    options = ChunkOptions(num_hidden=3, sink="bos")
    mask = Mask(sink=(tiny_tokenizer().bos_token_id,), num_hidden=3)
    engine = make_engine(block_size=4, chunk=options)
    layout = prompt("p11 d9 d16 t4 d33 t5")
    recorder, choices = LogitsRecorder(engine), Choices(engine)
    for wave in ("cold", "warm"):
        output = answer(engine, layout, request_id=wave, reuse_method=method, recompute=recompute)
        # Hidden spans are entries of the plan, but not of the layout.
        chosen = [
            blocks
            for blocks, planned in zip(choices.blocks[wave], choices.plan.spans, strict=True)
            if not planned.is_hidden
        ]
        assert sum(map(len, chosen)) > 0
        want = small_oracle().logits(
            layout, output.outputs[0].token_ids[:-1], mask=mask, chosen_blocks=chosen, block_size=4
        )
        assert error_of(recorder.of(wave), want) < TOLERANCE
        if recompute.startswith("attention"):
            mass = small_oracle().question_attention(layout, mask=mask)
            visible = [planned for planned in choices.plan.spans if planned.span.is_document and not planned.is_hidden]
            want = [mass[p.start : p.start + p.num_tokens].split(4) for p in visible]
            got = [row for row in choices.scores[wave] if row]
            assert got == [pytest.approx([float(part.sum()) for part in parts], abs=1e-4) for parts in want]
    engine.check_idle()


# Together with everything else ---------------------------------------------------------------------------------------


@given(
    shorthands=st.lists(
        st.sampled_from(["p5 d9 d16 t3", "p5 d16 d9 t5", "p5 d9 t4 d17 d9 t2", "d16 d9 t9", "p5 d30 t1"]),
        min_size=1,
        max_size=4,
    ),
    recomputes=st.lists(
        st.sampled_from(["none", "first:1", "first:9", "deviation:0.3", "attention:0.3", "attention:1"]),
        min_size=4,
        max_size=4,
    ),
    method=st.sampled_from(SHARED_METHODS),
    block_size=st.sampled_from([4, 8]),
    num_tokens=st.integers(130, 300),
    max_num_batched_tokens=st.sampled_from([5, 16, 2048]),
    encoding=st.sampled_from(["after_preamble", "isolated"]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_mix_in_a_tight_pool(
    shorthands, recomputes, method, block_size, num_tokens, max_num_batched_tokens, encoding
):
    engine = make_engine(
        block_size=block_size,
        num_blocks=num_tokens // block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        encoding=encoding,
    )
    requests = [
        (f"{index}", shorthand, recompute, method)
        for index, (shorthand, recompute) in enumerate(zip(shorthands, recomputes, strict=False))
    ]
    errors, _, choices = errors_of(engine, small_oracle(), requests, encoding=encoding)
    assert_small(errors)
    assert choices.num_choices <= len(requests), "once chosen, blocks stay chosen"


@pytest.mark.parametrize("recompute", ["first:8", "deviation:0.4", "attention:0.4"])
def test_preemption_at_any_step_keeps_the_choice(recompute):
    layout = prompt("p11 d33 d9 t20")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    calm = make_engine(max_num_batched_tokens=16)
    calm_choices = Choices(calm)
    want = answer(calm, layout, params, recompute=recompute).outputs[0].token_ids
    for num_steps in range(1, 30):
        engine = make_engine(max_num_batched_tokens=16)
        choices = Choices(engine)
        engine.add_request("one", layout, params, recompute=recompute)
        for _ in range(num_steps):
            engine.step()
        if not engine.scheduler.has_work:
            break
        if engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[0])
            engine.cache.clear()
        assert drain(engine)["one"].outputs[0].token_ids == want
        assert choices.num_choices == 1
        for got_row, want_row in zip(choices.scores["one"] or (), calm_choices.scores["only"] or (), strict=True):
            assert got_row == pytest.approx(want_row)
        engine.check_idle()
    assert num_steps > 6


@pytest.mark.parametrize("recompute", ["first:8", "deviation:0.4", "attention:0.4"])
def test_an_end_at_any_step_leaves_nothing_behind(recompute):
    for num_steps in range(0, 30, 2):
        for end in ("abort", "delete", "deadline"):
            engine = make_engine(max_num_batched_tokens=16)
            engine.add_request("one", prompt("p11 d33 d9 t20"), GREEDY, recompute=recompute, deadline_s=1e12)
            engine.add_request("two", prompt("p11 d9 d33 t7"), GREEDY)
            outputs = {}
            for _ in range(num_steps):
                outputs |= {output.request_id: output for output in engine.step()}
            if "one" not in engine.live_request_ids:
                return
            if end == "abort":
                engine.abort("one")
            elif end == "delete":
                engine.documents.delete("d33")
            else:
                engine._groups["one"].deadline_s = 0.0
                engine._next_housekeeping_s = 0.0
            outputs |= drain(engine)
            assert (
                outputs["one"].outputs[0].finish_reason
                == {"abort": "abort", "delete": "length", "deadline": "error"}[end]
            )
            assert outputs["two"].outputs[0].finish_reason == "length"
            engine.check_idle()
            if end == "delete" and num_steps:
                assert "d33" not in [info.document_id for info in engine.documents.list()]


def test_a_failing_selection_ends_its_request_alone(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(block_chooser, "kv_deviations", fail)
    engine = make_engine()
    engine.add_request("one", prompt("p11 d33 t5"), GREEDY, recompute="deviation:0.4")
    engine.add_request("two", prompt("p11 d33 t7"), GREEDY)
    outputs = drain(engine)
    assert "out of memory" in str(outputs["one"].error)
    assert outputs["two"].error is None
    engine.check_idle()


def test_one_selection_pass_a_step():
    """Others wait for one pass at most, however many requests select."""
    engine = make_engine()
    answer(engine, prompt("p11 d33 d9 t5"), request_id="warm")
    choices = Choices(engine)
    for index in range(4):
        engine.add_request(f"{index}", prompt("p11 d9 d33 t5"), GREEDY, recompute="deviation:0.4")
    counts = []
    while engine.has_work:
        before = choices.num_choices
        engine.step()
        counts.append(choices.num_choices - before)
    assert max(counts) == 1
    assert sum(counts) == 4


def test_siblings_choose_once():
    engine = make_engine()
    choices = Choices(engine)
    params = SamplingParams(temperature=0.0, max_tokens=4, n=3, ignore_eos=True)
    output = answer(engine, prompt("p11 d33 d9 t5"), params, recompute="attention:0.4")
    assert choices.num_choices == 1
    assert len({tuple(one.token_ids) for one in output.outputs}) == 1
    engine.check_idle()


@pytest.mark.parametrize(
    ("shorthand", "recompute", "num_blocks"),
    [
        ("d8 d8-b t5", "none", 6),
        ("d8 d8-b t5", "first:1", 8),
        ("d8 d8-b t5", "deviation:0.6", 9),
        # A chunk of which nothing is read is not stored.
        ("d8 d4 t5", "none", 5),
        ("d8 d4 t5", "first:1", 6),
    ],
)
def test_room_is_counted_with_the_private_blocks(shorthand, recompute, num_blocks):
    """Chunks, private blocks, and two blocks for question and answer, of four tokens each."""
    engine = make_engine(block_size=4, num_blocks=num_blocks)
    assert answer(engine, prompt(shorthand), recompute=recompute).error is None
    engine = make_engine(block_size=4, num_blocks=num_blocks - 1)
    with pytest.raises(RequestError, match=f"needs {num_blocks} KV blocks .* can never fit"):
        engine.add_request("one", prompt(shorthand), GREEDY, recompute=recompute)
