# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "[0, 100]"),
        ("temperature", float("nan"), "[0, 100]"),
        ("temperature", "hot", "[0, 100]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.5, "(0, 1]"),
        ("min_p", -1, "[0, 1]"),
        ("repetition_penalty", 0, "(0, 100]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -3, "[-2, 2]"),
        ("top_k", -2, "between -1 and"),
        ("top_k", 1.5, "between -1 and"),
        ("top_k", 2**31, "between -1 and"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", True, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("seed", 2**63, "between"),
        ("logprobs", 21, "between 0 and 20"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [3], "non-empty"),
        ("stop_token_ids", [-1], "at least 0"),
        ("logit_bias", {5: 101}, "[-100, 100]"),
        ("logit_bias", {-5: 1}, "at least 0"),
        ("logits_processors", ["x"], "callables"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert field in message
    assert allowed in message


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 9, must be at most max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_one_stop_string_becomes_a_tuple():
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_params_are_frozen_and_comparable():
    params = SamplingParams(stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.stop = "y"
    assert params == SamplingParams(stop=["x"])


def test_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy
