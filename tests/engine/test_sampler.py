# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from scipy.stats import chisquare

from lazyattention.engine.logits import apply_penalties, gumbel_noise, mask_unlikely
from lazyattention.engine.sampler import Sampler, SamplingRow, seed_key
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import LazyAttentionError, RequestError

VOCAB_SIZE = 37


def make_row(prompt=(), output=(), key=7, **params):
    return SamplingRow(SamplingParams(**params), prompt, output, key)


def pick(logits, row):
    return Sampler().sample(logits.unsqueeze(0), [row])[0]


def draws(logits, num_draws, **params):
    """Token ids of `num_draws` independent draws from one row of logits."""
    params = SamplingParams(**params)
    rows = [SamplingRow(params, (), (), seed_key(i)) for i in range(num_draws)]
    return [token.token_id for token in Sampler().sample(logits.expand(num_draws, -1), rows)]


def assert_distribution(token_ids, probabilities):
    counts = torch.bincount(torch.tensor(token_ids), minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities[probabilities > 0].double()
    result = chisquare(counts[probabilities > 0].numpy(), (expected / expected.sum() * len(token_ids)).numpy())
    assert result.pvalue > 1e-3, result


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 150_001])  # 16 bits hold fewer numbers
def test_greedy_picks_the_largest_logit(dtype, vocab_size):
    logits = torch.randn(5, vocab_size).to(dtype)
    logits[0, -2] = 100.0
    tokens = Sampler().sample(logits, [make_row(temperature=0)] * 5)
    assert [token.token_id for token in tokens] == logits.argmax(1).tolist()


def test_logits_are_not_changed():
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    row = make_row(
        prompt=[1], output=[2], repetition_penalty=2.0, logit_bias={3: 5.0}, min_tokens=2, stop_token_ids=[4]
    )
    Sampler().sample(logits, [row, make_row(temperature=0)])
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens():
    assert Sampler().sample(torch.empty(0, VOCAB_SIZE), []) == []


def test_row_count_must_match():
    with pytest.raises(ValueError, match=r"expected \[2, vocab_size\]"):
        Sampler().sample(torch.zeros(1, VOCAB_SIZE), [make_row()] * 2)


# Distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature):
    logits = torch.randn(VOCAB_SIZE)
    assert_distribution(draws(logits, 20000, temperature=temperature), torch.softmax(logits / temperature, 0))


def test_draws_along_one_sequence_follow_the_softmax():
    logits = torch.randn(VOCAB_SIZE)
    params, key = SamplingParams(), seed_key(3)
    rows = [SamplingRow(params, (), range(i), key) for i in range(20000)]
    tokens = Sampler().sample(logits.expand(len(rows), -1), rows)
    assert_distribution([token.token_id for token in tokens], torch.softmax(logits, 0))


def test_neighbouring_draws_are_independent():
    tokens = torch.tensor(draws(torch.zeros(8), 40000))
    pairs = tokens[:-1] * 8 + tokens[1:]
    assert_distribution(pairs.tolist(), torch.full((64,), 1 / 64))


def test_uniform_draws_over_a_large_vocabulary_have_no_favourite_region():
    tokens = torch.tensor(draws(torch.zeros(10000), 1000)) // 500
    assert_distribution(tokens.tolist(), torch.full((20,), 1 / 20))


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 3000])
def test_top_k_draws_among_the_k_likeliest(vocab_size):
    logits = torch.randn(vocab_size)
    kept = logits >= logits.topk(5).values[-1]
    assert_distribution(draws(logits, 2000, top_k=5), torch.softmax(logits.masked_fill(~kept, -math.inf), 0))


def nucleus(logits, top_p):
    """First principles: the shortest list of likeliest tokens whose probabilities reach top_p."""
    probabilities = torch.softmax(logits.double(), 0)
    kept, mass = torch.zeros_like(probabilities), 0.0
    for token_id in probabilities.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token_id] = probabilities[token_id]
        mass += float(probabilities[token_id])
    return kept / kept.sum()


@pytest.mark.parametrize(("vocab_size", "top_p"), [(VOCAB_SIZE, 0.3), (VOCAB_SIZE, 0.9), (3000, 0.05), (3000, 0.9)])
def test_top_p_keeps_the_shortest_list_that_reaches_it(vocab_size, top_p):
    logits = torch.randn(vocab_size)
    masked = mask_unlikely(logits.unsqueeze(0), torch.tensor([vocab_size]), torch.tensor([top_p]), torch.tensor([0.0]))[
        0
    ]
    assert torch.equal(masked > -math.inf, nucleus(logits, top_p) > 0)
    if vocab_size == VOCAB_SIZE:
        assert_distribution(draws(logits, 10000, top_p=top_p), nucleus(logits, top_p))


def test_top_p_counts_what_top_k_left():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    masked = mask_unlikely(logits.unsqueeze(0), torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.0]))
    # 0.4 / 0.7 is beyond one half; without renormalisation 0.4 is not.
    assert (masked > -math.inf).tolist() == [[True, False, False, False]]


def test_top_k_larger_than_the_searched_head_is_exact():
    logits = torch.randn(1, 5000)
    masked = mask_unlikely(logits, torch.tensor([2500]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert int((masked > -math.inf).sum()) == 2500


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert_distribution(draws(logits, 5000, min_p=0.4), torch.tensor([0.625, 0.375, 0.0, 0.0]))


def test_one_likeliest_token_is_certain_whatever_the_noise():
    logits = torch.full((VOCAB_SIZE,), -math.inf)
    logits[11] = 0.0
    assert set(draws(logits, 2000)) == {11}
    ordinary = torch.randn(VOCAB_SIZE)
    assert set(draws(ordinary, 500, top_k=1)) == {int(ordinary.argmax())}


def test_noise_equals_plain_integer_arithmetic():
    def mix(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) % 2**32
        return x ^ (x >> 16)

    key = (0x1234567, -0x7654321)
    noise = gumbel_noise(torch.tensor([key], dtype=torch.int32), 50)[0]
    for token_id in range(50):
        bits = mix(mix(token_id ^ key[0] % 2**32) ^ key[1] % 2**32)
        uniform = ((bits & 0x7FFFFFFF) + 0.5) / 2**31
        assert noise[token_id].item() == pytest.approx(-math.log(-math.log1p(-uniform)), abs=1e-4)


# Reproducibility


def test_a_row_draws_the_same_alone_and_in_any_batch():
    logits = torch.randn(12, 2000)
    rows = [
        make_row(output=range(i), key=i, top_p=0.9 if i % 2 else 1.0, top_k=50 if i % 3 else -1, temperature=0.1 * i)
        for i in range(12)
    ]
    together = Sampler().sample(logits, rows)
    order = torch.randperm(12).tolist()
    shuffled = Sampler().sample(logits[order], [rows[i] for i in order])
    assert [together[i] for i in order] == shuffled
    assert together == [Sampler().sample(logits[i : i + 1], [rows[i]])[0] for i in range(12)]


def test_draws_change_with_the_seed_and_with_the_output_length():
    logits = torch.zeros(1000)
    tokens = {pick(logits, make_row(key=seed_key(s), output=range(n))).token_id for s in range(5) for n in range(5)}
    assert len(tokens) > 20


def test_completions_of_one_request_have_keys_of_their_own():
    assert len({seed_key(5, index) for index in range(10)}) == 10
    assert seed_key(5, 1) == seed_key(5, 1)
    assert seed_key(-1) != seed_key(1)
    assert seed_key(None) != seed_key(None)


# Penalties, bias, stops


def test_penalties_follow_their_definitions():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]])
    apply_penalties(logits, [[0, 1, 99]], [[2, 2, 4]], torch.tensor([[2.0, 0.25, 0.5]]))
    # Positive logits are divided, negative multiplied; the output's tokens lose presence once and frequency per count.
    expected = [[1.0, -4.0, 0.5 - 0.25 - 1.0, 0.5, 1.5 - 0.25 - 0.5]]
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_penalties_touch_their_own_row_only():
    logits = torch.zeros(3, 4)
    logits[:, 1] = 1.0
    rows = [
        make_row(temperature=0),
        make_row(temperature=0, output=[1], presence_penalty=1.5),
        make_row(temperature=0, output=[1]),
    ]
    assert [t.token_id for t in Sampler().sample(logits, rows)][::2] == [1, 1]
    assert Sampler().sample(logits, rows)[1].token_id != 1


def test_repetition_penalty_sees_the_prompt_and_the_others_do_not():
    logits = torch.tensor([1.0, 0.9])
    assert pick(logits, make_row(prompt=[0], temperature=0, repetition_penalty=2.0)).token_id == 1
    assert pick(logits, make_row(prompt=[0], temperature=0, presence_penalty=2.0)).token_id == 0


def test_logit_bias_is_added():
    assert pick(torch.zeros(5), make_row(temperature=0, logit_bias={3: 1.0})).token_id == 3
    assert pick(torch.tensor([9.0, 1.0]), make_row(temperature=0, logit_bias={0: -100})).token_id == 1


def test_stops_are_not_picked_before_min_tokens():
    sampler = Sampler(eos_token_ids=[2])
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])

    def token(output, **params):
        return sampler.sample(logits, [make_row(output=output, temperature=0, **params)])[0].token_id

    assert token([], min_tokens=2, stop_token_ids=[3]) == 1
    assert token([0], min_tokens=2) == 3
    assert token([0, 0], min_tokens=2, stop_token_ids=[3]) == 2
    assert token([], min_tokens=2, ignore_eos=True) == 2


def test_processors_see_the_output_and_their_result_counts():
    seen = []

    def forbid_last(output_token_ids, logits):
        seen.append(list(output_token_ids))
        return logits.index_fill(0, torch.tensor(output_token_ids[-1:]), -math.inf)

    row = make_row(output=[4, 1], temperature=0, logits_processors=[forbid_last])
    assert pick(torch.tensor([0.0, 5.0, 3.0]), row).token_id == 2
    assert seen == [[4, 1]]


# Log-probabilities


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    logits = torch.randn(3, VOCAB_SIZE)
    rows = [
        make_row(temperature=0, logprobs=4),
        make_row(temperature=0.3, logprobs=0, output=[1], presence_penalty=1.0, logit_bias={1: 50}),
        make_row(temperature=0),
    ]
    reference = torch.log_softmax(logits, 1)
    first, second, third = Sampler().sample(logits, rows)
    ranked = reference[0].sort(descending=True)
    assert [token_id for token_id, _ in first.logprobs.top] == ranked.indices[:4].tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(ranked.values[:4].tolist(), abs=1e-5)
    assert second.token_id == 1
    assert second.logprobs.logprob == pytest.approx(reference[1, 1].item(), abs=1e-5)
    assert second.logprobs.top == ()
    assert third.logprobs is None


# Failures


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_bad_logits_fail_their_own_row(bad, temperature):
    logits = torch.randn(3, VOCAB_SIZE)
    expected = Sampler().sample(logits, [make_row(temperature=temperature)] * 3)
    logits[1, 5] = bad
    tokens = Sampler().sample(logits, [make_row(temperature=temperature)] * 3)
    assert isinstance(tokens[1].error, LazyAttentionError)
    assert "logits contain" in str(tokens[1].error)
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


def test_a_row_with_no_token_left_says_so():
    token = pick(torch.zeros(2), make_row(min_tokens=1, stop_token_ids=[0, 1]))
    assert "no token is left" in str(token.error)


def test_bias_beyond_the_vocabulary_is_named():
    token = pick(torch.zeros(4), make_row(logit_bias={4: 1.0}))
    assert isinstance(token.error, RequestError)
    assert "token 4, the vocabulary ends at 3" in str(token.error)


def test_a_failing_processor_ends_its_own_request():
    def fail(output_token_ids, logits):
        raise KeyError("grammar")

    rows = [make_row(logits_processors=[fail]), make_row(), make_row(logits_processors=[lambda ids, x: x[:1]])]
    tokens = Sampler().sample(torch.zeros(3, 4), rows)
    assert "grammar" in str(tokens[0].error)
    assert tokens[1].error is None
    assert "returned shape (1,)" in str(tokens[2].error)
